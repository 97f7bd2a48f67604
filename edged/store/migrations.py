"""The schema, as a list of small named functions applied in order and recorded in the `migrations` table.

A released migration is never edited: add one.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlite_utils import Database

from edged.store.timestamps import utc_now, utc_text

Migration = Callable[[Database], None]

FOLDED = frozenset(
    {
        "m001_completions",
        "m002_feedback",
        "m003_adapters",
        "m004_iteration_samples",
        "m005_served_base",
        "m006_shelved_adapters",
        "m007_shelved_pairs",
        "m008_quarantine",
        "m009_forgetting",
    }
)
"""Migrations from before the first release. A file that has all of them is as `m009_schema` makes it."""


class UnknownMigration(RuntimeError):
    """The file's schema is none of this edged's: `seen` says whose it is, `way_out` what to do."""

    def __init__(self, seen: str, way_out: str) -> None:
        super().__init__(f"{seen}: {way_out}")
        self.seen, self.way_out = seen, way_out


_VERSION = """adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    parent INTEGER NOT NULL,
    reason TEXT NOT NULL,
    pairs INTEGER NOT NULL,
    loss REAL,
    grad_norm REAL,
    step_s REAL NOT NULL,
    path TEXT"""
_SCORE = """chosen_logp REAL NOT NULL,
    rejected_logp REAL NOT NULL,
    ref_chosen_logp REAL NOT NULL,
    ref_rejected_logp REAL NOT NULL,
    win INTEGER NOT NULL,
    logp_difference REAL NOT NULL,
    reward_margin REAL NOT NULL,
    reward_correct INTEGER NOT NULL,
    loss REAL NOT NULL,
    kl_nats REAL"""
_STEP = """created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_ids TEXT NOT NULL,
    reason TEXT NOT NULL"""
"""Columns of a version, of a pair's score and of a skipped step, whose tables have a shelf each."""


