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
from examples.quickstart.daemon import TemporaryDaemon
from examples.quickstart.fluency import load
from examples.quickstart.lessons import CANDIDATES, DEMO, THINK_S, Lesson, Taste

CHAT = "/v1/chat/completions"
CLEARLY_BETTER = 1.0
"""Least difference of scores at which a user picks."""
MAX_OPEN = 8
"""Largest number of open application requests: a slow machine gets less load, not a growing queue."""


@dataclass
class Exchange:
    """The last choice that a user made."""

    question: str = ""
    chosen: str = ""
    rejected: str = ""


class Crowd:
    """All users and applications: starts the threads, keeps the users' last exchanges, and stops.

    `requests_per_s` is the applications' load: Poisson arrivals, of which at most MAX_OPEN run at once.
    """

    def __init__(self, daemon: TemporaryDaemon, seed: int, requests_per_s: float, lesson: Lesson = DEMO) -> None:
        self.lesson = lesson
        self.exchanges = {taste.user: Exchange() for taste in lesson.tastes}
        self.failure: str = ""
        self._daemon = daemon
        self._stop = threading.Event()
        self._free = threading.Semaphore(MAX_OPEN)
        roles: list[tuple[Any, ...]] = [
            (self._user, taste, seed, number) for number in range(lesson.conversations) for taste in lesson.tastes
        ]
        roles.append((self._applications, seed, requests_per_s))
        self._threads = [threading.Thread(target=self._run, args=role, daemon=True) for role in roles]

    def start(self) -> None:
        """Start all threads; loading the model that judges the demo model's answers takes seconds first."""
        if self.lesson.judges_fluency:
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
        questions = self.lesson.questions(rng.randrange(2**32), False)
        with self._daemon.client() as client:
            while not self._stop.is_set():
                body = {**self._body(next(questions)), "user": taste.user, "n": CANDIDATES}
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
        questions = self.lesson.questions(seed + 100, False)
        while not self._stop.wait(rng.expovariate(requests_per_s)):
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._run, args=(self._application, next(questions)), daemon=True).start()

    def _application(self, question: str) -> None:
        try:
            with self._daemon.client() as client:
                for _ in client.events(CHAT, {**self._body(question), "stream": True}):
                    if self._stop.is_set():
                        return
        finally:
            self._free.release()

    def _body(self, question: str) -> dict[str, Any]:
        return _body(question, self.lesson.max_tokens, self.lesson.temperature)


@dataclass
class Exam:
    """An exam: the same questions for all users before and after; no user was trained on them."""

    questions: list[str]
    before: list[str]
    after: dict[str, list[str]] = field(default_factory=dict)
    lesson: Lesson = DEMO

    @classmethod
    def sit(cls, daemon: TemporaryDaemon, seed: int, count: int, lesson: Lesson) -> Exam:
        """Ask the base model `count` questions that neither its training nor a user's has seen."""
        fresh = lesson.questions(seed, True)
        exam = cls([next(fresh) for _ in range(count)], [], lesson=lesson)
        exam.before = exam._answers(daemon, "")
        return exam

    def repeat(self, daemon: TemporaryDaemon, user: str) -> None:
        """Ask the same questions for the user."""
        self.after[user] = self._answers(daemon, user)

    def shown(self, taste: Taste) -> int:
        """Return the question to show this user: the one whose first answer fitted their taste least."""
        scores = list(map(taste.score, self.questions, self.before))
        return scores.index(min(scores))

    def liking(self, taste: Taste, texts: list[str]) -> float:
        """Return the mean score of answers, -2 to 2."""
        return sum(map(taste.score, self.questions, texts)) / len(texts)

    def broken(self, texts: list[str]) -> list[str]:
        """Return the answers that are not fluent."""
        return [text for asked, text in zip(self.questions, texts, strict=True) if self.lesson.is_broken(asked, text)]

    def _answers(self, daemon: TemporaryDaemon, user: str) -> list[str]:
        """Return the answers to the questions. Raises DaemonError."""

        def answer(question: str) -> str:
            body = _body(question, self.lesson.max_tokens, self.lesson.exam_temperature)
            with daemon.client() as client:
                response = client.post(CHAT, {**body, "user": user} if user else body)
            return _texts(response)[0]

        # An answer is chosen among candidates only while no other request waits.
        at_once = 1 if user and self.lesson.exam_temperature else len(self.questions)
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(answer, self.questions))


def _texts(response: dict[str, Any]) -> list[str]:
    return [str(choice["message"]["content"]) for choice in response["choices"]]


def _body(question: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
