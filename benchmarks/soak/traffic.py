"""The load of a soak test: requests and feedback that arrive at random, and checks of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.soak.subject import MARKER

PROMPTS = [f"How do I {what}?" for what in ("cook rice", "fix a bike", "plant a tree", "greet a guest", "save water")]
USERS = ("ann", "ben", "cleo")
_TOKENS = 24
_FEEDBACK_SHARE = 1 / 20
"""Share of feedback, low enough that pairs are learned as they come: queued pairs take memory, too."""
_TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass(slots=True)
class Tally:
    """Counts of responses, and the wrong ones."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from the reference, and errors that were not expected."""
    acknowledged: set[int] = field(default_factory=set)


class Traffic:
    """A load of `rate_per_s` until `stop`; failures that `expected` names are not counted as wrong."""

    def __init__(self, socket: Path, seed: int) -> None:
        self.tally = Tally()
        self.expected: set[str] = set()
        """Kinds of failure that are expected at the moment: "disk", "down"."""
        self._socket, self._chance = socket, random.Random(seed)
        self._reference: dict[tuple[str, str], str] = {}
        self._pairs = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    async def capacity(self, clients: int = 8, seconds: float = 6.0) -> float:
        """Return the requests per second of `clients` that send without pause."""
        end, answered = time.monotonic() + seconds, 0

        async def ask() -> None:
            nonlocal answered
            while time.monotonic() < end:
                await self._ask(session)
                answered += 1

        async with self._session() as session:
            await asyncio.gather(*(ask() for _ in range(clients)))
        return answered / seconds

    async def run(self, rate_per_s: float) -> None:
        """Send questions and a share of feedback as a Poisson process."""
        async with self._session() as session:
            while not self._ended:
                await asyncio.sleep(self._chance.expovariate(rate_per_s))
                one = self._teach(session) if self._chance.random() < _FEEDBACK_SHARE else self._ask(session)
                task = asyncio.create_task(one)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        """Stop sending."""
        self._ended = True

    def forget_versions(self) -> None:
        """Forget versions after a restart: numbers of versions that were lost are reused."""
        self._reference = {key: text for key, text in self._reference.items() if key[0] == "base"}

    async def not_a_number(self) -> None:
        """Send a question whose activations are NaN: it must fail, and only it."""
        async with self._session() as session:
            body = {"prompt": [10, 11, 12, MARKER, MARKER, MARKER, 13, 14], "max_tokens": 4}
            status, answer = await self._post(session, "/v1/completions", body)
            if status and (status != 500 or "not finite" not in str(answer)):
                self.tally.wrong.append(f"a prompt that is not finite: {status} {str(answer)[:200]}")

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(str(self._socket), limit=0)
        return aiohttp.ClientSession(connector=connector, base_url="http://edged", timeout=_TIMEOUT)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        prompt, user = self._chance.choice(PROMPTS), self._chance.choice((None, *USERS))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"logit_bias": {str(MARKER): -100}} | ({"user": user} if user else {})
        status, answer = await self._post(session, "/v1/completions", body)
        if status != 200:
            self._failed(status, answer)
            return
        weights, text = answer["system_fingerprint"], answer["choices"][0]["text"]
        if user and weights != "base" and not weights.startswith(f"{user}@"):
            self.tally.wrong.append(f"{user} was answered by {weights}")
        wanted = self._reference.setdefault((weights, prompt), text)
        if text != wanted:
            self.tally.wrong.append(f"{weights} answers {prompt!r} with {text!r}, before with {wanted!r}")

    async def _teach(self, session: aiohttp.ClientSession) -> None:
        self._pairs += 1
        number, user = self._pairs, self._chance.choice(USERS)
        body = {"user": user, "prompt": f"question {number}", "chosen": f"good {number}", "rejected": f"bad {number}"}
        status, answer = await self._post(session, "/v1/feedback", body)
        if status == 200:
            self.tally.acknowledged.add(number)
        else:
            self._failed(status, answer)

    def _failed(self, status: int, answer: Any) -> None:
        code = answer.get("error", {}).get("code") if isinstance(answer, dict) else None
        announced = (status == 0 and "down" in self.expected) or status == 429
        announced |= status == 503 and code in ("loading", "draining", "cancelled") and "down" in self.expected
        announced |= status == 503 and code == "store_failed" and "disk" in self.expected
        if not announced:
            self.tally.wrong.append(f"status {status}: {str(answer)[:200]}")

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return (status, answer); status 0 if there was no answer."""
        status, answer = 0, None
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
            async with session.post(path, json=body) as response:
                answer = await response.json()
                status = response.status
        self.tally.statuses[f"{path} {status or 'no answer'}"] += 1
        return status, answer