def m009_schema(db: Database) -> None:
    """The tables of the first release."""
    # What was asked and answered, so that feedback can name it.
    db.execute("""
        CREATE TABLE completions (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            object TEXT NOT NULL CHECK (object IN ('chat.completion', 'text_completion')),
            user TEXT,
            adapter TEXT,
            version INTEGER NOT NULL,
            model TEXT NOT NULL,
            messages TEXT,
            prompt TEXT,
            prompt_key TEXT NOT NULL,
            prompt_ids TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            choice_count INTEGER NOT NULL
        )""")
    db.execute("CREATE INDEX completions_by_prompt ON completions (prompt_key)")
    db.execute("""
        CREATE TABLE choices (
            completion_id TEXT NOT NULL REFERENCES completions (id) ON DELETE CASCADE,
            choice INTEGER NOT NULL,
            text TEXT NOT NULL,
            token_ids TEXT NOT NULL,
            finish_reason TEXT NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            queue_ms REAL NOT NULL,
            ttft_ms REAL NOT NULL,
            total_ms REAL NOT NULL,
            PRIMARY KEY (completion_id, choice)
        )""")
    # What users did, and the preference pairs that follow from it.
    db.execute("""
        CREATE TABLE signals (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            completion_id TEXT REFERENCES completions (id),
            choice INTEGER,
            user TEXT NOT NULL,
            signal TEXT NOT NULL,
            text TEXT,
            seconds REAL,
            pair_ids TEXT NOT NULL,
            reason TEXT NOT NULL
        )""")
    db.execute("CREATE INDEX signals_by_completion ON signals (completion_id, choice)")
    db.execute("""
        CREATE TABLE pairs (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            adapter TEXT NOT NULL,
            signal_id TEXT NOT NULL REFERENCES signals (id),
            source TEXT NOT NULL,
            weight REAL NOT NULL,
            messages TEXT,
            prompt TEXT,
            prompt_key TEXT NOT NULL,
            chosen TEXT NOT NULL,
            rejected TEXT NOT NULL,
            prompt_ids TEXT,
            chosen_ids TEXT,
            rejected_ids TEXT,
            chosen_completion_id TEXT REFERENCES completions (id),
            chosen_choice INTEGER,
            rejected_completion_id TEXT REFERENCES completions (id),
            rejected_choice INTEGER,
            state TEXT NOT NULL CHECK (state IN ('queued', 'held_out', 'trained', 'learnt', 'skipped', 'quarantined')),
            epochs_done INTEGER NOT NULL DEFAULT 0,
            trained_version INTEGER,
            ref_chosen_logp REAL,
            ref_rejected_logp REAL,
            ref_model TEXT,
            note TEXT NOT NULL DEFAULT ''
        )""")
    db.execute("CREATE INDEX pairs_by_adapter ON pairs (adapter, state)")
    db.execute("CREATE INDEX pairs_by_signal ON pairs (signal_id)")
    db.execute("CREATE INDEX pairs_by_prompt ON pairs (prompt_key)")
    db.execute("CREATE INDEX pairs_by_chosen ON pairs (chosen_completion_id)")
    db.execute("CREATE INDEX pairs_by_rejected ON pairs (rejected_completion_id)")
    # What each adapter's versions are, how well they do, and the steps that were not taken.
    db.execute(f"""
        CREATE TABLE adapter_versions (
            {_VERSION},
            on_disk INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (adapter, version)
        )""")
    db.execute(f"""
        CREATE TABLE alignment_metrics (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            adapter TEXT NOT NULL,
            version INTEGER NOT NULL,
            pair_id INTEGER NOT NULL REFERENCES pairs (id),
            split TEXT NOT NULL CHECK (split IN ('prequential', 'held_out')),
            {_SCORE}
        )""")
    db.execute("CREATE INDEX metrics_by_adapter ON alignment_metrics (adapter, split, version)")
    db.execute("CREATE INDEX metrics_by_pair ON alignment_metrics (pair_id)")
    db.execute(f"""
        CREATE TABLE skipped_steps (
            id INTEGER PRIMARY KEY,
            {_STEP}
        )""")
    # A bounded sample of the engine's iterations.
    db.execute("""
        CREATE TABLE iteration_samples (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            prefill_tokens INTEGER NOT NULL,
            decode_tokens INTEGER NOT NULL,
            finetune_tokens INTEGER NOT NULL,
            finetune_units INTEGER NOT NULL,
            latency_ms REAL NOT NULL,
            predicted_ms REAL NOT NULL,
            budget_ms REAL,
            free_pages INTEGER NOT NULL
        )""")
    # Which base model the learning tables speak of.
    db.execute("CREATE TABLE served_base (fingerprint TEXT NOT NULL)")
    # Where the versions and skipped steps of other base models wait.
    db.execute(f"""
        CREATE TABLE shelved_versions (
            base TEXT NOT NULL,
            {_VERSION},
            on_disk INTEGER NOT NULL,
            PRIMARY KEY (base, adapter, version)
        )""")
    db.execute(f"""
        CREATE TABLE shelved_steps (
            base TEXT NOT NULL,
            id INTEGER NOT NULL,
            {_STEP},
            PRIMARY KEY (base, id)
        )""")
    # Where the scores of pairs on other base models wait, and how far the pairs had come there.
    db.execute(f"""
        CREATE TABLE shelved_metrics (
            base TEXT NOT NULL,
            id INTEGER NOT NULL,
            created_at TEXT NOT NULL,
            adapter TEXT NOT NULL,
            version INTEGER NOT NULL,
            pair_id INTEGER NOT NULL REFERENCES pairs (id) ON DELETE CASCADE,
            split TEXT NOT NULL,
            {_SCORE},
            PRIMARY KEY (base, id)
        )""")
    db.execute("CREATE INDEX shelved_metrics_by_pair ON shelved_metrics (pair_id)")
    db.execute("""
        CREATE TABLE shelved_progress (
            base TEXT NOT NULL,
            pair_id INTEGER NOT NULL REFERENCES pairs (id) ON DELETE CASCADE,
            state TEXT NOT NULL,
            epochs_done INTEGER NOT NULL,
            trained_version INTEGER,
            ref_chosen_logp REAL,
            ref_rejected_logp REAL,
            ref_model TEXT,
            note TEXT NOT NULL,
            PRIMARY KEY (base, pair_id)
        )""")
    db.execute("CREATE INDEX shelved_progress_by_pair ON shelved_progress (pair_id)")
    # Pairs that look poisoned, until somebody decides.
    db.execute("""
        CREATE TABLE quarantine (
            pair_id INTEGER PRIMARY KEY REFERENCES pairs (id) ON DELETE CASCADE,
            created_at TEXT NOT NULL,
            adapter TEXT NOT NULL,
            reason TEXT NOT NULL,
            decision TEXT CHECK (decision IN ('released', 'dropped')),
            decided_at TEXT
        )""")
    db.execute("CREATE INDEX quarantine_by_adapter ON quarantine (adapter, decision)")
    # Adapters that are being forgotten: what was begun is ended by the next start.
    db.execute("CREATE TABLE forgetting (adapter TEXT PRIMARY KEY, started_at TEXT NOT NULL)")


