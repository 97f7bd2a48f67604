"""The tables of what users say: `signals`, `pairs` that follow from these, `preferences` and `struck_beliefs`."""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from edged.store.completions import Message
from edged.store.quarantine import TRUSTED, drop
from edged.store.rows import column_value, field_values, first_column, first_value, insert_row, record_of, update_rows

_COLUMNS = "*, EXISTS (SELECT 1 FROM quarantine WHERE pair_id = pairs.id AND decision = 'released') AS trusted"
_LEARNED_AFTER = "adapter = :adapter AND trained_version > :version AND state IN ('queued', 'trained', 'learnt')"
"""SQL's condition on a row of `pairs`: a version of the adapter newer than `version` learned it last."""

_NOT_DROPPED = "NOT EXISTS (SELECT 1 FROM quarantine WHERE pair_id = pairs.id AND decision = 'dropped')"

_OTHERWISE = ("id", "epochs_done", "trained_version", "ref_chosen_logp", "ref_rejected_logp", "ref_model", "trusted")
"""Fields of a pair that a new row gets from the database, or later."""

FIRST_PARTY_SOURCES = ("chosen", "edit")
"""Signals that settle a preference by themselves."""

REPLAY_PAIRS = 64
"""The latest learned pairs of each adapter, which a restart takes up again to replay them."""


LEARNED = 1.0
"""The `distilled` from which an adapter's answers are as those with its preference in the prompt."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal of a user on an answer. `completion_id` None: an explicit pair; `reason` says why there is no pair."""

    id: str
    created_at: str
    user: str
    signal: str
    completion_id: str | None = None
    choice: int | None = None
    text: str | None = None
    seconds: float | None = None
    pair_ids: tuple[int, ...] = ()
    reason: str = ""
    account: str | None = None
    """The account that gave it; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Side:
    """One answer of a pair: its text and, where edged generated it, its tokens and where it stands.

    `beside` has `reasoning_content` and `tool_calls`; of an answer without content the calls are the text.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    completion_id: str | None = None
    choice: int | None = None
    beside: Message | None = None

    @property
    def calls(self) -> str:
        """Its calls as JSON text; "" for none."""
        return calls_text(self.beside)

    @property
    def content(self) -> str:
        """Its text beside its calls."""
        return "" if self.calls and self.text == self.calls else self.text


def calls_text(beside: Message | None) -> str:
    """The names and arguments of an answer's calls as JSON text; "" for none."""
    calls = [call["function"] for call in (beside or {}).get("tool_calls", ())]
    return json.dumps(calls, ensure_ascii=False) if calls else ""


@dataclass(frozen=True, slots=True)
class PairRow:
    """One row of `pairs`, which `signal_id` completed; log-probabilities are sums in nats by `ref_model`."""

    id: int
    created_at: str
    adapter: str
    signal_id: str
    source: str
    weight: float
    messages: tuple[Message, ...] | None
    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    chosen: Side
    rejected: Side
    state: str
    epochs_done: int = 0
    trained_version: int | None = None
    ref_chosen_logp: float | None = None
    ref_rejected_logp: float | None = None
    ref_model: str | None = None
    note: str = ""
    trusted: bool = False
    """Whether it was released from quarantine."""
    account: str | None = None
    """The account that reported it; None where that is not known."""
    direct: bool = False
    """Whether it is a choice or an edit by the account that teaches this adapter."""
    template_arguments: Mapping[str, Any] | None = None
    """What the chat template is given beside the messages, as in `completions`."""

    @property
    def single(self) -> bool:
        """Whether it is a rating of one answer: the other side's text is empty."""
        return not (self.chosen.text and self.rejected.text)


def insert_signal(db: Database, signal: Signal) -> None:
    """Add a signal."""
    insert_row(db, "signals", field_values(signal))


def renew_signal(db: Database, signal: Signal) -> None:
    """A signal that led to no pair is reported anew under its id: it counts as the latest."""
    latest = "rowid = (SELECT max(rowid) + 1 FROM signals), created_at = ?, text = ?, seconds = ?"
    values = [signal.created_at, column_value(signal.text), signal.seconds, signal.id]
    db.execute(f"UPDATE signals SET {latest} WHERE id = ?", values)


def signals_of(db: Database, completion_ids: Sequence[str]) -> list[Signal]:
    """All signals on these completions, oldest first."""
    sql = "SELECT * FROM signals WHERE completion_id IN (SELECT value FROM json_each(?)) ORDER BY rowid"
    return [record_of(Signal, row) for row in db.query(sql, [json.dumps(list(completion_ids))])]


