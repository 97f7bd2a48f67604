"""The table `federated_consents`: users who agreed to take part in rounds, to which text, and who said so."""

from dataclasses import dataclass

from sqlite_utils import Database

from edged.store.rows import field_values, insert_row, record_of


@dataclass(frozen=True, slots=True)
class Consent:
    """A user's consent: `account` gave it, having been shown the text of this hash."""

    user: str
    created_at: str
    account: str | None
    """None: that account was forgotten."""
    text_sha256: str


def get_consent(db: Database, user: str) -> Consent | None:
    """Return a user's consent, whatever its text; None where there is none."""
    row = next(db.query("SELECT * FROM federated_consents WHERE user = ?", [user]), None)
    return record_of(Consent, row) if row else None


def all_consents(db: Database) -> dict[str, Consent]:
    """Return all consents, whatever their texts, by user."""
    return {row["user"]: record_of(Consent, row) for row in db.query("SELECT * FROM federated_consents ORDER BY user")}


def set_consent(db: Database, consent: Consent) -> None:
    """Keep a consent in the place of the one before."""
    insert_row(db, "federated_consents", field_values(consent), "INSERT OR REPLACE")


def revoke_consent(db: Database, user: str) -> bool:
    """Delete a user's consent; returns whether there was one."""
    return db.execute("DELETE FROM federated_consents WHERE user = ?", [user]).rowcount > 0
