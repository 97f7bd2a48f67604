"""The tables `adapter_versions`, `alignment_metrics` and `skipped_steps`: what each adapter became and how it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlite_utils import Database

from edged.store.completions import json_text, plain_text
from edged.store.data_dir import erase_folder
from edged.store.rows import field_values, insert_row


@dataclass(frozen=True, slots=True)
class PairScore:
    """A pair's score by one version; log-probabilities are sums in nats, `split` is "prequential" or "held_out"."""

    created_at: str
    adapter: str
    version: int
    pair_id: int
    split: str
    chosen_logp: float
    rejected_logp: float
    ref_chosen_logp: float
    ref_rejected_logp: float
    reward_margin: float
    loss: float
    kl_nats: float | None
    chosen_tokens: int | None = None
    rejected_tokens: int | None = None


def insert_metric(db: Database, metric: PairScore) -> None:
    """Add a score. A pair's first prequential score stays: later ones were measured after training on it.

    A pair that was forgotten meanwhile is passed over.
    """
    db.execute(
        """INSERT INTO alignment_metrics (created_at, adapter, version, pair_id, split, chosen_logp, rejected_logp,
               ref_chosen_logp, ref_rejected_logp, win, logp_difference, reward_margin, reward_correct, loss, kl_nats,
               chosen_tokens, rejected_tokens)
           SELECT :created_at, :adapter, :version, :pair_id, :split, :chosen_logp, :rejected_logp, :ref_chosen_logp,
               :ref_rejected_logp, :win, :logp_difference, :reward_margin, :reward_correct, :loss, :kl_nats,
               :chosen_tokens, :rejected_tokens
           WHERE EXISTS (SELECT 1 FROM pairs WHERE id = :pair_id)
             AND NOT (:split = 'prequential' AND EXISTS (
                 SELECT 1 FROM alignment_metrics WHERE pair_id = :pair_id AND split = 'prequential'))""",
        {
            **field_values(metric),
            "win": int(metric.chosen_logp > metric.rejected_logp),
            "logp_difference": metric.chosen_logp - metric.rejected_logp,
            "reward_correct": int(metric.reward_margin > 0.0),
            "chosen_tokens": metric.chosen_tokens or None,
            "rejected_tokens": metric.rejected_tokens or None,
        },
    )


@dataclass(frozen=True, slots=True)
class Version:
    """An adapter's published state; `step_s` is the wall time of the step that made it, in seconds."""

    adapter: str
    version: int
    created_at: str
    parent: int
    reason: str
    pairs: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    step_s: float = 0.0
    restored: int | None = None
    step_scale: float = 1.0


def insert_version(db: Database, version: Version) -> None:
    """Add a version; one of the same number, left by a crash before it reached the disk, is replaced."""
    insert_row(db, "adapter_versions", {**field_values(version), "on_disk": 0}, "INSERT OR REPLACE")


def set_version_tested(
    db: Database, adapter: str, version: int, now: str, nll: float | None, base_nll: float | None, problem: str
) -> None:
    """Record a version's test: the NLL of neutral text in nats per token, and why it is taken back ("": it is not)."""
    db.execute(
        """UPDATE adapter_versions SET tested_at = ?, neutral_nll = ?, neutral_base_nll = ?, problem = ?
           WHERE adapter = ? AND version = ?""",
        [now, nll, base_nll, problem, adapter, version],
    )


def set_version_answer(db: Database, adapter: str, version: int, answer: str) -> None:
    """Keep a version's answer to the adapter's fixed prompt."""
    db.execute(
        "UPDATE adapter_versions SET answer = ? WHERE adapter = ? AND version = ?",
        [plain_text(answer), adapter, version],
    )


def last_test(db: Database, adapter: str) -> tuple[int, float]:
    """(newest version that passed its test, -1 for none; share of the step size that the newest version had)."""
    (passed,) = db.execute(
        "SELECT max(version) FROM adapter_versions WHERE adapter = ? AND problem = ''", [adapter]
    ).fetchone()
    newest = db.execute(
        "SELECT step_scale FROM adapter_versions WHERE adapter = ? ORDER BY version DESC LIMIT 1", [adapter]
    ).fetchone()
    return (-1 if passed is None else passed), newest[0] if newest else 1.0


