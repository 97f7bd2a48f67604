"""What the data folder holds for a rebuild: one adapter's pairs in tokens, and its newest whole version."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlite_utils import Database

from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_tokens import PairCodec, UnusablePrompt, tokenize_pair
from edged.store.base_models import served_base
from edged.store.data_dir import DATABASE_FILE
from edged.store.feedback import get_pairs, pair_ids_of
from edged.store.migrations import UnknownMigration, check_known
from edged.text.tokenizer import TokenizerError

log = logging.getLogger(__name__)


class RebuildError(RuntimeError):
    """An adapter cannot be rebuilt or adopted; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StoredPairs:
    """`learned`: what the adapter was trained on, in the order of the feedback. `held_out`: what it never was."""

    learned: list[TokenPair]
    held_out: list[TokenPair]


def stored_pairs(data_dir: Path, adapter: str, codec: PairCodec, max_tokens: int, fingerprint: str) -> StoredPairs:
    """The adapter's pairs that say something on the base model of that fingerprint.

    A daemon may be writing the database. Raises RebuildError.
    """
    path = data_dir / DATABASE_FILE
    if not path.is_file():
        raise RebuildError(
            f'data folder "{data_dir}" has no {DATABASE_FILE}: give --data-dir, or --config of the daemon'
        )
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA query_only = ON")
            db = Database(connection, execute_plugins=False)
            check_known(db)
            base, rows = served_base(db), get_pairs(db, pair_ids_of(db, adapter))
    except UnknownMigration as error:
        raise RebuildError(f'database "{path}" {error}') from None
    except sqlite3.Error as error:
        raise RebuildError(f'database "{path}" cannot be read: {error}') from None
    if base != fingerprint:
        raise RebuildError(
            f'data folder "{data_dir}" speaks of the base model {base}, the settings name {fingerprint}: give the '
            "--config and --model that the daemon has"
        )
    by_state: dict[str, list[TokenPair]] = {}
    for row in rows:
        try:
            pair, _ = tokenize_pair(codec, row, max_tokens)
        except (TokenizerError, UnusablePrompt) as error:
            log.warning("pair %d is left out: %s", row.id, error)
        else:
            by_state.setdefault(row.state, []).append(pair)
    learned = sorted(by_state.get("trained", []) + by_state.get("learnt", []), key=lambda pair: pair.pair_id)
    if not learned:
        raise RebuildError(
            f'no pair of "{adapter}" was learned yet ({len(rows)} are stored, {len(by_state.get("queued", []))} wait)'
        )
    return StoredPairs(learned, by_state.get("held_out", []))