def latest_dwells(db: Database, user: str, most: int) -> list[tuple[float, str]]:
    """The latest times that a user stayed with an answer, at most so many: (seconds, the answer's text)."""
    sql = (
        "SELECT seconds, choices.text FROM signals JOIN choices USING (completion_id, choice) "
        "WHERE signal = 'dwell' AND user = ? ORDER BY signals.rowid DESC LIMIT ?"
    )
    return [(float(seconds), str(text)) for seconds, text in db.execute(sql, [user, most])]


def get_signal(db: Database, signal_id: str) -> Signal | None:
    """The signal of that id; None where there is none."""
    row = next(db.query("SELECT * FROM signals WHERE id = ?", [signal_id]), None)
    return record_of(Signal, row) if row else None


def progress_of(db: Database, pair_ids: Sequence[int]) -> list[dict[str, Any]]:
    """How far these pairs have come, by id.

    Keys: id, adapter, state, note, trained_version, seconds (from the pair to that version, None where a step was not
    needed or the version is not known), before (queued pairs of the adapter that came earlier than a queued one),
    single (whether it is a single rating).
    """
    sql = """SELECT p.id, p.adapter, p.state, p.note, p.trained_version, CASE WHEN p.state <> 'learnt'
                     THEN round((julianday(v.created_at) - julianday(p.created_at)) * 86400, 3) END AS seconds,
                 '' IN (p.chosen, p.rejected) AS single,
                 CASE p.state WHEN 'queued' THEN (SELECT count(*) FROM pairs AS earlier
                     WHERE earlier.adapter = p.adapter AND earlier.state = 'queued' AND earlier.id < p.id) END AS before
             FROM pairs AS p LEFT JOIN adapter_versions AS v ON v.adapter = p.adapter AND v.version = p.trained_version
             WHERE p.id IN (SELECT value FROM json_each(?)) ORDER BY p.id"""
    return list(db.query(sql, [json.dumps(list(pair_ids))]))


def count_unpaired(db: Database, user: str, reason: str) -> dict[str, int]:
    """Return a user's signals that led to no pair for a reason that begins so: their number by signal."""
    waiting = "user = ? AND pair_ids = '[]' AND reason LIKE ? || '%'"
    sql = f"SELECT signal, count(*) FROM signals WHERE {waiting} GROUP BY 1 ORDER BY 2 DESC"
    return dict(db.execute(sql, [user, reason]).fetchall())


def set_signal_pairs(db: Database, signal_id: str, pair_ids: Sequence[int], reason: str = "") -> None:
    """Record which pairs a signal has led to, or why to none."""
    update_rows(db, "signals", {"pair_ids": tuple(pair_ids), "reason": reason}, id=signal_id)


def last_pair_id(db: Database) -> int:
    """Return the highest id that a pair has, or had before it was forgotten: others may still know that one by it."""
    highest = "SELECT max(user_version, coalesce((SELECT max(id) FROM pairs), 0)) FROM pragma_user_version"
    return int(first_value(db, highest))


def insert_pair(db: Database, pair: PairRow, key: str, imported: bool = False) -> int:
    """Add a pair (its `id` is ignored) whose prompt's key is `key`; returns its id.

    An explicit pair is the user's own word where the account that reports it is the only one that ever taught the
    adapter, and it was not `imported`.
    """
    row = {name: value for name, value in field_values(pair).items() if name not in _OTHERWISE}
    for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        row |= {name: side.text, f"{name}_ids": side.token_ids}
        row |= {f"{name}_completion_id": side.completion_id, f"{name}_choice": side.choice}
        row |= {f"{name}_beside": side.beside}
    direct = pair.source in FIRST_PARTY_SOURCES and (pair.direct or teaches(db, pair.account, pair.adapter))
    direct |= pair.source == "pair" and not imported and taught_alone(db, pair.account, pair.adapter)
    return insert_row(db, "pairs", {**row, "id": last_pair_id(db) + 1, "prompt_key": key, "direct": direct})


def teaches(db: Database, account: str | None, adapter: str) -> bool:
    """Whether it is the user's own account, or the one that taught the adapter first, such as an application's, by a
    fine-tuning job or by a pair. Those to which [access] grants the user by name teach it, too, whoever was first."""
    if account is None or account == adapter:
        return account == adapter
    for first in (
        "SELECT owner FROM jobs WHERE adapter = ? ORDER BY created_at LIMIT 1",
        "SELECT account FROM pairs WHERE adapter = ? AND account IS NOT NULL ORDER BY id LIMIT 1",
    ):
        if (teacher := first_value(db, first, [adapter])) is not None:
            return bool(teacher == account)
    return True


