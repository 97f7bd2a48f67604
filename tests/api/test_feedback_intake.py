"""A start takes up what waits without having all of it in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sqlite_utils import Database

from edged.align.feedback.pair import TokenPair
from edged.align.feedback.signals import record_pair
from edged.api.feedback_intake import FeedbackIntake
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from edged.store import Store, utc_now
from edged.store.feedback import PairRow, get_pairs
from edged.text.tokenizer import Tokenizer
from tests.align.feedback.desk import Desk
from tests.models import byte_tokenizer

PAIRS, CHARS = 70, 50_000
ALL_TEXTS = PAIRS * CHARS * 4
"""Bytes of the texts in memory: a character beyond the first 65,536 of Unicode makes each of them take four."""


class Taken:
    """The engine's side: it takes pairs and notes them."""

    def __init__(self) -> None:
        self.pairs: list[TokenPair] = []

    def adapters(self) -> dict[str, int]:
        return {}

    def starts(self) -> dict[str, Any]:
        return {}

    def follows(self, adapter: str) -> bool:
        return False

    def test_with(self, pairs: Any) -> None: ...

    def restore_outlier_history(self, pasts: Any) -> None: ...

    def submit_pairs(self, pairs: list[TokenPair]) -> None:
        self.pairs += pairs


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Pairs of texts that are longer than today's are taken, as an earlier release has left them."""
    store = Store(tmp_path / "edged.db")
    taken_then = Settings(align=AlignSettings(max_pair_tokens=CHARS))

    def fill(db: Database) -> None:
        for number in range(PAIRS):
            text = f"\N{GRINNING FACE}{number}".ljust(CHARS, "a")
            record_pair(db, f"user-{number % 3}", text, "bad", utc_now(), prompt="q", settings=taken_then)

    store.write(fill).result()
    yield store
    store.close()


def intake(store: Store, **align: Any) -> tuple[FeedbackIntake, Taken]:
    engine, settings = Taken(), Settings(align=AlignSettings(**align))
    tokenizer = Tokenizer(byte_tokenizer(), "tiny")
    return FeedbackIntake(store, tokenizer, cast(Any, engine), Live(settings), "base"), engine


def peak_of_resuming(feedback_intake: FeedbackIntake) -> int:
    tracemalloc.start()
    try:
        assert feedback_intake.resume() == PAIRS
        feedback_intake.settled().result(60)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_texts_of_queued_pairs_are_read_one_after_the_other(store: Store) -> None:
    feedback_intake, engine = intake(store)
    peak = peak_of_resuming(feedback_intake)
    feedback_intake.close()
    assert [pair.pair_id for pair in engine.pairs] == list(range(1, PAIRS + 1))
    assert max(pair.num_tokens for pair in engine.pairs) <= 1024
    assert peak < ALL_TEXTS / 4


def test_nothing_is_read_while_nothing_is_learned_and_all_of_it_once_that_begins(store: Store) -> None:
    feedback_intake, engine = intake(store, enabled=False)
    peak = peak_of_resuming(feedback_intake)
    assert engine.pairs == []
    assert peak < CHARS * 4
    feedback_intake.settings.current = Settings()
    feedback_intake.release()
    feedback_intake.settled().result(60)
    feedback_intake.close()
    assert [pair.pair_id for pair in engine.pairs] == list(range(1, PAIRS + 1))


def test_ratings_are_read_once_while_they_are_off_and_are_learned_once_they_are_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def noted(db: Database, pair_ids: list[int], ref_model: str) -> list[PairRow]:
        read.extend(pair_ids)
        return get_pairs(db, pair_ids, ref_model)

    monkeypatch.setattr("edged.api.feedback_intake.get_pairs", noted)
    store = Store(tmp_path / "rated.db")
    desk = Desk(store)
    desk.account = "ada"
    desk.answer("a", "one")
    (rating,) = desk.report("a", "up").pair_ids
    (pair,) = desk.pair("ada", "good", "bad", prompt="q").pair_ids
    feedback_intake, engine = intake(store, unpaired="off")
    feedback_intake.learn_soon([rating, pair])
    for _ in range(3):
        feedback_intake.release()
    feedback_intake.settled().result(60)
    assert read == [rating, pair]
    assert [taken.pair_id for taken in engine.pairs] == [pair]
    feedback_intake.settings.current = Settings()
    feedback_intake.release()
    feedback_intake.settled().result(60)
    assert [taken.pair_id for taken in engine.pairs] == [pair, rating]
    feedback_intake.close()
    store.close()
