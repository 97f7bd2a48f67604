"""The statuses of a sequence: which may follow which, and that a real engine keeps to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edged.engine.sequence import Sequence, SequenceStatus
from edged.engine.sequences import SequenceTable
from tests.engine.harness import random_ids, random_pairs, request, running_engine

ENDS = {status for status in SequenceStatus if status.may_become(SequenceStatus.FINISHED)}


def test_a_sequence_may_end_from_everywhere_but_its_end() -> None:
    assert set(SequenceStatus) - ENDS == {SequenceStatus.FINISHED}
    assert not any(SequenceStatus.FINISHED.may_become(status) for status in SequenceStatus)


def test_pages_are_held_by_prefills_and_decodes_alone_and_a_decode_was_a_prefill() -> None:
    before_decode = {status for status in SequenceStatus if status.may_become(SequenceStatus.DECODE)}
    before_prefill = {status for status in SequenceStatus if status.may_become(SequenceStatus.PREFILL)}
    assert before_decode == {SequenceStatus.PREFILL}
    assert before_prefill == {SequenceStatus.WAITING, SequenceStatus.SLOT_OFFERED}


def test_an_illegal_change_is_refused_and_legal_lives_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives: dict[str, list[SequenceStatus]] = {}
    move = SequenceTable.move

    def watched(self: SequenceTable, sequence: Sequence, status: SequenceStatus) -> None:
        lives.setdefault(sequence.request.request_id, [sequence.status]).append(status)
        move(self, sequence, status)

    monkeypatch.setattr(SequenceTable, "move", watched)
    settings: dict[str, Any] = {"align__max_active_adapters": 1, "guard__held_out_share": 0.0}
    with running_engine(tmp_path, cache__memory_mb=1, **settings) as (engine, client):
        for user, first in (("ann", 1), ("bob", 100)):
            engine.submit_pairs(random_pairs(2, adapter=user, first_id=first))
        client.wait(lambda: len(engine.adapters()) == 2 and all(engine.adapters().values()))
        for index, user in enumerate(("ann", "bob", "ann", "bob")):
            engine.submit(request(f"r{index}", random_ids(60, index), 30, adapter=user))
        client.wait(lambda: len(client.finished) == 4)
        table = engine.built.sequences
        sequence = Sequence(request("odd", [5]), None, 0, 0.0, [5], None)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match=r"ARRIVED cannot become .*DECODE"):
            table.move(sequence, SequenceStatus.DECODE)
    assert any(SequenceStatus.WAITING_SLOT in life for life in lives.values()), "one slot for two adapters"
    for name in ("r0", "r1", "r2", "r3"):
        assert lives[name][-1] is SequenceStatus.FINISHED
