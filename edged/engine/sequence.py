"""A sequence: one request's tokens, pages, status and timing while the engine works on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from edged.cache.prefix_trie import Key
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.state import ZEROS
from edged.engine.lora.segments import NO_SLOT
from edged.engine.request import FinishEvent, FinishReason, Request
from edged.engine.sampling.draft_lookup import Draft, DraftLookup
from edged.engine.sampling.params import SamplingRow, TokenCounts
from edged.scheduler.task import ServingTask
from edged.text.grammar import GrammarMatcher

NOT_SHARED = -1
"""The K/V version of rows that no other sequence may use."""


class SequenceStatus(Enum):
    """The status of a sequence, from its request's arrival to its last event; `SequenceTable.move` alone changes it."""

    ARRIVED = auto()
    WAITING_ADAPTER = auto()
    """The sequence's adapter, or what takes the place of its version, is being read from disk."""
    WAITING_PREFIX = auto()
    """Another sequence is computing the beginning of its prompt."""
    WAITING = auto()
    """The scheduler has the sequence, which holds no pages."""
    WAITING_SLOT = auto()
    """The sequence found no LoRA slot; the scheduler does not have it meanwhile, so that others get its tokens."""
    SLOT_OFFERED = auto()
    """The scheduler has the sequence again, since a slot is idle."""
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()

    def may_become(self, status: SequenceStatus) -> bool:
        """Whether `status` may follow this one."""
        return self is not SequenceStatus.FINISHED and (status is SequenceStatus.FINISHED or status in _NEXT[self])


