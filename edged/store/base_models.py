"""The base model that the learning tables speak of, and the shelves where those of other base models wait.

What was learned belongs to the base it was learned on: versions, scores, skipped steps, and how far each pair has come.
The tables hold that of one base alone, so that no query can mix two; the pairs themselves belong to every base. A base
that was never served is trained on the pairs of the one before only where that is asked for.
"""

import json
from contextlib import suppress
from pathlib import Path

from sqlite_utils import Database

from edged.store.backup import VERSION_MANIFEST
from edged.store.data_dir import ADAPTERS_FOLDER
from edged.store.feedback import undo_distilled
from edged.store.quarantine import HELD
from edged.store.rows import first_value

SHELVES = {
    "adapter_versions": "shelved_versions",
    "alignment_metrics": "shelved_metrics",
    "skipped_steps": "shelved_steps",
}
"""By learning table, the table that keeps its rows while another base is served."""
_PROGRESS = "state, epochs_done, trained_version, ref_chosen_logp, ref_rejected_logp, ref_model, note"
"""Columns of a pair that training on a base changes."""
_ASIDE = "note = 'given to another base model: store.new_base = \"learn\" queues it'"
"""Marks the pairs that the served base is not trained on until that is asked for."""


class OtherBase(RuntimeError):
    """The data folder holds what another base model learned; the message names both models and the ways out."""


def refuse_other_base(db: Database, data_dir: Path, fingerprint: str, name: str) -> None:
    """Raises OtherBase where something was learned in this folder on another base than `fingerprint`, called `name`."""
    before = served_base(db)
    learned = f"SELECT 1 FROM pairs WHERE NOT {_ASIDE} AND id NOT IN ({HELD}) UNION ALL SELECT 1 FROM adapter_versions"
    if before is None or before == fingerprint or not db.execute(f"{learned} LIMIT 1").fetchone():
        return
    old = base_name(data_dir, before)
    called, path = f'"{old}", ' if old else "", "demo" if old == "demo" else "DIR"
    raise OtherBase(
        f'data folder "{data_dir}" was taught on another base model ({called}weights {before}) than "{name}" (weights '
        f"{fingerprint}), which the settings name. To go on, serve that one again (`edged serve --model {path}` or "
        "model.path; its files, model.dtype and model.quantize as they were), or take another --data-dir. To change the"
        " model, start once with `--new-base shelve` (a service with EDGED_STORE__NEW_BASE=shelve): what was learned "
        f'waits until its own model is served again; `--new-base learn` also trains "{name}" on the stored pairs'
    )


def base_name(data_dir: Path, fingerprint: str) -> str:
    """The name of a base model in the manifest of an adapter that was learned on it; "" where there is none."""
    for manifest in (data_dir / ADAPTERS_FOLDER).glob(f"{fingerprint}/*/v*/{VERSION_MANIFEST}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(manifest.read_text("utf-8"))["base_model"])
    return ""


def served_base(db: Database) -> str | None:
    """Fingerprint of the base that the learning tables speak of; None before the first."""
    return first_value(db, "SELECT fingerprint FROM served_base")


def serve_base(db: Database, fingerprint: str, learn: bool = False) -> bool:
    """Make the learning tables speak of this base: as it left them, or anew with every pair set aside.

    With `learn`, the pairs that are set aside are queued. Returns whether another base's were shelved for that.
    """
    before = served_base(db)
    if before != fingerprint:
        if before is not None:
            _shelve(db, before)
            _unshelve(db, fingerprint)
            undo_distilled(db)
        db.execute("DELETE FROM served_base")
        db.execute("INSERT INTO served_base VALUES (?)", [fingerprint])
    if learn:
        db.execute(f"UPDATE pairs SET state = 'queued', note = '' WHERE {_ASIDE}")
    return before not in (None, fingerprint)


def _shelve(db: Database, base: str) -> None:
    for table, shelf in SHELVES.items():
        columns = _columns(db, table)
        db.execute(f"INSERT INTO {shelf} (base, {columns}) SELECT ?, {columns} FROM {table}", [base])
        db.execute(f"DELETE FROM {table}")
    db.execute(
        f"""INSERT INTO shelved_progress (base, pair_id, {_PROGRESS})
            SELECT ?, id, {_PROGRESS} FROM pairs WHERE id NOT IN ({HELD})""",
        [base],
    )
    db.execute(
        f"""UPDATE pairs SET state = 'queued', epochs_done = 0, trained_version = NULL, ref_chosen_logp = NULL,
                ref_rejected_logp = NULL, ref_model = NULL, note = ''
            WHERE id NOT IN ({HELD})"""
    )


def _unshelve(db: Database, base: str) -> None:
    known = "SELECT base FROM shelved_versions UNION SELECT base FROM shelved_progress"
    if not first_value(db, f"SELECT ? IN ({known})", [base]):
        db.execute(f"UPDATE pairs SET state = 'skipped', {_ASIDE} WHERE id NOT IN ({HELD})")
    for table, shelf in SHELVES.items():
        columns = _columns(db, table)
        db.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {shelf} WHERE base = ?", [base])
        db.execute(f"DELETE FROM {shelf} WHERE base = ?", [base])
    db.execute(
        f"""UPDATE pairs SET ({_PROGRESS}) =
                (SELECT {_PROGRESS} FROM shelved_progress WHERE base = :base AND pair_id = pairs.id)
            WHERE id IN (SELECT pair_id FROM shelved_progress WHERE base = :base) AND id NOT IN ({HELD})""",
        {"base": base},
    )
    db.execute("DELETE FROM shelved_progress WHERE base = ?", [base])


def _columns(db: Database, table: str) -> str:
    return ", ".join(column.name for column in db[table].columns)