def taught_alone(db: Database, account: str | None, adapter: str) -> bool:
    """Whether no pair of an adapter is another account's."""
    others = "SELECT 1 FROM pairs WHERE adapter = ? AND (account IS NULL OR account <> ?) LIMIT 1"
    return account is not None and first_value(db, others, [adapter, account]) is None


def get_pairs(db: Database, pair_ids: Sequence[int], ref_model: str = "") -> list[PairRow]:
    """The pairs of those ids, in the order of the ids; an id without a row is left out.

    Reference log-probabilities of another model than `ref_model`, where that is given, are left out.
    """
    stale = {"ref_chosen_logp": None, "ref_rejected_logp": None, "ref_model": None}
    sql = f"SELECT {_COLUMNS} FROM pairs WHERE id IN (SELECT value FROM json_each(?))"
    rows = {
        row["id"]: row if ref_model in ("", row["ref_model"]) else {**row, **stale}
        for row in db.query(sql, [json.dumps(list(pair_ids))])
    }
    return [_pair(rows[pair_id]) for pair_id in pair_ids if pair_id in rows]


def latest_pairs(db: Database, adapter: str, most: int) -> list[PairRow]:
    """The latest pairs and single ratings of an adapter, at most so many, oldest first; held and dropped ones are not.

    A pair that could not be trained on, such as a long one, is a preference all the same.
    """
    sql = f"""SELECT {_COLUMNS} FROM pairs WHERE adapter = ? AND state <> 'quarantined' AND {_NOT_DROPPED}
              ORDER BY id DESC LIMIT ?"""
    return [_pair(row) for row in db.query(sql, [adapter, most])][::-1]


def first_pair(db: Database, adapter: str) -> PairRow | None:
    """The oldest pair that an adapter was given; None for none."""
    row = next(db.query(f"SELECT {_COLUMNS} FROM pairs WHERE adapter = ? ORDER BY id LIMIT 1", [adapter]), None)
    return _pair(row) if row else None


def pair_ids_of(
    db: Database, adapter: str | None = None, since: str = "", shown: Callable[[str], bool] = lambda learner: True
) -> list[int]:
    """Ids of all pairs (of one adapter) from the moment `since` on, of adapters that may be `shown`, oldest first."""
    sql = """SELECT id, adapter FROM pairs WHERE (:adapter IS NULL OR adapter = :adapter) AND created_at >= :since
             ORDER BY id"""
    rows = db.execute(sql, {"adapter": adapter, "since": since})
    return [pair_id for pair_id, learner in rows if shown(learner)]


def waiting_pair(
    db: Database, key: str, adapter: str, chosen: str, rejected: str, source: str = "pair"
) -> tuple[int, str] | None:
    """Ids of the pair of these very texts and `source` that was not trained on yet, and of its signal; None for none.

    For a single rating one of the texts is empty.
    """
    sql = """SELECT id, signal_id FROM pairs WHERE prompt_key = ? AND adapter = ? AND chosen = ? AND rejected = ?
                 AND source = ? AND state IN ('queued', 'held_out') ORDER BY id LIMIT 1"""
    return db.execute(sql, [key, adapter, column_value(chosen), column_value(rejected), source]).fetchone()


def has_pair(db: Database, chosen: Side, rejected: Side) -> bool:
    """Whether a pair prefers the one stored answer to the other."""
    found = """SELECT 1 FROM pairs WHERE chosen_completion_id = ? AND chosen_choice = ?
                   AND rejected_completion_id = ? AND rejected_choice = ?"""
    sides = [chosen.completion_id, chosen.choice, rejected.completion_id, rejected.choice]
    return first_value(db, found, sides) is not None


def is_side(db: Database, answer: Side, good: bool) -> bool:
    """Whether a stored answer is the better (`good`) or the worse one of a pair, or rated so, that was not dropped."""
    side = "chosen" if good else "rejected"
    found = f"SELECT 1 FROM pairs WHERE {side}_completion_id = ? AND {side}_choice = ? AND {_NOT_DROPPED}"
    return first_value(db, found, [answer.completion_id, answer.choice]) is not None


def drop_ratings(db: Database, answer: Side, now: str, reason: str) -> list[int]:
    """Drop the single ratings of a stored answer for good; returns their ids."""
    rated = f"""SELECT id FROM pairs WHERE (chosen_completion_id = :id AND chosen_choice = :choice AND rejected = ''
                   OR rejected_completion_id = :id AND rejected_choice = :choice AND chosen = '') AND {_NOT_DROPPED}"""
    ids = first_column(db, rated, {"id": answer.completion_id, "choice": answer.choice})
    for pair_id in ids:
        drop(db, pair_id, now, reason)
    return ids


