"""The table `quarantine`: pairs that look poisoned, the reasons, and the decisions about them.

A pair without a decision has the state "quarantined"; a released one is queued like any other, and is trusted from
then on; a dropped one is skipped for good, on every base model.
"""

from collections.abc import Sequence
from typing import Any, Literal

from sqlite_utils import Database

from edged.store.rows import first_column, first_value, update_rows

Decision = Literal["released", "dropped"]
HELD = "SELECT pair_id FROM quarantine WHERE decision IS NULL OR decision = 'dropped'"
"""Ids of the pairs that nothing may be learned from."""
TRUSTED = "SELECT pair_id FROM quarantine WHERE decision = 'released'"
"""Ids of the pairs that a person released."""
SHOWN_CHARS = 4096
"""Most characters of each text that a list of such pairs shows."""
LATEST = 64
"""Losses and gradient norms of each adapter that a restart remembers."""


def insert_quarantined(db: Database, pair_id: int, created_at: str, adapter: str, reason: str) -> None:
    """Take a pair in; one that was forgotten meanwhile is passed over, a released one waits for another decision."""
    db.execute(
        """INSERT INTO quarantine (pair_id, created_at, adapter, reason) SELECT id, ?, ?, ? FROM pairs WHERE id = ?
           ON CONFLICT (pair_id) DO UPDATE SET created_at = excluded.created_at, reason = excluded.reason,
               decision = NULL, decided_at = NULL WHERE decision IS NOT 'dropped'""",
        [created_at, adapter, reason, pair_id],
    )


def quarantined(db: Database, adapter: str | None = None, limit: int = 500) -> list[dict[str, Any]]:
    """The `limit` newest pairs that wait for a decision (of one adapter), newest first.

    Keys: pair_id, adapter, reason, quarantined_at, created_at, source, weight, chosen, rejected, prompt (the text, or
    the last message's content; null for bare tokens), loss and reward_margin (null where it was not scored). Texts end
    after SHOWN_CHARS.
    """
    sql = f"""SELECT q.pair_id, q.adapter, q.reason, q.created_at AS quarantined_at, p.created_at, p.source, p.weight,
                    substr(coalesce(p.prompt, json_extract(p.messages, '$[#-1].content')), 1, {SHOWN_CHARS}) AS prompt,
                    substr(p.chosen, 1, {SHOWN_CHARS}) AS chosen, substr(p.rejected, 1, {SHOWN_CHARS}) AS rejected,
                    m.loss, m.reward_margin
             FROM quarantine AS q JOIN pairs AS p ON p.id = q.pair_id
             LEFT JOIN alignment_metrics AS m ON m.pair_id = q.pair_id AND m.split = 'prequential'
             WHERE q.decision IS NULL AND (:adapter IS NULL OR q.adapter = :adapter)
             ORDER BY q.created_at DESC, q.pair_id DESC LIMIT :limit"""
    return list(db.query(sql, {"adapter": adapter, "limit": limit}))


def count_quarantined(db: Database, adapter: str | None = None) -> int:
    """Pairs that wait for a decision (of one adapter)."""
    waiting = "SELECT count(*) FROM quarantine WHERE decision IS NULL AND (:adapter IS NULL OR adapter = :adapter)"
    return int(first_value(db, waiting, {"adapter": adapter}))


def waiting_ids(db: Database, adapter: str) -> list[int]:
    """Ids of an adapter's pairs that wait for a decision, in their order."""
    sql = "SELECT pair_id FROM quarantine WHERE adapter = ? AND decision IS NULL ORDER BY pair_id"
    return first_column(db, sql, [adapter])


def owner_of(db: Database, pair_id: int) -> tuple[str, str | None] | None:
    """(adapter, decision or None) of a pair that is or was in quarantine; None for others."""
    return db.execute("SELECT adapter, decision FROM quarantine WHERE pair_id = ?", [pair_id]).fetchone()


def decide(db: Database, pair_id: int, decision: Decision, now: str) -> bool:
    """Release or drop a pair that waits for it; whether it did."""
    waited = db.execute(
        "UPDATE quarantine SET decision = ?, decided_at = ? WHERE pair_id = ? AND decision IS NULL",
        [decision, now, pair_id],
    ).rowcount
    if waited:
        state = "queued" if decision == "released" else "skipped"
        update_rows(db, "pairs", {"state": state, "note": f"{decision} from quarantine"}, id=pair_id)
    return bool(waited)


def drop(db: Database, pair_id: int, now: str, reason: str) -> None:
    """Drop a pair for good, whatever its state."""
    db.execute(
        """INSERT INTO quarantine (pair_id, created_at, adapter, reason, decision, decided_at)
               SELECT id, :now, adapter, :reason, 'dropped', :now FROM pairs WHERE id = :id
           ON CONFLICT (pair_id) DO UPDATE SET decision = 'dropped', decided_at = :now""",
        {"id": pair_id, "now": now, "reason": reason},
    )
    # The writer of another node may have learned it already, and is to hear of this.
    update_rows(db, "pairs", {"state": "skipped", "note": reason, "handed_on": -1}, id=pair_id)


def burst_since(db: Database, adapter: str) -> str | None:
    """Return the start of an adapter's latest burst that waits for a decision; None for none."""
    begun = """SELECT max(created_at) FROM quarantine WHERE adapter = ? AND decision IS NULL
                   AND reason LIKE 'burst: %' AND reason NOT LIKE 'burst: it came %'"""
    return first_value(db, begun, [adapter])


def usual(db: Database, adapter: str) -> tuple[Sequence[float], Sequence[float], Sequence[bool]]:
    """(losses in nats of the latest pairs that were learned from, gradient norms of the latest steps, whether each of
    these pairs contradicted what was learned), oldest first."""
    rows = db.execute(
        f"""SELECT loss, reward_margin < 0 FROM alignment_metrics WHERE adapter = ? AND split = 'prequential'
               AND pair_id NOT IN (SELECT pair_id FROM quarantine WHERE decision IS NOT 'released')
           ORDER BY id DESC LIMIT {LATEST}""",
        [adapter],
    ).fetchall()
    # Gradients of single ratings and of learned pairs are smaller than those of new pairs.
    norms = f"""SELECT grad_norm FROM adapter_versions AS v
                    WHERE adapter = :adapter AND grad_norm > 0 AND reason NOT IN ('repeated', 'practised')
                    AND NOT EXISTS (SELECT 1 FROM pairs WHERE adapter = :adapter AND trained_version = v.version
                        AND '' IN (chosen, rejected))
                    ORDER BY version DESC LIMIT {LATEST}"""
    losses, contrary = [loss for loss, _ in reversed(rows)], [bool(wrong) for _, wrong in reversed(rows)]
    return losses, first_column(db, norms, {"adapter": adapter})[::-1], contrary