def m010_language(db: Database) -> None:
    """Language beside preference: answers' lengths and repetition, neutral text's NLL, and whose word a pair is."""
    for table in ("alignment_metrics", "shelved_metrics"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN chosen_tokens INTEGER")
        db.execute(f"ALTER TABLE {table} ADD COLUMN rejected_tokens INTEGER")
    for table in ("adapter_versions", "shelved_versions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN restored INTEGER")
        db.execute(f"ALTER TABLE {table} ADD COLUMN step_scale REAL NOT NULL DEFAULT 1.0")
        db.execute(f"ALTER TABLE {table} ADD COLUMN neutral_nll REAL")
        db.execute(f"ALTER TABLE {table} ADD COLUMN neutral_base_nll REAL")
        db.execute(f"ALTER TABLE {table} ADD COLUMN tested_at TEXT")
        db.execute(f"ALTER TABLE {table} ADD COLUMN problem TEXT")
        db.execute(f"ALTER TABLE {table} ADD COLUMN answer TEXT")
    db.execute("ALTER TABLE choices ADD COLUMN repetition REAL")
    db.execute("CREATE INDEX completions_by_adapter ON completions (adapter, created_at)")
    db.execute("ALTER TABLE pairs ADD COLUMN account TEXT")
    db.execute("ALTER TABLE pairs ADD COLUMN direct INTEGER NOT NULL DEFAULT 0")


MIGRATIONS: tuple[Migration, ...] = (m009_schema, m010_language)


def migrate(db: Database, migrations: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Apply what the file lacks of `migrations` (default: all), each in its own transaction; returns the names applied.

    Raises UnknownMigration when the file has one that is not in the list.
    """
    db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL)")
    names = _names(db)
    applied = known_of(names, migrations)
    if names >= FOLDED:
        with db.atomic():
            db.execute("UPDATE migrations SET name = ? WHERE name = ?", [m009_schema.__name__, max(FOLDED)])
            db.execute(f"DELETE FROM migrations WHERE name IN ({', '.join('?' * len(FOLDED))})", [*FOLDED])
    fresh = [migration for migration in migrations if migration.__name__ not in applied]
    for migration in fresh:
        with db.atomic():
            migration(db)
            db.execute("INSERT INTO migrations VALUES (?, ?)", [migration.__name__, utc_text(utc_now())])
    return [migration.__name__ for migration in fresh]


def check_known(db: Database) -> None:
    """Raises UnknownMigration when the file has a migration that is none of ours."""
    known_of(_names(db))


def _names(db: Database) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM migrations")}


def known_of(names: set[str], migrations: tuple[Migration, ...] = MIGRATIONS) -> set[str]:
    """Which of `migrations` (default: all) a file has whose table names these. Raises UnknownMigration."""
    folded = names & FOLDED
    if folded and folded != FOLDED:
        raise UnknownMigration(
            f"was left by an edged from before the first release ({len(folded)} of its {len(FOLDED)} migrations)",
            "no later one can use it; move it away, and restore another backup or start anew",
        )
    applied = names - FOLDED | ({m009_schema.__name__} if folded else set())
    if unknown := sorted(applied - {migration.__name__ for migration in migrations}):
        raise UnknownMigration(f"was written by a newer edged (migration {unknown[0]})", "install that version")
    return applied
