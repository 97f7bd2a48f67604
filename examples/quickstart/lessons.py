"""What is taught with which model: two opposite tastes, questions, and a load that the model bears."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from examples.demo_model.dialogues import formality, prompts, uses_metric
from examples.quickstart.fluency import is_fluent

CANDIDATES = 4
"""Number of answers that a user picks from."""
THINK_S = (2.0, 4.0)
"""A user's shortest and longest time to read the candidates of one conversation."""
BROKEN = -2.0
"""Score of an answer that is not fluent, under every taste."""
SHORT_WORDS, LONG_WORDS = 25, 40
"""An answer of at most this many words is short, of at least this many long."""

_QUESTIONS = (
    "What is the capital of Italy?",
    "Which planet is the largest?",
    "Is a tomato a fruit?",
    "Who wrote Romeo and Juliet?",
    "What is a good breakfast?",
    "How many days does a week have?",
    "What do bees make?",
    "Is coffee good for me?",
    "Can you recommend a hobby?",
    "What is the opposite of hot?",
    "How are you today?",
    "Do cats like water?",
    "What colour is the sky?",
    "Tell me a joke.",
    "Which animal barks?",
    "Should I take an umbrella today?",
    "What is a fraction?",
    "Suggest a name for a dog.",
    "What language do people speak in Brazil?",
    "Is it healthy to walk every day?",
    "What do plants need?",
    "I feel tired. Any advice?",
    "What is the best season to travel?",
    "Say hello to my friend.",
)
_NEW_QUESTIONS = (
    "What is the capital of France?",
    "Which animal says meow?",
    "Is tea good for me?",
    "Suggest a name for a cat.",
    "What do birds eat?",
    "I feel bored. Any advice?",
    "Who painted the Mona Lisa?",
    "Do dogs like snow?",
)
"""Questions of the exams alone."""


@dataclass(frozen=True)
class Taste:
    """A user's taste: `likes` says it in words, `score` a question's answer by it, from -2 (not at all) to 2."""

    user: str
    colour: str
    likes: str
    score: Callable[[str, str], float]

    def __str__(self) -> str:
        return self.likes


@dataclass(frozen=True)
class Lesson:
    """Two opposite tastes, the questions of a seed (those that nobody was taught by where True), and the load.

    `temperature` is that of the picked answers and `exam_temperature` that of the exams. Where it is above 0, edged
    chooses the answers by taste.
    """

    tastes: tuple[Taste, Taste]
    questions: Callable[[int, bool], Iterator[str]]
    max_tokens: int
    temperature: float
    exam_temperature: float
    conversations: int
    seconds: float
    requests_per_s: float
    judges_fluency: bool

    @property
    def pace(self) -> str:
        """A sentence on how fast users pick."""
        return (
            f"each user keeps {self.conversations} conversations going, and in each thinks {THINK_S[0]:g} to "
            f"{THINK_S[1]:g} s before picking one of {CANDIDATES} answers"
        )

    def is_broken(self, question: str, text: str) -> bool:
        """Whether an answer is not fluent, where fluency is judged."""
        return self.judges_fluency and not is_fluent(question, text)


def _formal_and_metric(sign: float, question: str, text: str) -> float:
    if not is_fluent(question, text):
        return BROKEN
    metric = uses_metric(text)
    units = 0.0 if metric is None else (1.0 if metric else -1.0)
    return sign * (formality(text) + units)


def _shortness(text: str) -> float:
    """Return 1 for a short answer, -1 for a long or an empty one, and between them what its words tell."""
    words = len(text.split())
    if not words:
        return -1.0
    return max(-1.0, min(1.0, 1.0 - 2.0 * (words - SHORT_WORDS) / (LONG_WORDS - SHORT_WORDS)))


def _short(question: str, text: str) -> float:
    return 2.0 * _shortness(text)


def _long_and_asking(question: str, text: str) -> float:
    if not text.split():
        return BROKEN
    return -1.5 * _shortness(text) + (0.5 if "?" in text else -0.5)


def _plain_questions(seed: int, fresh: bool) -> Iterator[str]:
    """Yield questions without end, in rounds of another order."""
    rng = random.Random(f"questions {seed}")
    known = list(_NEW_QUESTIONS if fresh else _QUESTIONS)
    while True:
        rng.shuffle(known)
        yield from known


DEMO = Lesson(
    tastes=(
        Taste("ada", "bright_blue", "formal, in metric units", partial(_formal_and_metric, 1.0)),
        Taste("ben", "bright_yellow", "casual, in imperial units", partial(_formal_and_metric, -1.0)),
    ),
    questions=partial(prompts, with_units=True),
    max_tokens=96,
    temperature=1.0,
    exam_temperature=0.0,
    conversations=3,
    seconds=90.0,
    requests_per_s=3.0,
    judges_fluency=True,
)
"""For the demo model, which mixes these styles evenly until it is taught."""
LENGTHS = Lesson(
    tastes=(
        Taste("ada", "bright_blue", f"short, in {SHORT_WORDS} words at most", _short),
        Taste("ben", "bright_yellow", "long, with a question back", _long_and_asking),
    ),
    questions=_plain_questions,
    max_tokens=56,
    temperature=0.7,
    exam_temperature=0.7,
    conversations=2,
    seconds=120.0,
    requests_per_s=0.1,
    judges_fluency=False,
)
"""For any other model."""