_TO_SCHEDULE = {SequenceStatus.WAITING_ADAPTER, SequenceStatus.WAITING_PREFIX, SequenceStatus.WAITING}
_TO_BEGIN = {SequenceStatus.WAITING_ADAPTER, SequenceStatus.WAITING_SLOT, SequenceStatus.PREFILL}
_NEXT = {
    SequenceStatus.ARRIVED: _TO_SCHEDULE,
    SequenceStatus.WAITING_ADAPTER: _TO_SCHEDULE,
    SequenceStatus.WAITING_PREFIX: {SequenceStatus.WAITING_PREFIX, SequenceStatus.WAITING},
    SequenceStatus.WAITING: _TO_BEGIN,
    SequenceStatus.WAITING_SLOT: {SequenceStatus.SLOT_OFFERED},
    SequenceStatus.SLOT_OFFERED: _TO_BEGIN,
    SequenceStatus.PREFILL: {SequenceStatus.DECODE, SequenceStatus.WAITING},
    SequenceStatus.DECODE: {SequenceStatus.WAITING},
}
"""The statuses that may follow each one, besides FINISHED, which may follow any other."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: `token_ids` are its prompt and answer; `pages` hold K/V of the first `computed` of them."""

    request: Request
    task: ServingTask
    seed: int
    submitted_s: float
    token_ids: list[int]
    table: np.ndarray
    """`pages` as an array; entries past their number are meaningless."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    compacted: PrunedLayout | None = None
    """Layout of the K/V in its first pages, once it was pruned."""
    watch: AttentionStats | None = None
    """Observed attention of its heads and rows, if it may be pruned soon."""
    counts: TokenCounts | None = None
    """Counts of its tokens, where penalties need them."""
    lookup: DraftLookup = field(default_factory=DraftLookup)
    matcher: GrammarMatcher | None = None
    """The state of its grammar, which follows `token_ids`."""
    scored: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, where they are asked for."""
    draft: Draft | None = None
    """Tokens that the next iteration tries beside the latest one."""
    slot: int = NO_SLOT
    state: int = ZEROS
    """Slot of its layers' states, where layers keep any and it has begun."""
    borders: tuple[int, ...] = ()
    """Numbers of its tokens at which a chunk ends, so that the states there can be copied."""
    copied: int = 0
    """After how many of its tokens its states were copied last."""
    interim: int = 0
    """After how many of its tokens the copy is that the next one takes the place of; 0: there is none."""
    version: int = 0
    kv_version: int = 0
    """The version under which the first K/V row was computed; differs from `version` after a hot update, and in a
    talk that goes on over the K/V of an earlier version."""
    pinned: bool = False
    """Whether it finishes on the version that it started with, even if it is preempted."""
    forgotten: bool = False
    """Whether its user or adapter was forgotten, so that its K/V must not be shared."""
    status: SequenceStatus = SequenceStatus.ARRIVED
    cached_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ttft_due_s: float = 0.0

    @property
    def admitted(self) -> bool:
        """Whether it may hold pages."""
        return self.status is SequenceStatus.PREFILL or self.status is SequenceStatus.DECODE

    @property
    def decoding(self) -> bool:
        """Whether its whole prompt is computed."""
        return self.status is SequenceStatus.DECODE

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the request's prompt."""
        return len(self.request.prompt_ids)

    @property
    def generated(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.token_ids) - self.prompt_tokens

    def unscored(self, first: int, num_tokens: int) -> range:
        """Return the positions, of so many from `first` on, whose next token is one of the prompt's to be scored."""
        wanted = self.request.sampling.prompt_logprobs
        return range(max(first, len(self.scored)), min(first + num_tokens, self.prompt_tokens - 1) if wanted else 0)

    @property
    def trie_key(self) -> Key:
        """The key under which its pages may be shared."""
        return self.key_under(self.kv_version)

    def key_under(self, version: int) -> Key:
        """Return the key of K/V that `version` of its adapter computes; all untrained adapters answer as the base."""
        return Key(self.request.adapter if version else None, version, self.request.tenant)

    @property
    def shareable(self) -> bool:
        """Whether its K/V are complete, and were computed under one version, or by later ones over an earlier one's."""
        # What an adapter computes over K/V of the base is nobody else's.
        return self.compacted is None and (self.version == self.kv_version or self.kv_version > 0)

    @property
    def rows(self) -> int:
        """Number of K/V rows that it holds, on the mean of its heads."""
        return self.computed - self.compacted.removed if self.compacted else self.computed

    def add_pages(self, pages: list[int]) -> None:
        """Append pages to the page table."""
        first = len(self.pages)
        self.pages += pages
        self.table[first : first + len(pages)] = pages

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """Update the page table after the pool moved pages: `moved` maps old numbers to new ones."""
        self.pages = [moved.get(page, page) for page in self.pages]
        self.table[: len(self.pages)] = self.pages

    def compact(self, pages: list[int], old: int, compacted: PrunedLayout) -> None:
        """Replace its first `old` pages by `pages`, into which they were compacted."""
        self.pages = pages + self.pages[old:]
        self.table[: len(self.pages)] = self.pages
        self.compacted = compacted

    def row(self, end_ids: frozenset[int], ahead: int = 0) -> SamplingRow:
        """Return how the token after its next `ahead` ones is to be sampled; those must not count for penalties."""
        s, step = self.request.sampling, self.generated + ahead
        early = step < s.min_tokens
        return SamplingRow(
            sampling=s,
            seed=self.seed,
            step=step,
            counts=self._counted() if s.penalizes else None,
            forbidden=tuple(end_ids.union(s.stop_token_ids)) if early else (),
            matcher=self.matcher,
            draft=self.draft.tokens[:ahead] if self.draft is not None else (),
        )

    def _counted(self) -> TokenCounts:
        """Return the counts of its tokens; only the repetition penalty needs those of the prompt."""
        if self.counts is None:
            repetition = self.request.sampling.repetition_penalty != 1.0
            self.counts = TokenCounts(self.request.prompt_ids if repetition else ())
        self.counts.extend(self.token_ids[self.prompt_tokens + self.counts.generated :])
        return self.counts

    def end(self, token: int, end_ids: frozenset[int], max_context: int) -> FinishReason | None:
        """Return the reason to end with `token` as the latest, or None."""
        s = self.request.sampling
        if token in s.stop_token_ids or (token in end_ids and not s.ignore_eos):
            return "stop"
        if self.generated >= s.max_tokens or len(self.token_ids) >= max_context:
            return "length"
        return None

    def finish(self, reason: FinishReason, now: float, error: str = "") -> FinishEvent:
        """Make its last event."""
        return FinishEvent(
            request_id=self.request.request_id,
            reason=reason,
            error=error,
            adapter=self.request.adapter,
            version=self.version,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.generated,
            queue_s=(self.started_s or now) - self.submitted_s,
            ttft_s=self.first_token_s - self.submitted_s if self.first_token_s else 0.0,
            total_s=now - self.submitted_s,
            reader=self.task.reader,
        )
