"""The wall clock jumps backwards: order follows ids and version numbers, which do not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from edged.align.feedback.pair import PairRetired
from edged.align.feedback.signals import record_pair
from edged.align.journal import write_record
from edged.align.metrics import series, summary, versions
from edged.store import Store, utc_now
from edged.store.feedback import get_pairs, open_pairs
from tests.align.learning import published, scored


def test_pairs_versions_and_series_keep_their_order(tmp_path: Path) -> None:
    store, now = Store(tmp_path / "edged.db"), utc_now()
    for number in range(1, 6):
        moment = now - timedelta(hours=number)

        def record(db, number=number, moment=moment) -> int:
            (pair_id,) = record_pair(
                db, "sam", f"good {number}", f"bad {number}", moment, prompt=f"question {number}"
            ).pair_ids
            write_record(db, scored(pair_id, version=number - 1, adapter="sam"), "base", moment)
            write_record(db, published(number, "sam"), "base", moment)
            if number < 3:
                write_record(db, PairRetired(pair_id, "sam", "trained", number, 1, ""), "base", moment)
            return pair_id

        store.write(record).result()
    assert [row.chosen.text for row in store.read(lambda db: get_pairs(db, list(open_pairs(db))))] == [
        f"good {number}" for number in range(1, 6)
    ]
    found = store.read(lambda db: summary(db, "sam"))
    assert found is not None
    assert found["version"] == 5
    assert [row["version"] for row in store.read(lambda db: versions(db, "sam"))] == [5, 4, 3, 2, 1]
    assert [row["version"] for row in store.read(lambda db: series(db, "sam", 10))] == [0, 1, 2, 3, 4]
    store.close()
