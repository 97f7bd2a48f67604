"""The tables `preferences`, what users wrote about the answers they want, and `struck_beliefs`."""

from __future__ import annotations

from dataclasses import dataclass

from sqlite_utils import Database

from edged.store.rows import column_value, field_values, first_column, insert_row, record_of

LEARNED = 1.0
"""The `distilled` from which an adapter's answers are as those with its preference in the prompt."""


@dataclass(frozen=True, slots=True)
class WrittenPreference:
    """What a user wants of all answers, in words; `account` wrote it.

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
            ON CONFLICT (adapter) DO UPDATE SET text = :text, created_at = :created_at, account = :account,
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
    insert_row(db, "struck_beliefs", {"adapter": adapter, "key": key, "created_at": now}, "INSERT OR IGNORE")


def unstrike(db: Database, adapter: str, key: str) -> None:
    """Let an adapter's taste model believe something again."""
    db.execute("DELETE FROM struck_beliefs WHERE adapter = ? AND key = ?", [adapter, column_value(key)])
