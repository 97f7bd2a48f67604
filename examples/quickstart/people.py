"""The users of the quickstart: two with opposite tastes who give feedback, and applications that only ask.

Each person runs in a thread with a connection of its own.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from edged.client.client import DaemonError
from examples.demo_model.dialogues import formality, prompts, uses_metric
from examples.quickstart.daemon import TemporaryDaemon
from examples.quickstart.fluency import is_fluent, load

CHAT = "/v1/chat/completions"
MAX_TOKENS = 96
CANDIDATES = 4
"""Number of answers that a user picks from."""
CLEARLY_BETTER = 1.0
"""Least difference of scores at which a user picks."""
THINK_S = (2.0, 4.0)
"""A user's shortest and longest time to read the candidates of one conversation."""
CONVERSATIONS = 3
"""Number of a user's simultaneous conversations."""
PACE = (
    f"each user keeps {CONVERSATIONS} conversations going, and in each thinks {THINK_S[0]:g} to {THINK_S[1]:g} s "
    f"before picking one of {CANDIDATES} answers"
)
BROKEN = -2.0
"""Score of an answer that is not fluent, under every taste."""
MAX_OPEN = 8
"""Largest number of open application requests: a slow machine gets less load, not a growing queue."""


@dataclass(frozen=True)
class Taste:
    """A user's taste: formal answers in metric units, or casual ones in imperial units."""

    user: str
    formal: bool
    colour: str

    def __str__(self) -> str:
        return "formal, in metric units" if self.formal else "casual, in imperial units"

    def score(self, question: str, text: str) -> float:
        """Return how well an answer fits this taste: -2 (not at all, or not fluent) to 2."""
        if not is_fluent(question, text):
            return BROKEN
        metric = uses_metric(text)
        units = 0.0 if metric is None else (1.0 if metric else -1.0)
        liking = formality(text) + units
        return liking if self.formal else -liking


TASTES = (Taste("ada", True, "bright_blue"), Taste("ben", False, "bright_yellow"))


@dataclass
class Exchange:
    """The last choice that a user made."""

    question: str = ""
    chosen: str = ""
    rejected: str = ""


class Crowd:
    """All users and applications: starts the threads, keeps the users' last exchanges, and stops.

    `requests_per_s` is the applications' load: Poisson arrivals, of which at most MOST_OPEN run at once.
    """

    def __init__(self, daemon: TemporaryDaemon, seed: int, requests_per_s: float) -> None:
        self.exchanges = {taste.user: Exchange() for taste in TASTES}
        self.failure: str = ""
        self._daemon = daemon
        self._stop = threading.Event()
        self._free = threading.Semaphore(MAX_OPEN)
        roles: list[tuple[Any, ...]] = [
            (self._user, taste, seed, number) for number in range(CONVERSATIONS) for taste in TASTES
        ]
        roles.append((self._applications, seed, requests_per_s))
        self._threads = [threading.Thread(target=self._run, args=role, daemon=True) for role in roles]

    def start(self) -> None:
        """Start all threads; loading the model that judges the answers takes seconds first."""
        load()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop all threads after their current request; returns when all have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30.0)

    def _run(self, role: Any, *arguments: Any) -> None:
        """Run a thread's body: the first failure is kept for the main thread to report."""
        try:
            role(*arguments)
        except DaemonError as error:
            if not self._stop.is_set():
                self.failure = self.failure or f"{error}; {self._daemon.log_end()}"

    def _user(self, taste: Taste, seed: int, conversation: int) -> None:
        """Ask, think, and pick the best of the adapter's candidates if they differ, over and over."""
        rng = random.Random(f"{seed} {taste.user} {conversation}")
        questions = prompts(rng.randrange(2**32), with_units=True)
        with self._daemon.client() as client:
            while not self._stop.is_set():
                body = {**_body(next(questions)), "user": taste.user, "n": CANDIDATES}
                answer = client.post(CHAT, body)
                self._stop.wait(rng.uniform(*THINK_S))
                question, texts = body["messages"][0]["content"], _texts(answer)
                scores = [taste.score(question, text) for text in texts]
                best, worst = scores.index(max(scores)), scores.index(min(scores))
                if scores[best] - scores[worst] >= CLEARLY_BETTER:
                    signal = {"completion_id": answer["id"], "signal": "chosen", "choice": best}
                    client.post("/v1/feedback", signal)
                    self.exchanges[taste.user] = Exchange(question, texts[best], texts[worst])

    def _applications(self, seed: int, requests_per_s: float) -> None:
        """Send questions to the base model at random moments."""
        rng = random.Random(seed)
        questions = prompts(seed + 100)
        while not self._stop.wait(rng.expovariate(requests_per_s)):
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._run, args=(self._application, next(questions)), daemon=True).start()

    def _application(self, question: str) -> None:
        try:
            with self._daemon.client() as client:
                for _ in client.events(CHAT, {**_body(question), "stream": True}):
                    if self._stop.is_set():
                        return
        finally:
            self._free.release()


@dataclass
class Exam:
    """An exam: the same questions for all users before and after, answered greedily; no user was trained on them."""

    questions: list[str]
    before: list[str]
    after: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def sit(cls, daemon: TemporaryDaemon, seed: int, count: int) -> Exam:
        """Ask the base model `count` questions that neither its training nor a user's has seen."""
        fresh = prompts(seed, fresh=True, with_units=True)
        questions = [next(fresh) for _ in range(count)]
        return cls(questions, _greedy(daemon, questions, ""))

    def repeat(self, daemon: TemporaryDaemon, user: str) -> None:
        """Ask the user's adapter the same questions."""
        self.after[user] = _greedy(daemon, self.questions, user)

    def shown(self, taste: Taste) -> int:
        """Return the question to show this user: the one whose first answer fitted their taste least."""
        scores = list(map(taste.score, self.questions, self.before))
        return scores.index(min(scores))

    def liking(self, taste: Taste, texts: list[str]) -> float:
        """Return the mean score of answers, -2 to 2."""
        return sum(map(taste.score, self.questions, texts)) / len(texts)

    def broken(self, texts: list[str]) -> list[str]:
        """Return the answers that are not fluent."""
        return [text for question, text in zip(self.questions, texts, strict=True) if not is_fluent(question, text)]


def _greedy(daemon: TemporaryDaemon, questions: list[str], user: str) -> list[str]:
    """Return the greedy answers to questions asked at once. Raises DaemonError."""

    def answer(question: str) -> str:
        body = {**_body(question), "temperature": 0.0}
        with daemon.client() as client:
            response = client.post(CHAT, {**body, "user": user} if user else body)
        return _texts(response)[0]

    with ThreadPoolExecutor(len(questions)) as threads:
        return list(threads.map(answer, questions))


def _texts(response: dict[str, Any]) -> list[str]:
    return [str(choice["message"]["content"]) for choice in response["choices"]]


def _body(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
