"""The schema, as a list of small named functions applied in order and recorded in the `migrations` table.

A released migration is never edited: add one.
"""

import re
from collections.abc import Callable
from importlib.resources import files

from sqlite_utils import Database

from edged.store.timestamps import utc_now, utc_text

Migration = Callable[[Database], None]

FOLDED = frozenset(
    {
        *("m001_completions", "m002_feedback", "m003_adapters", "m004_iteration_samples", "m005_served_base"),
        *("m006_shelved_adapters", "m007_shelved_pairs", "m008_quarantine", "m009_forgetting"),
    }
)
"""Migrations from before the first release. A file that has all of them is as `m009_schema` makes it."""


class UnknownMigration(RuntimeError):
    """The file's schema is none of this edged's: `seen` says whose it is, `way_out` what to do."""

    def __init__(self, seen: str, way_out: str) -> None:
        super().__init__(f"{seen}: {way_out}")
        self.seen, self.way_out = seen, way_out


def m009_schema(db: Database) -> None:
    """The tables of the first release, in `schema.sql`."""
    for statement in (files("edged.store") / "schema.sql").read_text("utf-8").split(";\n"):
        db.execute(statement)


def m010_language(db: Database) -> None:
    """Language beside preference: answers' lengths and repetition, neutral text's NLL, and whose word a pair is."""
    for table in ("alignment_metrics", "shelved_metrics"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN chosen_tokens INTEGER")
        db.execute(f"ALTER TABLE {table} ADD COLUMN rejected_tokens INTEGER")
    for table in ("adapter_versions", "shelved_versions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN restored INTEGER")
        db.execute(f"ALTER TABLE {table} ADD COLUMN step_scale REAL NOT NULL DEFAULT 1.0")
        for column in ("neutral_nll REAL", "neutral_base_nll REAL", "tested_at TEXT", "problem TEXT", "answer TEXT"):
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    db.execute("ALTER TABLE choices ADD COLUMN repetition REAL")
    db.execute("CREATE INDEX completions_by_adapter ON completions (adapter, created_at)")
    db.execute("ALTER TABLE pairs ADD COLUMN account TEXT")
    db.execute("ALTER TABLE pairs ADD COLUMN direct INTEGER NOT NULL DEFAULT 0")


def m011_application_runs(db: Database) -> None:
    """Ended runs of applications, from which the demand of others is learned, and a salt for the words of calls."""
    db.execute("CREATE TABLE application_salt AS SELECT randomblob(16) AS salt")
    db.execute("""
        CREATE TABLE application_runs (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            user TEXT NOT NULL,
            application TEXT NOT NULL,
            run TEXT NOT NULL,
            features BLOB NOT NULL,
            predicted REAL NOT NULL,
            cost REAL NOT NULL,
            calls INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            answer_tokens INTEGER NOT NULL,
            seconds REAL NOT NULL,
            late_s REAL NOT NULL
        )""")
    db.execute("CREATE INDEX application_runs_by_type ON application_runs (application, id)")


def m012_counts(db: Database) -> None:
    """How many pairs of each adapter wait, kept by triggers, and indexes of its latest scores and single ratings."""
    db.execute("CREATE TABLE queued_pairs (adapter TEXT PRIMARY KEY, pairs INTEGER NOT NULL) WITHOUT ROWID")
    db.execute("INSERT INTO queued_pairs SELECT adapter, count(*) FROM pairs WHERE state = 'queued' GROUP BY adapter")
    more = "INSERT INTO queued_pairs VALUES (new.adapter, 1) ON CONFLICT (adapter) DO UPDATE SET pairs = pairs + 1"
    # A name stays no longer than its pairs.
    fewer = """UPDATE queued_pairs SET pairs = pairs - 1 WHERE adapter = old.adapter;
               DELETE FROM queued_pairs WHERE adapter = old.adapter AND pairs = 0"""
    for name, event, when, change in (
        ("pairs_inserted", "INSERT", "new.state = 'queued'", more),
        ("pairs_queued", "UPDATE OF state", "new.state = 'queued' AND old.state <> 'queued'", more),
        ("pairs_taken", "UPDATE OF state", "new.state <> 'queued' AND old.state = 'queued'", fewer),
        ("pairs_deleted", "DELETE", "old.state = 'queued'", fewer),
    ):
        db.execute(f"CREATE TRIGGER {name} AFTER {event} ON pairs WHEN {when} BEGIN {change}; END")
    db.execute("CREATE INDEX metrics_by_split ON alignment_metrics (adapter, split)")
    db.execute("CREATE INDEX pairs_of_one_side ON pairs (adapter, trained_version) WHERE '' IN (chosen, rejected)")


def m013_jobs(db: Database) -> None:
    """Uploaded files, fine-tuning jobs over them, and what the jobs report."""
    db.execute("""
        CREATE TABLE files (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            owner TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL
        )""")
    db.execute("""
        CREATE TABLE jobs (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            owner TEXT NOT NULL,
            base TEXT NOT NULL,
            model TEXT NOT NULL,
            parent TEXT NOT NULL,
            adapter TEXT NOT NULL,
            method TEXT NOT NULL,
            hyperparameters TEXT NOT NULL,
            seed INTEGER NOT NULL,
            training_file TEXT NOT NULL,
            metadata TEXT NOT NULL,
            status TEXT NOT NULL,
            examples INTEGER NOT NULL,
            paused INTEGER NOT NULL,
            trained_tokens INTEGER,
            finished_at TEXT,
            error_code TEXT,
            error TEXT,
            error_param TEXT,
            result_file TEXT
        )""")
    db.execute("""
        CREATE TABLE job_events (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            job_id TEXT NOT NULL,
            level TEXT NOT NULL,
            message TEXT NOT NULL,
            step INTEGER,
            data TEXT NOT NULL
        )""")
    db.execute("CREATE INDEX jobs_by_adapter ON jobs (adapter, status)")
    db.execute("CREATE INDEX job_events_by_job ON job_events (job_id, id)")
    db.execute("CREATE INDEX job_events_by_step ON job_events (job_id, step) WHERE step IS NOT NULL")


def m014_validation(db: Database) -> None:
    """Files that jobs are validated with, and when files are deleted."""
    db.execute("ALTER TABLE jobs ADD COLUMN validation_file TEXT")
    db.execute("ALTER TABLE files ADD COLUMN expires_at TEXT")


def m015_checkpoints(db: Database) -> None:
    """Versions of fine-tuning jobs that are kept as adapters of their own."""
    columns = "adapter TEXT PRIMARY KEY, job_id TEXT NOT NULL, step INTEGER NOT NULL, created_at TEXT NOT NULL"
    db.execute(f"CREATE TABLE job_checkpoints ({columns}, UNIQUE (job_id, step))")


def m016_users(db: Database) -> None:
    """Indexes of who asked and who rated, through whatever adapter."""
    db.execute("CREATE INDEX completions_by_user ON completions (user)")
    db.execute("CREATE INDEX signals_by_user ON signals (user)")


def m017_accounts(db: Database) -> None:
    """An index of which account reported a pair: writes would wait for seconds while forgetting looked at all pairs.

    Pairs of jobs' checkpoints, which no feedback teaches any more, are skipped.
    """
    db.execute("CREATE INDEX pairs_by_account ON pairs (account)")
    note, checkpoints = "a checkpoint of a fine-tuning job stays as it is", "SELECT adapter FROM job_checkpoints"
    skipped = "UPDATE pairs SET state = 'skipped', note = ? WHERE state = 'queued' AND adapter IN"
    db.execute(f"{skipped} ({checkpoints})", [note])


def m018_shared_adapters(db: Database) -> None:
    """Which account gave a signal, whose turn a run had, and where a job stood when it was paused."""
    db.execute("ALTER TABLE signals ADD COLUMN account TEXT")
    db.execute("CREATE INDEX signals_by_account ON signals (account)")
    db.execute("ALTER TABLE application_runs ADD COLUMN sharer TEXT")
    db.execute("ALTER TABLE jobs ADD COLUMN paused_at INTEGER")
    db.execute("ALTER TABLE jobs ADD COLUMN other_steps INTEGER NOT NULL DEFAULT 0")
    last = "SELECT max(step) FROM job_events WHERE job_id = jobs.id AND json_extract(data, '$.train_loss') IS NOT NULL"
    db.execute(f"UPDATE jobs SET paused_at = coalesce(({last}), 0) WHERE paused")


def m019_preferences(db: Database) -> None:
    """Users' words on the answers they want, and what they struck of what was believed about them."""
    db.execute("""
        CREATE TABLE preferences (
            adapter TEXT PRIMARY KEY,
            text TEXT NOT NULL,
            created_at TEXT NOT NULL,
            account TEXT,
            distilled REAL NOT NULL
        )""")
    columns = "adapter TEXT NOT NULL, key TEXT NOT NULL, created_at TEXT NOT NULL, PRIMARY KEY (adapter, key)"
    db.execute(f"CREATE TABLE struck_beliefs ({columns})")
    # The KL to the base of an adapter's own answers, as steps of practice see it.
    for table in ("adapter_versions", "shelved_versions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN own_kl_nats REAL")


def m020_leases(db: Database) -> None:
    """Which node of a fleet writes an adapter, where a pair was first stored, and whether its writer has it."""
    columns = "adapter TEXT PRIMARY KEY, node TEXT NOT NULL, epoch INTEGER NOT NULL"
    db.execute(f"CREATE TABLE leases ({columns})")
    db.execute("ALTER TABLE pairs ADD COLUMN origin TEXT")
    db.execute("ALTER TABLE pairs ADD COLUMN handed_on INTEGER NOT NULL DEFAULT -1")
    db.execute("CREATE UNIQUE INDEX pairs_by_origin ON pairs (coalesce(origin, signal_id || '/' || id))")


def m021_tools(db: Database) -> None:
    """Arguments of chat templates beside messages, and the reasoning and calls beside answers."""
    for table, column in (
        *(("completions", "template_arguments"), ("choices", "beside")),
        *(("pairs", "template_arguments"), ("pairs", "chosen_beside"), ("pairs", "rejected_beside")),
    ):
        db.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT")


def m022_request_ids(db: Database) -> None:
    """The id that a client gave its request, by which feedback may name the answer."""
    db.execute("ALTER TABLE completions ADD COLUMN request_id TEXT")
    db.execute("CREATE INDEX completions_by_request ON completions (request_id, adapter) WHERE request_id IS NOT NULL")


def m023_federated(db: Database) -> None:
    """Consents to take part in rounds, and the ledger of records that have left."""
    db.execute("""
        CREATE TABLE federated_consents (
            user TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            account TEXT,
            text_sha256 TEXT NOT NULL
        )""")
    db.execute("""
        CREATE TABLE federated_ledger (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            user TEXT,
            campaign TEXT NOT NULL,
            round INTEGER NOT NULL,
            start TEXT NOT NULL,
            mode TEXT NOT NULL,
            noise REAL NOT NULL,
            epsilon REAL,
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL UNIQUE,
            nonce TEXT NOT NULL
        )""")
    db.execute("CREATE INDEX federated_ledger_by_user ON federated_ledger (user)")


MIGRATIONS: tuple[Migration, ...] = (
    *(m009_schema, m010_language, m011_application_runs, m012_counts),
    *(m013_jobs, m014_validation, m015_checkpoints, m016_users, m017_accounts),
    *(m018_shared_adapters, m019_preferences, m020_leases, m021_tools, m022_request_ids),
    m023_federated,
)


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


def check_schema(db: Database) -> None:
    """Raises UnknownMigration unless tables, columns, indexes, triggers and views are those of the file's migrations.

    They are compared with those of a new database. A trigger or a view of another origin would run as ours.
    """
    applied = known_of(_names(db))
    fresh = Database(memory=True, execute_plugins=False)
    migrate(fresh, tuple(migration for migration in MIGRATIONS if migration.__name__ in applied))
    for kind, name, *_ in sorted(_schema(db) ^ _schema(fresh)):
        way_out = "its file was changed; restore a backup that was not"
        raise UnknownMigration(f"has another schema than edged makes ({kind} {name[:80]})", way_out)


def _schema(db: Database) -> set[tuple[str, ...]]:
    """(Type, name, table, SQL with single spaces and no quotes) of all but the tables in which SQLite counts rows."""

    def plain(sql: str) -> str:
        return re.sub(r"\s*([(),])\s*", r"\1", " ".join(sql.replace('"', "").split()))

    rows = db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema")
    found = {(kind, name, table, plain(sql)) for kind, name, table, sql in rows}
    return {row for row in found if row[0] != "table" or row[1] not in ("sqlite_stat1", "sqlite_stat4")}


def check_known(db: Database) -> None:
    """Raises UnknownMigration when the file has a migration that is none of ours."""
    known_of(_names(db))


def _names(db: Database) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM migrations")}


def known_of(names: set[str], migrations: tuple[Migration, ...] = MIGRATIONS) -> set[str]:
    """Which of `migrations` (default: all) a file has whose table names these. Raises UnknownMigration."""
    folded = names & FOLDED
    if folded and folded != FOLDED:
        left = f"was left by an edged from before the first release ({len(folded)} of its {len(FOLDED)} migrations)"
        way_out = "no later one can use it; move it away, and restore another backup or start anew"
        raise UnknownMigration(left, way_out)
    applied = names - FOLDED | ({m009_schema.__name__} if folded else set())
    if unknown := sorted(applied - {migration.__name__ for migration in migrations}):
        raise UnknownMigration(f"was written by a newer edged (migration {unknown[0]})", "install that version")
    return applied