def open_pairs(db: Database, replay: int = REPLAY_PAIRS, adapter: str | None = None) -> "array[int]":
    """Ids, oldest first, of the pairs (of one adapter) that learning resumes with: eight bytes for each.

    These are the queued and held-out pairs, and the latest `replay` trained ones of each adapter: of those that it
    learned after its latest rollback or import, which may be without the earlier ones. Call `requeue_lost` for every
    adapter before.
    """
    sql = """WITH made AS (
                 SELECT adapter, max(version) AS version FROM adapter_versions
                 WHERE reason = 'imported' OR reason LIKE 'rollback to %' GROUP BY adapter)
             SELECT id FROM pairs WHERE (:adapter IS NULL OR adapter = :adapter) AND (
                 state IN ('queued', 'held_out') OR id IN (SELECT id FROM (
                     SELECT id, row_number() OVER (PARTITION BY adapter ORDER BY id DESC) AS age
                     FROM pairs LEFT JOIN made USING (adapter)
                     WHERE state IN ('trained', 'learnt') AND coalesce(trained_version > version, 1))
                 WHERE age <= :replay))
             ORDER BY id"""
    return array("q", (pair_id for (pair_id,) in db.execute(sql, {"replay": replay, "adapter": adapter})))


def count_queued(db: Database, adapter: str | None = None) -> int:
    """Return the number of pairs (of one adapter) that wait to be learned."""
    of_it = "" if adapter is None else "WHERE adapter = :adapter"
    return int(first_value(db, f"SELECT coalesce(sum(pairs), 0) FROM queued_pairs {of_it}", {"adapter": adapter}))


def set_pair_state(db: Database, pair_id: int, state: str, epochs_done: int, version: int | None, note: str) -> None:
    """Record a pair's progress. `version` learned from it, None when none did; an empty `note` keeps the old one.

    A pair that was dropped meanwhile stays so.
    """
    sql = f"""UPDATE pairs SET state = :state, epochs_done = :epochs_done,
               trained_version = coalesce(:version, trained_version), note = CASE :note WHEN '' THEN note ELSE :note END
             WHERE id = :id AND {_NOT_DROPPED}"""
    db.execute(sql, {"id": pair_id, "state": state, "epochs_done": epochs_done, "version": version, "note": note})


def set_pair_note(db: Database, pair_id: int, note: str) -> None:
    """Set the note of a pair for people to read, such as that it was cut."""
    update_rows(db, "pairs", {"note": note}, id=pair_id)


def set_reference(db: Database, pair_id: int, chosen_logp: float, rejected_logp: float, ref_model: str) -> None:
    """Keep the reference model's summed log-probabilities (nats) with the pair."""
    values = {"ref_chosen_logp": chosen_logp, "ref_rejected_logp": rejected_logp, "ref_model": ref_model}
    update_rows(db, "pairs", values, id=pair_id)


def requeue_newer(db: Database, adapter: str, version: int) -> int:
    """Queue the adapter's pairs again of which versions newer than `version` learned last; returns how many.

    One that was first tested by such a version, or by `version`, has all its epochs again, another one the last. Where
    the version that tested it first is lost, so is that score: it is tested anew.
    """
    values = {"adapter": adapter, "version": version}
    tested = """SELECT 1 FROM alignment_metrics AS tested
                WHERE tested.pair_id = pairs.id AND tested.split = 'prequential' AND tested.version >= :version"""
    db.execute(f"UPDATE pairs SET epochs_done = 0 WHERE {_LEARNED_AFTER} AND EXISTS ({tested})", values)
    lost = f"""adapter = :adapter AND split = 'prequential' AND version > :version
               AND pair_id IN (SELECT id FROM pairs WHERE {_LEARNED_AFTER})"""
    db.execute(f"DELETE FROM alignment_metrics WHERE {lost}", values)
    return _requeue(db, adapter, version, "'queued again: version ' || trained_version || ' was lost'")


TAKEN_BACK = "queued again: a version was taken back"
"""Beginning of the note of a pair that a version taken back had learned."""


def requeue_taken_back(db: Database, adapter: str, restored: int) -> int:
    """Queue the pairs again that versions after `restored` had learned, which the guard took back; returns how many.

    Their first scores stay: those versions were served.
    """
    return _requeue(db, adapter, restored, f"'{TAKEN_BACK} (' || trained_version || ')'")


