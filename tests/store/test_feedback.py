"""Signals, pairs and quarantine: the questions that learning and the API ask of these tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlite_utils import Database

from edged.store import Store, erasure, quarantine
from edged.store.adapters import insert_metric, insert_version
from edged.store.completions import insert_completion
from edged.store.feedback import (
    PairRow,
    Side,
    Signal,
    count_queued,
    first_pair,
    get_pairs,
    get_signal,
    has_pair,
    insert_pair,
    insert_signal,
    latest_dwells,
    open_pairs,
    pair_ids_of,
    progress_of,
    renew_signal,
    requeue_newer,
    requeue_taken_back,
    set_pair_note,
    set_pair_state,
    set_reference,
    set_signal_pairs,
    signals_of,
    taken_back,
    teaches,
    third_party_since,
    waiting_pair,
)
from tests.store.rows import completion

T = TypeVar("T")


class Rows:
    """A store that is asked and told in one line."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path)

    def do(self, fn: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return self.store.write(lambda db: fn(db, *arguments, **named)).result()

    def pair(self, adapter: str = "ann", at: str = "2025-01-01", state: str = "queued", **more: Any) -> int:
        number = len(self.do(pair_ids_of))
        signal = Signal(f"s{number}", at, adapter, "pair")
        self.do(insert_signal, signal)
        sides = more.pop("chosen", Side(f"yes {number}")), more.pop("rejected", Side(f"no {number}"))
        values = {"source": "pair", "account": None, **more}
        row = PairRow(
            0, at, adapter, signal.id, values["source"], 1.0, None, f"asked {number}", None, *sides, "queued",
            account=values["account"],
        )  # fmt: skip
        pair_id = self.do(insert_pair, row, f"key {number}")
        if state != "queued":
            self.do(set_pair_state, pair_id, state, 0, None, "")
        return pair_id

    def states(self) -> list[tuple[int, str, int, int | None, str]]:
        rows = self.do(lambda db: get_pairs(db, pair_ids_of(db)))
        return [(row.id, row.state, row.epochs_done, row.trained_version, row.note) for row in rows]


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    rows = Rows(tmp_path / "edged.db")
    yield rows
    rows.store.close()


def score(pair_id: int, version: int, loss: float = 0.5, margin: float = 0.2, adapter: str = "ann") -> dict[str, Any]:
    logps = {"chosen_logp": -1.0, "rejected_logp": -2.0, "ref_chosen_logp": -1.5, "ref_rejected_logp": -1.75}
    named = {"adapter": adapter, "version": version, "pair_id": pair_id, "split": "prequential"}
    return {**named, **logps, "reward_margin": margin, "loss": loss}


def version(number: int, grad_norm: float | None = 1.0, adapter: str = "ann") -> dict[str, Any]:
    made = {"adapter": adapter, "version": number, "parent": number - 1, "reason": "trained", "pairs": 1}
    return {**made, "loss": 0.5, "grad_norm": grad_norm, "step_s": 0.1}


def test_a_signal_that_is_reported_anew_is_the_latest_with_its_new_words(rows: Rows) -> None:
    rows.do(insert_completion, completion("c", "a", "b"))
    for number in range(3):
        rows.do(insert_signal, Signal(f"s{number}", "2025-01-01", "ada", "dwell", "c", 0, "old", 1.0))
    again = Signal("s0", "2025-01-02", "ada", "dwell", "c", 0, "new\ud800", 2.5)
    rows.do(renew_signal, again)
    found = rows.do(signals_of, ["c", "none"])
    assert [signal.id for signal in found] == ["s1", "s2", "s0"]
    assert (found[2].created_at, found[2].text, found[2].seconds) == ("2025-01-02", "new?", 2.5)
    assert (found[0].created_at, found[0].text, found[0].seconds) == ("2025-01-01", "old", 1.0)
    assert rows.do(signals_of, ["other"]) == []
    rows.do(set_signal_pairs, "s1", [4, 5], "why")
    told = rows.do(get_signal, "s1")
    assert told is not None
    assert (told.pair_ids, told.reason) == ((4, 5), "why")
    rows.do(set_signal_pairs, "s1", [6])
    told = rows.do(get_signal, "s1")
    assert told is not None
    assert (told.pair_ids, told.reason) == ((6,), "")
    assert rows.do(get_signal, "s9") is None


def test_the_latest_dwells_are_one_users_newest_first(rows: Rows) -> None:
    rows.do(insert_completion, completion("c", "short", "long"))
    for number, (user, kind, choice, seconds) in enumerate(
        [("ann", "dwell", 0, 1.0), ("ann", "dwell", 1, 2.0), ("bob", "dwell", 0, 3.0), ("ann", "up", 1, 4.0)]
    ):
        rows.do(insert_signal, Signal(f"s{number}", "2025", user, kind, "c", choice, None, seconds))
    assert rows.do(latest_dwells, "ann", 9) == [(2.0, "long"), (1.0, "short")]
    assert rows.do(latest_dwells, "ann", 1) == [(2.0, "long")]


def test_pairs_are_listed_by_adapter_time_and_who_may_see_them(rows: Rows) -> None:
    first, second, third = rows.pair("ann"), rows.pair("bob"), rows.pair("ann", "2025-06-01")
    assert rows.do(pair_ids_of) == [first, second, third]
    assert rows.do(pair_ids_of, "ann") == [first, third]
    assert rows.do(pair_ids_of, "ann", "2025-06-01") == [third]
    assert rows.do(pair_ids_of, None, "", lambda learner: learner == "bob") == [second]
    oldest = rows.do(first_pair, "ann")
    assert oldest is not None
    assert oldest.id == first
    assert rows.do(first_pair, "eve") is None
    rows.do(set_reference, first, -1.0, -2.0, "base-a")
    rows.do(set_reference, second, -3.0, -4.0, "base-b")
    known, other, gone = (rows.do(get_pairs, [second, 99, first], model) for model in ("", "base-a", "base-c"))
    assert [(row.id, row.ref_chosen_logp, row.ref_rejected_logp) for row in known] == [
        (second, -3.0, -4.0),
        (first, -1.0, -2.0),
    ]
    assert [row.ref_chosen_logp for row in other] == [None, -1.0]
    assert [(row.ref_chosen_logp, row.ref_rejected_logp, row.ref_model) for row in gone] == [(None, None, None)] * 2


def test_queued_pairs_are_counted_by_adapter_as_they_come_and_go(rows: Rows) -> None:
    def counted() -> list[int]:
        return [rows.do(count_queued), *(rows.do(count_queued, name) for name in ("ann", "bob", "eve"))]

    named = [("ann", "queued"), ("bob", "queued"), ("ann", "held_out"), ("ann", "queued")]
    first, bobs, held, _ = [rows.pair(adapter, state=state) for adapter, state in named]
    assert counted() == [3, 2, 1, 0]
    for pair_id, state in ((first, "queued"), (bobs, "trained"), (held, "skipped"), (held, "queued")):
        rows.do(set_pair_state, pair_id, state, 1, None, "")
    assert counted() == [3, 3, 0, 0]
    assert rows.do(lambda db: [row["adapter"] for row in db["queued_pairs"].rows]) == ["ann"], "bob has no pair left"
    rows.do(erasure.begin_forgetting, "ann", "2025-05-05")
    assert counted() == [0, 0, 0, 0]
    assert rows.do(lambda db: db["queued_pairs"].count) == 0


def test_what_a_restart_resumes_is_what_waits_and_the_latest_that_each_learned(rows: Rows) -> None:
    states = ["trained", "queued", "learnt", "trained", "skipped", "held_out", "quarantined"]
    ann, bob = [rows.pair("ann", state=state) for state in states], [rows.pair("bob", state="trained")]
    assert list(rows.do(open_pairs, 2)) == [ann[1], ann[2], ann[3], ann[5], *bob]
    assert list(rows.do(open_pairs)) == [*ann[:4], ann[5], *bob]
    rows.do(set_pair_state, ann[3], "trained", 1, 4, "")
    for number, reason in ((2, "rollback to 1"), (3, "guard: KL"), (4, "trained")):
        rows.do(insert_version, "2025", {**version(number), "reason": reason})
    rows.do(set_pair_state, ann[0], "trained", 1, 1, "")
    assert list(rows.do(open_pairs)) == [*ann[1:4], ann[5], *bob], "not what was learned before a rollback"


def test_an_explicit_pair_that_waits_is_found_by_its_very_texts(rows: Rows) -> None:
    rows.pair("ann", state="trained", chosen=Side("x"), rejected=Side("y"))
    rows.pair("ann", source="edit", chosen=Side("x"), rejected=Side("y"))
    number = rows.pair("ann", chosen=Side("x\ud800"), rejected=Side("y"))
    wanted = (f"key {number - 1}", "ann", "x\ud800", "y")
    assert rows.do(waiting_pair, *wanted) == (number, f"s{number - 1}")
    for place in range(4):
        assert rows.do(waiting_pair, *(f"{text}?" if i == place else text for i, text in enumerate(wanted))) is None
    assert rows.do(waiting_pair, "key 0", "ann", "x", "y") is None
    assert rows.do(waiting_pair, "key 1", "ann", "x", "y") is None
    rows.do(set_pair_state, number, "held_out", 0, None, "")
    assert rows.do(waiting_pair, *wanted) == (number, f"s{number - 1}")


def test_whether_one_stored_answer_was_preferred_to_another(rows: Rows) -> None:
    rows.do(insert_completion, completion("c", "a", "b"))
    rows.do(insert_completion, completion("d", "a", "b"))
    better, worse = Side("a", None, "c", 0), Side("b", None, "d", 1)
    rows.pair("ann", chosen=better, rejected=worse)
    assert rows.do(has_pair, better, worse)
    for chosen, rejected in [
        (worse, better),
        (Side("a", None, "d", 0), worse),
        (Side("a", None, "c", 1), worse),
        (better, Side("b", None, "c", 1)),
        (better, Side("b", None, "d", 0)),
    ]:
        assert not rows.do(has_pair, chosen, rejected)


def test_a_choice_is_direct_from_the_users_own_account_or_the_one_that_taught_first(rows: Rows) -> None:
    told = [rows.pair("kitchen", source=source, account="app") for source in ("chosen", "edit", "thumbs")]
    told += [rows.pair("kitchen", source="chosen", account=account) for account in ("eve", "kitchen", None)]
    assert [row.direct for row in rows.do(get_pairs, told)] == [True, True, False, False, True, False]
    assert [rows.do(teaches, account, "new") for account in ("new", "anybody", None)] == [True, True, False]


def test_a_pairs_progress_keeps_its_version_and_note_until_new_ones_come(rows: Rows) -> None:
    number, other = rows.pair(), rows.pair()
    rows.do(set_pair_state, number, "queued", 1, 7, "cut")
    rows.do(set_pair_state, number, "trained", 2, None, "")
    assert rows.states() == [(number, "trained", 2, 7, "cut"), (other, "queued", 0, None, "")]
    rows.do(set_pair_note, number, "read me")
    assert rows.states()[0] == (number, "trained", 2, 7, "read me")


def test_how_far_pairs_have_come_and_how_many_come_before(rows: Rows) -> None:
    ids = [rows.pair("ann", at) for at in ("2025-01-01T00:00:00Z",) * 5]
    rows.pair("bob")
    rows.do(set_pair_state, ids[0], "trained", 1, 3, "")
    rows.do(set_pair_state, ids[1], "learnt", 0, 3, "")
    rows.do(insert_version, "2025-01-01T00:01:30.5Z", version(3))
    found = rows.do(progress_of, [ids[4], ids[0], ids[1], ids[3]])
    assert [(row["id"], row["state"], row["seconds"], row["before"]) for row in found] == [
        (ids[0], "trained", 90.5, None),
        (ids[1], "learnt", None, None),
        (ids[3], "queued", None, 1),
        (ids[4], "queued", None, 2),
    ]
    assert (found[0]["adapter"], found[0]["trained_version"], found[0]["note"]) == ("ann", 3, "")


def test_pairs_of_lost_versions_are_queued_and_tested_anew_only_where_their_test_is_lost(rows: Rows) -> None:
    tested = {"kept": 1, "by the last": 2, "by a lost one": 3, "old": 1}
    ids = {}
    for name, by in tested.items():
        ids[name] = rows.pair()
        rows.do(set_pair_state, ids[name], "trained", 2, 2 if name == "old" else 4, "")
        rows.do(insert_metric, "2025", score(ids[name], by))
    other = rows.pair("bob")
    rows.do(set_pair_state, other, "trained", 2, 4, "")
    assert rows.do(requeue_newer, "ann", 2) == 3
    again = "queued again: version 4 was lost"
    assert rows.states() == [
        (ids["kept"], "queued", 1, None, again),
        (ids["by the last"], "queued", 0, None, again),
        (ids["by a lost one"], "queued", 0, None, again),
        (ids["old"], "trained", 2, 2, ""),
        (other, "trained", 2, 4, ""),
    ]
    left = rows.do(lambda db: [pair_id for (pair_id,) in db.execute("SELECT pair_id FROM alignment_metrics")])
    assert left == [ids["kept"], ids["by the last"], ids["old"]]


def test_pairs_of_a_version_taken_back_wait_and_are_known_by_their_note(rows: Rows) -> None:
    states = ["trained", "learnt", "queued", "skipped", "held_out", "trained"]
    ids = [rows.pair() for _ in states]
    for number, state in zip(ids, states, strict=True):
        rows.do(set_pair_state, number, state, 1, 5, "")
    rows.do(set_pair_state, ids[-1], "trained", 1, 4, "")
    rows.do(insert_metric, "2025", score(ids[0], 5))
    own = rows.pair(source="chosen", account="ann")
    rows.do(set_pair_state, own, "trained", 1, 5, "")
    assert rows.do(third_party_since, "ann", 4) == ids[:3]
    rows.do(quarantine.insert_quarantined, ids[1], "2025", "ann", "burst: 6 of 8")
    assert rows.do(quarantine.decide, ids[1], "released", "2025")
    rows.do(set_pair_state, ids[1], "learnt", 1, 5, "")
    assert rows.do(third_party_since, "ann", 4) == [ids[0], ids[2]], "a person let it through"
    assert rows.do(third_party_since, "bob", 4) == []
    assert rows.do(requeue_taken_back, "ann", 4) == 4
    assert rows.do(taken_back, "ann") == [*ids[:3], own]
    assert rows.do(taken_back, "bob") == []
    assert rows.states()[0] == (ids[0], "queued", 0, None, "queued again: a version was taken back (5)")
    assert rows.do(lambda db: db["alignment_metrics"].count) == 1, "that version was served: its score stays"


def hold(rows: Rows, reason: str, adapter: str = "ann", at: str = "2025-01-01") -> int:
    number = rows.pair(adapter, state="quarantined")
    rows.do(quarantine.insert_quarantined, number, at, adapter, reason)
    return number


@pytest.mark.parametrize(("decision", "state"), [("released", "queued"), ("dropped", "skipped")])
def test_a_decision_is_taken_once_and_moves_the_pair(rows: Rows, decision: quarantine.Decision, state: str) -> None:
    number, other = hold(rows, "outlying"), hold(rows, "outlying")
    assert rows.do(quarantine.owner_of, number) == ("ann", None)
    assert rows.do(quarantine.decide, number, decision, "2025-02-02") is True
    assert rows.do(quarantine.decide, number, "released", "2025-03-03") is False
    assert rows.do(quarantine.decide, 99, "released", "2025-03-03") is False
    assert rows.states() == [
        (number, state, 0, None, f"{decision} from quarantine"),
        (other, "quarantined", 0, None, ""),
    ]
    assert rows.do(quarantine.owner_of, number) == ("ann", decision)
    assert rows.do(quarantine.owner_of, 99) is None
    decided = rows.do(lambda db: db.execute("SELECT decided_at FROM quarantine ORDER BY pair_id").fetchall())
    assert decided == [("2025-02-02",), (None,)]
    held, trusted = (
        rows.do(lambda db, sql=sql: sorted(n for (n,) in db.execute(sql)))
        for sql in (quarantine.HELD, quarantine.TRUSTED)
    )
    assert (held, trusted) == (([other], [number]) if decision == "released" else ([number, other], []))


def test_pairs_that_wait_for_a_decision_are_shown_newest_first_with_what_they_say(rows: Rows) -> None:
    early, late = hold(rows, "outlying: its loss is 9"), hold(rows, "burst: 6 of 8", at="2025-01-02")
    others = hold(rows, "outlying", "bob")
    gone = hold(rows, "outlying")
    rows.do(quarantine.decide, gone, "dropped", "2025")
    rows.do(insert_metric, "2025", score(late, 1, 2.5, -0.5))
    listed = rows.do(quarantine.quarantined)
    assert [row["pair_id"] for row in listed] == [late, others, early]
    shown = {"adapter": "ann", "reason": "burst: 6 of 8", "quarantined_at": "2025-01-02", "created_at": "2025-01-01"}
    said = {"prompt": "asked 1", "chosen": "yes 1", "rejected": "no 1", "source": "pair", "weight": 1.0}
    assert listed[0] == {"pair_id": late, **shown, **said, "loss": 2.5, "reward_margin": -0.5}
    assert (listed[2]["loss"], listed[2]["reward_margin"]) == (None, None)
    assert [row["pair_id"] for row in rows.do(quarantine.quarantined, "ann", 1)] == [late]
    assert [rows.do(quarantine.count_quarantined, name) for name in (None, "ann", "bob", "eve")] == [3, 2, 1, 0]
    assert [rows.do(quarantine.waiting_ids, name) for name in ("ann", "bob")] == [[early, late], [others]]
    rows.do(quarantine.insert_quarantined, 99, "2025", "ann", "forgotten meanwhile")
    assert rows.do(quarantine.count_quarantined) == 3


def test_the_latest_burst_that_waits_is_told_by_its_beginning(rows: Rows) -> None:
    assert rows.do(quarantine.burst_since, "ann") is None
    hold(rows, "burst: 6 of 8", at="2025-01-01")
    last = hold(rows, "burst: 7 of 8", at="2025-01-03")
    hold(rows, "burst: it came during one", at="2025-01-04")
    hold(rows, "outlying: its loss is 9", at="2025-01-05")
    hold(rows, "burst: 6 of 8", "bob", at="2025-01-06")
    assert rows.do(quarantine.burst_since, "ann") == "2025-01-03"
    rows.do(quarantine.decide, last, "dropped", "2025")
    assert rows.do(quarantine.burst_since, "ann") == "2025-01-01"


def test_what_is_usual_is_told_oldest_first_without_what_is_held_or_dropped(rows: Rows) -> None:
    ids = [rows.pair() for _ in range(5)]
    for place, (number, margin) in enumerate(zip(ids, [0.5, -0.5, 0.0, 0.5, -0.5], strict=True)):
        rows.do(insert_metric, "2025", score(number, place, float(place), margin))
    rows.do(insert_metric, "2025", {**score(ids[0], 9, 99.0), "split": "held_out"})
    rows.do(insert_metric, "2025", score(rows.pair("bob"), 1, 99.0, adapter="bob"))
    for number in (ids[2], ids[3], ids[4]):
        rows.do(quarantine.insert_quarantined, number, "2025", "ann", "outlying")
    rows.do(quarantine.decide, ids[3], "dropped", "2025")
    rows.do(quarantine.decide, ids[4], "released", "2025")
    for number, norm in enumerate([3.0, 0.0, None, 2.0, 1.0]):
        rows.do(insert_version, "2025", version(number, norm))
    rows.do(insert_version, "2025", version(1, 99.0, "bob"))
    rows.do(insert_version, "2025", {**version(9, 0.1), "reason": "repeated"})
    assert rows.do(quarantine.usual, "ann") == ([0.0, 1.0, 4.0], [3.0, 2.0, 1.0], [False, True, True])
    assert rows.do(quarantine.usual, "eve") == ([], [], [])


def test_no_more_than_the_latest_are_usual(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "LATEST", 2)
    for place in range(3):
        rows.do(insert_metric, "2025", score(rows.pair(), place, float(place)))
        rows.do(insert_version, "2025", version(place, 1.0 + place))
    assert rows.do(quarantine.usual, "ann") == ([1.0, 2.0], [2.0, 3.0], [False, False])


def test_what_is_usual_and_what_waits_is_found_among_many_pairs_as_quickly_as_among_few(rows: Rows) -> None:
    def steps(db: Database) -> int:
        taken = [0]

        def took() -> int:
            taken[0] += 1
            return 0

        db.conn.set_progress_handler(took, 1)
        quarantine.usual(db, "ann")
        count_queued(db, "ann")
        db.conn.set_progress_handler(None, 0)
        return taken[0]

    def learn(db: Database, numbers: range) -> None:
        (pair,) = get_pairs(db, [first])
        for number in numbers:
            # Every tenth is a rating of one answer.
            made = insert_pair(db, replace(pair, rejected=Side("no" if number % 10 else "")), "key")
            set_pair_state(db, made, "trained", 1, number, "")
            insert_metric(db, "2025", score(made, number))
            insert_version(db, "2025", version(number))

    first = rows.pair()
    rows.do(learn, range(200))
    few = rows.do(steps)
    rows.do(learn, range(200, 1000))
    assert rows.do(steps) == few


def test_a_forgetting_stands_from_the_deletion_to_its_end(rows: Rows) -> None:
    long = "the brass key lies under the third flower pot"
    rows.do(insert_completion, completion("c", f"{long}: so it does", asked=f"{long}!", user="ann"))
    rows.do(insert_completion, completion("d", "x" * 23, asked="y" * 24, user="ann"))
    rows.do(insert_signal, Signal("s", "2025", "ann", "edit", "c", 0, f"{long}, I said"))
    mine = rows.pair("ann", chosen=Side(f"{long} (chosen)"), rejected=Side(f"{long} (rejected)"))
    other = rows.pair("bob", chosen=Side(f"{long} (by bob)"))
    erased = rows.do(erasure.begin_forgetting, "ann", "2025-05-05")
    assert {table: count for table, count in erased.rows.items() if count} == {
        "completions": 2,
        "signals": 2,
        "pairs": 1,
    }
    assert erased.pair_ids == {mine}
    assert set(erased.texts) == {
        *(f"{long}{end}" for end in ("!", ": so it does", ", I said", " (chosen)", " (rejected)")),
        "y" * 24,
    }
    assert rows.do(pair_ids_of) == [other]
    assert rows.do(erasure.unfinished) == [("ann", "2025-05-05")]
    rows.do(erasure.begin_forgetting, "ann", "2025-06-06")
    rows.do(erasure.begin_forgetting, "bob", "2025-07-07")
    assert rows.do(erasure.unfinished) == [("ann", "2025-06-06"), ("bob", "2025-07-07")]
    rows.do(erasure.end_forgetting, "ann")
    assert rows.do(erasure.unfinished) == [("bob", "2025-07-07")]


def test_a_search_counts_what_is_left_of_a_name_and_of_texts_by_table(rows: Rows) -> None:
    text = 'he said "never\nagain"'
    rows.do(insert_completion, completion("old", "fine", asked=text, user="ann", created_at="2025-01-01"))
    rows.do(insert_completion, completion("new", text, user="ann", created_at="2025-03-03"))
    rows.do(insert_completion, completion("bobs", text, user="bob", created_at="2025-01-01"))
    found = rows.do(erasure.search, ["ann"], (text,), "2025-02-02")
    assert found["found"] == [
        {"table": "completions", "column": "user", "rows": 1, "what": "name"},
        {"table": "completions", "column": "adapter", "rows": 1, "what": "name"},
        {"table": "completions", "column": "messages", "rows": 1, "what": "text"},
    ]
    assert (found["texts"], found["said_by_others"], found["new_rows"]) == (1, 1, 3)
    assert found["columns"] > 60

    def nothing(db: Database) -> dict[str, Any]:
        return erasure.search(db, ["eve"], (), "2025-02-02")

    none = rows.do(nothing)
    assert (none["found"], none["said_by_others"], none["new_rows"], none["texts"]) == ([], 0, 0, 0)