def set_version_saved(db: Database, adapter: str, version: int, path: str, removed: Sequence[int]) -> None:
    """Record that `version` is on disk under `path` and that the `removed` ones no longer are."""
    db.execute(
        "UPDATE adapter_versions SET path = ?, on_disk = 1 WHERE adapter = ? AND version = ?", [path, adapter, version]
    )
    for old in removed:
        db.execute(
            "UPDATE adapter_versions SET path = NULL, on_disk = 0 WHERE adapter = ? AND version = ?", [adapter, old]
        )


def drop_newer(db: Database, adapter: str, version: int) -> None:
    """Forget the versions after `version`, which were lost, with their held-out scores."""
    db.execute("DELETE FROM adapter_versions WHERE adapter = ? AND version > ?", [adapter, version])
    db.execute(
        "DELETE FROM alignment_metrics WHERE adapter = ? AND version > ? AND split = 'held_out'", [adapter, version]
    )


def insert_skipped_step(
    db: Database, created_at: str, adapter: str, version: int, pair_ids: Sequence[int], reason: str
) -> None:
    """Record an optimizer step that was not taken."""
    db.execute(
        "INSERT INTO skipped_steps VALUES (NULL, ?, ?, ?, ?, ?)",
        [created_at, adapter, version, json_text(list(pair_ids)), reason],
    )


def forget_adapter(db: Database, adapter: str) -> tuple[dict[str, int], set[int]]:
    """Delete everything that came from this adapter's user, on every base: rows per table, and the pairs' ids.

    Also what the user said through another adapter, with the pairs that hold it.
    """
    said = "SELECT id FROM completions WHERE adapter = :adapter OR user = :adapter"
    signals = f"user = :adapter OR completion_id IN ({said})"
    pairs = f"""adapter = :adapter OR signal_id IN (SELECT id FROM signals WHERE {signals})
        OR chosen_completion_id IN ({said}) OR rejected_completion_id IN ({said})"""
    deletions = {
        "alignment_metrics": f"adapter = :adapter OR pair_id IN (SELECT id FROM pairs WHERE {pairs})",
        "skipped_steps": "adapter = :adapter",
        "adapter_versions": "adapter = :adapter",
        "shelved_steps": "adapter = :adapter",
        "shelved_versions": "adapter = :adapter",
        "quarantine": f"adapter = :adapter OR pair_id IN (SELECT id FROM pairs WHERE {pairs})",
        "pairs": pairs,  # and with them what is shelved of them
        "signals": signals,
        "completions": "adapter = :adapter OR user = :adapter",
    }
    named = {"adapter": adapter}
    db.execute("UPDATE pairs SET account = NULL WHERE account = :adapter", named)
    pair_ids = {row[0] for row in db.execute(f"SELECT id FROM pairs WHERE {pairs}", named)}
    deleted = {
        table: db.execute(f"DELETE FROM {table} WHERE {where}", named).rowcount for table, where in deletions.items()
    }
    return deleted, pair_ids


def forget_learning(db: Database, adapter: str) -> None:
    """Delete what the engine still recorded of a forgotten adapter; new feedback of its user stays."""
    for table in ("skipped_steps", "adapter_versions"):
        db.execute(f"DELETE FROM {table} WHERE adapter = ?", [adapter])


def forget_files(folder: Path, adapter: str, but: str | None) -> None:
    """Delete an adapter's files under `<folder>/<base>/<adapter>` of all bases `but` one.

    Raises OSError with the first thing that stays; the others are gone then.
    """
    problem: OSError | None = None
    for files in folder.glob(f"*/{adapter}"):
        if files.parent.name != but:
            try:
                erase_folder(files)
            except OSError as error:
                problem = problem or error
    if problem is not None:
        raise problem
