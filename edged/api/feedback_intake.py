"""The feedback intake: it tokenizes stored pairs, submits them to the engine, and resumes them after a restart."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from sqlite_utils import Database

from edged.align.feedback.pair import PairRetired, Record, TokenPair
from edged.align.feedback.pair_tokens import UnusablePrompt, tokenize_pair
from edged.align.feedback.signals import FeedbackResult
from edged.align.journal import load_choices, load_pasts, requeue_lost
from edged.align.language import neutral_pairs
from edged.align.metrics import summaries
from edged.api.tastes import ALIKE
from edged.engine.engine import Engine
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store, utc_now
from edged.store.base_models import serve_base
from edged.store.feedback import PairRow, count_queued, get_pairs, open_pairs, set_pair_note, set_pair_state, taken_back
from edged.store.fleet.leases import adapters_elsewhere
from edged.store.jobs.jobs import open_jobs
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")

_PAIRS_AT_ONCE = 32
"""Pairs that the engine gets at once."""


@dataclass(eq=False)
class FeedbackIntake:
    """Submits stored pairs to the engine, on a thread. While learning is off they stay queued in the store.

    So do single ratings while `align.unpaired` is off.
    """

    store: Store
    tokenizer: Tokenizer
    engine: Engine
    settings: Live[Settings]
    ref_model: str
    """The base model's fingerprint: what was learned on another model waits until that one is served again."""
    on_records: Callable[[Sequence[Record]], None] = lambda records: None
    """Called with the records of pairs that cannot be learned, once they are on disk."""
    on_pairs: Callable[[str], None] = lambda adapter: None
    """Called with each adapter that stored pairs are of, whether they can be learned or not."""

    difference: Callable[[PairRow], float] = lambda row: 1.0
    """Returns the share of a pair's weight that is left by how much its answers differ."""

    def __post_init__(self) -> None:
        self._withheld: set[int] = set()
        """Ids of pairs that came while learning was off, or while a job trained their adapter."""
        self._ratings: set[int] = set()
        """Ids of single ratings that came while `align.unpaired` was off."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edged-teacher")

    def resume(self) -> int:
        """Queue again the pairs that were open when the daemon last ended; returns how many. To be called first.

        They reach the engine asynchronously, before all pairs that are passed later.
        """
        on_disk = self.engine.adapters()

        def requeue(db: Database) -> tuple[bool, int]:
            changed = serve_base(db, self.ref_model, self.settings.current.store.new_base == "learn")
            lost = (requeue_lost(db, item["adapter"], on_disk.get(item["adapter"], 0)) for item in summaries(db))
            return changed, sum(lost)

        changed, lost = self.store.write(requeue).result()
        if changed:
            log.info("another base model was served before: what was learned on it waits until it is served again")
        if lost:
            log.warning("%d pairs are learned again: the versions that had learned them are not on disk", lost)
        self.engine.test_with(neutral_pairs(self.tokenizer))
        self.engine.restore_outlier_history(self.store.read(lambda db: load_pasts(db, utc_now())))
        if self.engine.starts():
            self.engine.restore_choices(self.store.read(load_choices))
        here = self.settings.current.api.node
        for adapter in self.store.read(lambda db: adapters_elsewhere(db, here)):
            self.engine.follow(adapter)
        self.learn_soon(self.store.read(open_pairs))
        return self.store.read(count_queued)

    def learn_soon(self, pair_ids: Sequence[int]) -> None:
        """Submit stored pairs asynchronously, in the order of the calls."""
        if pair_ids:
            self._thread.submit(self._learn, pair_ids).add_done_callback(_report)

    def learn_anew(self, adapter: str) -> None:
        """Submit all open pairs of an adapter that this node writes from now on, as after a restart."""
        pasts = self.store.read(lambda db: load_pasts(db, utc_now(), adapter))
        self.engine.restore_outlier_history(pasts)
        self.engine.restore_choices(self.store.read(lambda db: load_choices(db, adapter)))
        self.learn_soon(self.store.read(lambda db: open_pairs(db, adapter=adapter)))

    def learn_again(self, adapter: str, recorded: Future[None] | None) -> None:
        """Submit again the pairs that a version taken back had learned, once the store has them (`recorded`)."""

        def relearn() -> None:
            if recorded is not None:
                recorded.result()
            self._learn(self.store.read(lambda db: taken_back(db, adapter)))

        self._thread.submit(relearn).add_done_callback(_report)

    def learn_from(self, written: Future[FeedbackResult] | Future[FeedbackResult | None]) -> None:
        """Submit the pairs that a write stored, and withdraw the ratings that it dropped; none when it failed, or when
        they are duplicates."""
        if not written.cancelled() and not written.exception():
            result = written.result()
            if result is not None and not result.duplicate:
                if result.dropped:
                    self._thread.submit(self.engine.withdraw, result.dropped).add_done_callback(_report)
                self.learn_soon(result.pair_ids)

    def release(self) -> None:
        """Submit the pairs that were withheld, as the store has them now, if learning is on.

        It is to be called when a job has ended: pairs of adapters that jobs train wait for that. Single ratings are not
        even read while `align.unpaired` is off.
        """

        def hand_over() -> None:
            withheld, self._withheld = self._withheld, set()
            if self.settings.current.align.unpaired != "off":
                withheld, self._ratings = withheld | self._ratings, set()
            if withheld:
                self._learn([pair_id for pair_id in self.store.read(open_pairs) if pair_id in withheld])

        if self.settings.current.align.enabled:
            self._thread.submit(hand_over).add_done_callback(_report)

    def settled(self) -> Future[None]:
        """Return a future that resolves when all pairs passed until now have reached the engine."""
        return self._thread.submit(lambda: None)

    def close(self) -> None:
        """Stop the thread; pairs that were not submitted yet are in the store, and the next start resumes them."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _learn(self, pair_ids: Sequence[int]) -> None:
        for first in range(0, len(pair_ids), _PAIRS_AT_ONCE):
            self._submit(pair_ids[first : first + _PAIRS_AT_ONCE])

    def _rows(self, pair_ids: Sequence[int]) -> Iterator[PairRow]:
        """Yield the pairs, whose texts are in memory one at a time: those of earlier releases are of any length."""
        for pair_id in pair_ids:
            yield from self.store.read(partial(get_pairs, pair_ids=[pair_id], ref_model=self.ref_model))

    def _submit(self, pair_ids: Sequence[int]) -> None:
        if not self.settings.current.align.enabled:
            self._withheld.update(pair_ids)
            return
        pairs, adapters = list[TokenPair](), set[str]()
        in_jobs = {job.adapter for job in self.store.read(lambda db: open_jobs(db, self.ref_model)) if not job.paused}
        for row in self._rows(pair_ids):
            adapters.add(row.adapter)
            if row.state == "skipped" or self.engine.follows(row.adapter):
                # Dropped since it was to be submitted, or learned at another node.
                continue
            off = row.single and self.settings.current.align.unpaired == "off"
            if off or row.adapter in in_jobs:
                (self._ratings if off else self._withheld).add(row.id)
                continue
            try:
                pair, note = tokenize_pair(self.tokenizer, row, self.settings.current.align.max_pair_tokens)
            except (TokenizerError, UnusablePrompt) as error:
                log.warning("pair %d cannot be learned: %s", row.id, error)
                self._skip(row, str(error))
                continue
            share = self.difference(row)
            pairs.append(replace(pair, weight=pair.weight * share, alike=share < ALIKE))
            if note and note != row.note:
                self.store.write(partial(set_pair_note, pair_id=row.id, note=note))
        self.engine.submit_pairs(pairs)
        for adapter in adapters:
            self.on_pairs(adapter)

    def _skip(self, row: PairRow, reason: str) -> None:
        """Record a pair that could not be tokenized as skipped."""
        skipped = PairRetired(row.id, row.adapter, "skipped", 0, row.epochs_done, reason)
        written = self.store.write(lambda db: set_pair_state(db, row.id, "skipped", row.epochs_done, None, reason))
        written.add_done_callback(lambda _: self.on_records([skipped]))


def _report(handed_over: Future[None]) -> None:
    if not handed_over.cancelled() and (error := handed_over.exception()):
        log.error("pairs were not handed to the engine; a restart will: %s", error)
