"""Talks whose K/V a new version of their adapter voids, and that are computed again while nobody is served."""

from __future__ import annotations

from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.engine.sequence import Sequence
from edged.scheduler.task import ServiceClass

_GOES_ON_S, _TALKS, _PAUSE = 600.0, 64, 3.0
"""Seconds after an answer in which its talk is expected to go on; adapters whose latest talks are known; the pause
between two renewals beside other work, in times what the first took."""


class Renewals:
    """The latest talk of each adapter, and which of them are to be computed again."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._talks: dict[str, tuple[float, Request]] = {}
        """When the latest answer of an adapter ended, and the request with all its tokens; the oldest first."""
        self._stale: dict[str, None] = {}
        """Adapters with a version that did not compute the K/V of their latest talk."""
        self._resumes_s = 0.0
        """When the next one may begin beside training or candidates: they have most of the time."""
        self.running: Sequence | None = None

    @property
    def pending(self) -> bool:
        """Whether one runs or is to run."""
        return bool(self._stale or self.running)

    def note(self, sequence: Sequence, version: int, now: float) -> None:
        """Remember an answer's talk as the latest of its adapter, of which `version` is served now."""
        request = sequence.request
        if request.adapter is None or request.candidate or sequence.forgotten or not sequence.first_token_s:
            return
        talk = Request(
            f"renewal of {request.adapter}",
            tuple(sequence.token_ids[: self._max_context - 1]),
            Sampling(max_tokens=1),
            request.adapter,
            ServiceClass.BATCH,
            request.tenant,
            request.user,
            fairness_key="(renewal)",
            candidate=True,
            delivery="none",
        )
        self._talks.pop(request.adapter, None)
        self._talks[request.adapter] = now, talk
        self._forget_old(now)
        self._stale.pop(request.adapter, None)
        if sequence.kv_version != version or not sequence.shareable:
            self._stale[request.adapter] = None

    def on_version(self, adapter: str) -> None:
        """Hear of a new version; a renewal of its adapter is put off."""
        if adapter in self._talks:
            self._stale[adapter] = None

    def next(self, now: float, beside_work: bool) -> Request | None:
        """Return the next request that computes a talk again; None where there is none, or its pause is not over."""
        if not self._stale or self.running or (beside_work and now < self._resumes_s):
            return None
        adapter = next(iter(self._stale))
        del self._stale[adapter]
        self._forget_old(now)
        return self._talks[adapter][1] if adapter in self._talks else None

    def on_end(self, now: float) -> None:
        """Hear that the running one ended."""
        assert self.running is not None
        self._resumes_s = now + _PAUSE * (now - self.running.submitted_s)
        self.running = None

    def forget(self, name: str) -> None:
        """Forget the talks of a user or an adapter."""
        for adapter in [adapter for adapter, (_, talk) in self._talks.items() if talk.is_of(name)]:
            del self._talks[adapter]
            self._stale.pop(adapter, None)

    def _forget_old(self, now: float) -> None:
        """Forget the talks that are not expected to go on."""
        for adapter, (ended_s, _) in list(self._talks.items()):
            if now - ended_s < _GOES_ON_S and len(self._talks) <= _TALKS:
                return
            del self._talks[adapter]