def _requeue(db: Database, adapter: str, version: int, note: str) -> int:
    """Queue the pairs again that versions after `version` learned, for one epoch more; `note` is a SQL expression."""
    again = f"state = 'queued', trained_version = NULL, epochs_done = max(0, epochs_done - 1), note = {note}"
    values = {"adapter": adapter, "version": version}
    return db.execute(f"UPDATE pairs SET {again} WHERE {_LEARNED_AFTER}", values).rowcount


def third_party_since(db: Database, adapter: str, version: int) -> list[int]:
    """Ids of the pairs that are not the user's own direct signals, and that versions after `version` learned."""
    third_party = f"SELECT id FROM pairs WHERE {_LEARNED_AFTER} AND NOT direct AND id NOT IN ({TRUSTED}) ORDER BY id"
    return first_column(db, third_party, {"adapter": adapter, "version": version})


def taken_back(db: Database, adapter: str) -> list[int]:
    """Ids of the pairs that wait since a version that had learned them was taken back, oldest first."""
    waiting = "SELECT id FROM pairs WHERE adapter = ? AND state = 'queued' AND note LIKE ? ORDER BY id"
    return first_column(db, waiting, [adapter, f"{TAKEN_BACK}%"])


def _pair(row: dict[str, Any]) -> PairRow:
    def side(name: str) -> Side:
        place = {"completion_id": row[f"{name}_completion_id"], "choice": row[f"{name}_choice"]}
        beside = row[f"{name}_beside"]
        return record_of(Side, {"text": row[name], "token_ids": row[f"{name}_ids"], "beside": beside, **place})

    flags = {name: bool(row[name]) for name in ("trusted", "direct")}
    return record_of(PairRow, row, chosen=side("chosen"), rejected=side("rejected"), **flags)


@dataclass(frozen=True, slots=True)
class WrittenPreference:
    """A user's words on the answers that are wanted; `account` wrote them.

    `distilled`, from 0 to 1, says how far answers without it in the prompt are as those with it.
    """

    adapter: str
    text: str
    created_at: str
    account: str | None
    distilled: float = 0.0


def get_preference(db: Database, adapter: str) -> WrittenPreference | None:
    """The written preference of an adapter's user; None where there is none."""
    row = next(db.query("SELECT * FROM preferences WHERE adapter = ?", [adapter]), None)
    return record_of(WrittenPreference, row) if row else None


def all_preferences(db: Database) -> list[WrittenPreference]:
    """The written preferences of all users."""
    return [record_of(WrittenPreference, row) for row in db.query("SELECT * FROM preferences")]


def set_preference(db: Database, preference: WrittenPreference) -> None:
    """Write a preference in the place of the one before; what was distilled of the same text stays."""
    db.execute(
        """INSERT INTO preferences VALUES (:adapter, :text, :created_at, :account, :distilled)
            ON CONFLICT (adapter) DO UPDATE SET text = :text, account = :account,
                created_at = CASE text WHEN :text THEN created_at ELSE :created_at END,
                distilled = CASE text WHEN :text THEN distilled ELSE :distilled END""",
        field_values(preference),
    )


def delete_preference(db: Database, adapter: str) -> None:
    """Delete an adapter's written preference."""
    db.execute("DELETE FROM preferences WHERE adapter = ?", [adapter])


def set_distilled(db: Database, adapter: str, text: str, share: float) -> None:
    """Record how far the preference `text` is distilled; one that was changed meanwhile is passed over."""
    db.execute("UPDATE preferences SET distilled = ? WHERE adapter = ? AND text = ?", [share, adapter, text])


def undo_distilled(db: Database, adapter: str | None = None) -> None:
    """Record that nothing is distilled any more: of an adapter, or of all where another base model is served."""
    db.execute(
        "UPDATE preferences SET distilled = 0 WHERE :adapter IS NULL OR adapter = :adapter", {"adapter": adapter}
    )


def struck(db: Database, adapter: str) -> set[str]:
    """The keys of what an adapter's taste model must not believe."""
    return set(first_column(db, "SELECT key FROM struck_beliefs WHERE adapter = ?", [adapter]))


def strike(db: Database, adapter: str, key: str, now: str) -> None:
    """Have an adapter's taste model believe something no longer."""
    db.execute("INSERT OR IGNORE INTO struck_beliefs VALUES (?, ?, ?)", [adapter, key, now])


def unstrike(db: Database, adapter: str, key: str) -> None:
    """Let an adapter's taste model believe something again."""
    db.execute("DELETE FROM struck_beliefs WHERE adapter = ? AND key = ?", [adapter, key])
