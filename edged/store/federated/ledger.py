"""The table `federated_ledger`: a line for each record that has left this box, written before its first byte does."""

from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from edged.store.rows import field_values, first_value, insert_row


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """A record that left, and whose it was."""

    created_at: str
    user: str
    campaign: str
    round: int
    start: str
    mode: str
    noise: float
    epsilon: float | None
    """Epsilon of this participation; None without noise."""
    bytes: int
    sha256: str
    nonce: str


def add_line(db: Database, line: LedgerLine) -> None:
    """Write a line; a record that leaves again has one already."""
    insert_row(db, "federated_ledger", field_values(line), "INSERT OR IGNORE")


def ledger_lines(db: Database, sha256: str | None = None) -> list[dict[str, Any]]:
    """Return all lines, or that of one record, oldest first; `user` is None where they were forgotten."""
    where = "1" if sha256 is None else "sha256 = :sha256"
    return list(db.query(f"SELECT * FROM federated_ledger WHERE {where} ORDER BY id", {"sha256": sha256}))


def spent(db: Database, user: str) -> tuple[int, float]:
    """Return (rounds that a user took part in, the sum of 1 / noise^2 over those with noise)."""
    noisy = "coalesce(sum(CASE WHEN noise > 0 THEN 1.0 / (noise * noise) END), 0.0)"
    row = db.execute(f"SELECT count(*), {noisy} FROM federated_ledger WHERE user = ?", [user]).fetchone()
    return int(row[0]), float(row[1])


def last_left_at(db: Database) -> str | None:
    """Return when the latest record left; None where none did."""
    latest: str | None = first_value(db, "SELECT max(created_at) FROM federated_ledger")
    return latest
