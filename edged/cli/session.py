"""A conversation with the daemon and the feedback on it: what `edged chat` and `edged ask` share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edged.client.client import Client, DaemonError

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Options:
    """How answers are asked for; None leaves a choice to the daemon."""

    user: str = ""
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as the daemon stored it. `cut` says that it ended at the token limit."""

    completion_id: str
    choice: int
    text: str
    cut: bool = False


class Session:
    """Messages so far, the last answer, and candidates that wait for a pick."""

    def __init__(self, client: Client, options: Options) -> None:
        self.client = client
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.answer: StoredAnswer | None = None
        self.open_candidates: list[StoredAnswer] = []
        self.clear()

    def clear(self) -> None:
        """Start over; only the system message stays."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []
        self.answer = None
        self.open_candidates = []

    def say(self, text: str) -> None:
        """Add the user's message; the next `stream` or `candidates` answers it."""
        self.messages.append({"role": "user", "content": text})
        self.answer = None
        self.open_candidates = []

    def stream(self) -> Iterator[str]:
        """Ask for an answer to the last question and yield its text in pieces; afterwards `answer` is set.

        When the iteration is left early, the daemon stops generating; a question without any answer is taken back.
        """
        pieces: list[str] = []
        completion_id, reason = "", ""
        try:
            for event in self.client.events(CHAT, {**self._body(), "stream": True}):
                completion_id = event["id"]
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        pieces.append(piece)
                        yield piece
        except BaseException:
            self._take_back()
            raise
        self._settle(StoredAnswer(completion_id, 0, "".join(pieces), reason == "length"))

    def candidates(self, count: int) -> dict[str, Any]:
        """Ask for `count` answers to the last question: the daemon's response object.

        They wait in `open_candidates` for `pick`.
        """
        try:
            response = self.client.post(CHAT, {**self._body(), "n": count})
        except BaseException:
            self._take_back()
            raise
        self.open_candidates = [
            StoredAnswer(
                response["id"], item["index"], item["message"]["content"] or "", item["finish_reason"] == "length"
            )
            for item in response["choices"]
        ]
        return response

    def pick(self, number: int) -> dict[str, Any]:
        """Choose candidate `number` (from 1): it becomes the answer, and the others are rejected in its favour."""
        if not 1 <= number <= len(self.open_candidates):
            raise DaemonError(f"there is no candidate {number}: choose 1 to {len(self.open_candidates)}")
        answer = self.open_candidates[number - 1]
        result = self._feedback(answer, "chosen")
        self._settle(answer)
        return result

    def progress(self, feedback_id: str) -> dict[str, Any]:
        """What became of a feedback's pairs so far."""
        return self.client.get(f"/v1/feedback/{feedback_id}")

    def rate(self, signal: str, text: str | None = None) -> dict[str, Any]:
        """Feedback on the last answer: "up", "down", or "edit" with the `text` that it should have been."""
        result = self._feedback(self.last_answer(), signal, text)
        if text is not None:
            self.messages[-1] = {"role": "assistant", "content": text}
        return result

    def regenerate(self) -> None:
        """Report that the last answer was not wanted (when there is a user to learn for); `stream` then replaces it."""
        answer = self.last_answer()
        if self.options.user:
            self._feedback(answer, "regenerate")

    def last_answer(self) -> StoredAnswer:
        """The answer that feedback is about. Raises DaemonError when there is none."""
        if self.answer is None:
            raise DaemonError("there is no answer yet to give feedback on")
        return self.answer

    def _settle(self, answer: StoredAnswer) -> None:
        self.messages = [*self._question(), {"role": "assistant", "content": answer.text}]
        self.answer = answer
        self.open_candidates = []

    def _take_back(self) -> None:
        """Drop a question that got no answer, so that the conversation stays well-formed."""
        if self.answer is None:
            self.messages.pop()

    def _question(self) -> list[dict[str, str]]:
        """The conversation up to the last question."""
        return self.messages if self.answer is None else self.messages[:-1]

    def _feedback(self, answer: StoredAnswer, signal: str, text: str | None = None) -> dict[str, Any]:
        if not self.options.user:
            raise DaemonError("feedback teaches one user's adapter: start with --user NAME")
        body: dict[str, Any] = {"completion_id": answer.completion_id, "choice": answer.choice, "signal": signal}
        return self.client.post("/v1/feedback", body if text is None else {**body, "text": text})

    def _body(self) -> dict[str, Any]:
        """The request for an answer to the last question. The model's name is left to the daemon, which serves one."""
        asked = {**asdict(self.options), "user": self.options.user or None}
        del asked["system"]
        return {"messages": self._question(), **{key: value for key, value in asked.items() if value is not None}}
