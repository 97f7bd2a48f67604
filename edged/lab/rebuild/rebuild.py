"""One rebuild: the base model, the stored pairs, TRL, the comparison, and the adapter's files."""

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from sqlite_utils import Database
from transformers import AutoTokenizer

from edged.align.adapters.adapter import AdapterError, AdapterFiles, Snapshot
from edged.align.adapters.form import LoraSpec
from edged.align.feedback.pair import TokenPair, VersionPublished
from edged.align.feedback.pair_tokens import PairTokenizer, UnusablePrompt, tokenize_pair
from edged.engine.build import lora_spec
from edged.engine.model.base_files import base_fingerprint, files_digest
from edged.engine.model.loading import load_pretrained, target_linears
from edged.engine.model.served_model import fingerprint
from edged.lab.rebuild.scores import Score, greedy_agreement, score
from edged.lab.rebuild.training import REBUILT, RebuildError, Recipe, check_loss, check_trl, train
from edged.models import source_of
from edged.settings.load import Settings
from edged.store import Store, StoreError, utc_now, utc_text
from edged.store.adapters import insert_version, set_version_saved
from edged.store.base_models import served_base
from edged.store.data_dir import ADAPTERS_FOLDER, DATABASE_FILE
from edged.store.feedback import get_pairs, pair_ids_of
from edged.store.migrations import UnknownMigration, check_known
from edged.tensors.cpu_threads import CpuThreads
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)
ONLINE = "online"
_PROMPTS, _GREEDY_TOKENS = 16, 32
"""Number of prompts, and tokens of each answer, that greedy agreement compares."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the online and the rebuilt adapter.

    `online` and `rebuilt` are by set of pairs ("held_out", "learned"); None if a set has no pairs. `agreement` is the
    share of greedy tokens that are the same (see `greedy_agreement`).
    """

    adapter: str
    online_version: int
    epochs: int
    learning_rate: float
    steps: int
    online: dict[str, Score | None]
    rebuilt: dict[str, Score | None]
    agreement: float | None


class Rebuild:
    """The rebuild of one adapter in one data folder, on the base model that the settings name."""

    def __init__(self, settings: Settings, model_dir: Path, name: str, data_dir: Path, adapter: str) -> None:
        """Load the base model and the stored pairs and versions. Raises RebuildError, ModelRefused and
        TokenizerError."""
        check_trl()
        check_loss(settings.align)
        self._settings, self._data_dir, self.adapter = settings, data_dir, adapter
        self._base: Any = load_pretrained(str(model_dir), settings.model, "sdpa")[0]
        if self._base.device.type == "cpu":
            CpuThreads(settings.model.threads, self._base.num_parameters())
        self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
        self.spec = self._spec(name, model_dir)
        most, base = settings.align.max_pair_tokens, self.spec.fingerprint
        self.learned, self.held_out = _stored_pairs(data_dir, adapter, Tokenizer.load(model_dir), most, base)
        root = data_dir / ADAPTERS_FOLDER / self.spec.fingerprint
        if not root.is_dir():
            raise RebuildError(f'"{adapter}" has no version on disk in {root}')
        self._files = AdapterFiles(root, self.spec, settings.store.keep_versions)
        self.online_version, problems = self._files.newest(adapter)
        if not self.online_version:
            raise RebuildError(f'"{adapter}" has no whole version on disk: {"; ".join(problems) or root}')
        if (kind := self._files.read(adapter, self.online_version).form.kind) != "LoRA":
            way_out = f"go back to a version from before it was imported (`edged adapters rollback {adapter} VERSION`)"
            raise RebuildError(f'"{adapter}" is of the form {kind}, and only a LoRA can be rebuilt: {way_out}')
        self._model: Any = None

    def _spec(self, name: str, model_dir: Path) -> LoraSpec:
        align = self._settings.align
        self._targets = target_linears(self._base, align.target_modules)
        linears = {target: self._base.get_submodule(target) for target in self._targets}
        shapes = {target: (linear.in_features, linear.out_features) for target, linear in linears.items()}
        base = base_fingerprint(fingerprint(self._base), files_digest(model_dir, self._data_dir), self._data_dir)
        return lora_spec(shapes, name, source_of(self._settings.model, model_dir), base, align)

    def train(self, recipe: Recipe, progress: Callable[[int, int, float], None]) -> Comparison:
        """Train a new adapter and compare it with the online version. Calls `progress(step, steps, loss)` after each
        step."""
        align, learned, held_out = self._settings.align, self.learned, self.held_out
        self._model, steps = train(self._base, self._tokenizer, self._targets, learned, align, recipe, progress)
        path = self._files.path(self.adapter, self.online_version)
        self._model.load_adapter(str(path), ONLINE, torch_device=str(self._base.device))
        self._model.eval()
        sets: dict[str, Sequence[TokenPair]] = {"held_out": held_out, "learned": learned}
        prompts = [pair.prompt for pair in [*held_out, *reversed(learned)]][:_PROMPTS]
        scores = {
            name: {key: score(self._model, name, part, align.beta) for key, part in sets.items()}
            for name in (ONLINE, REBUILT)
        }
        agreement = greedy_agreement(self._model, ONLINE, REBUILT, prompts, _GREEDY_TOKENS)
        of = (self.adapter, self.online_version, recipe.epochs, recipe.learning_rate, steps)
        return Comparison(*of, online=scores[ONLINE], rebuilt=scores[REBUILT], agreement=agreement)

    def save(self, folder: Path) -> None:
        """Write the rebuilt adapter as a PEFT folder."""
        self._model.save_pretrained(str(folder), selected_adapters=[REBUILT])

    def publish(self, folder: Path) -> int:
        """Make what `save` wrote the newest version in the folder of a stopped daemon; return its number.

        Files that root writes are given to the folder's owner, who runs the daemon. Raises RebuildError, also while a
        daemon uses the folder.
        """
        try:
            store = Store(self._data_dir / DATABASE_FILE)
        except StoreError as error:
            raise RebuildError(str(error)) from None
        try:
            last = "SELECT max(version) FROM adapter_versions WHERE adapter = ?"
            (newest,) = store.read(lambda db: db.execute(last, [self.adapter]).fetchone())
            number = max([newest or 0, *self._files.versions(self.adapter)]) + 1
            weights = load_file(folder / "adapter_model.safetensors")
            try:
                path, removed = self._files.save(Snapshot(self.adapter, number, weights, {}, self.spec.form))
                self._files.check(self.adapter, number)
            except (AdapterError, OSError) as error:
                raise RebuildError(f"the rebuilt adapter could not be written: {error}") from error
            made = VersionPublished(self.adapter, number, self.online_version, "rebuilt", len(self.learned))
            store.write(lambda db: insert_version(db, utc_text(utc_now()), asdict(made))).result()
            store.write(lambda db: set_version_saved(db, self.adapter, number, str(path), removed)).result()
            return number
        finally:
            store.close()
            self._hand_over()

    def _hand_over(self) -> None:
        if os.geteuid() != 0:
            return
        owner = self._data_dir.stat()
        adapter = self._files.root / self.adapter
        for path in (*self._data_dir.iterdir(), adapter, *adapter.rglob("*")):
            if path.lstat().st_uid == 0:
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _stored_pairs(
    data_dir: Path, adapter: str, tokenizer: PairTokenizer, max_tokens: int, fingerprint: str
) -> tuple[list[TokenPair], list[TokenPair]]:
    """Return the adapter's (learned pairs in order, held-out pairs) on the base model of that fingerprint.

    A daemon may be writing the database. Raises RebuildError.
    """
    path = data_dir / DATABASE_FILE
    if not path.is_file():
        way_out = "give --data-dir, or --config of the daemon"
        raise RebuildError(f'data folder "{data_dir}" has no {DATABASE_FILE}: {way_out}')
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA query_only = ON")
            db = Database(connection, execute_plugins=False)
            check_known(db)
            base, pair_ids = served_base(db), pair_ids_of(db, adapter)
            by_state = _tokenized(db, pair_ids, tokenizer, max_tokens) if base == fingerprint else {}
    except UnknownMigration as error:
        raise RebuildError(f'database "{path}" {error}') from None
    except sqlite3.Error as error:
        raise RebuildError(f'database "{path}" cannot be read: {error}') from None
    if base != fingerprint:
        named = f"the settings name {fingerprint}: give the --config and --model that the daemon has"
        raise RebuildError(f'data folder "{data_dir}" speaks of the base model {base}, {named}')
    learned = sorted(by_state.get("trained", []) + by_state.get("learnt", []), key=lambda pair: pair.pair_id)
    if not learned:
        counts = f"{len(pair_ids)} are stored, {len(by_state.get('queued', []))} wait"
        raise RebuildError(f'no pair of "{adapter}" was learned yet ({counts})')
    return learned, by_state.get("held_out", [])


def _tokenized(
    db: Database, pair_ids: Sequence[int], tokenizer: PairTokenizer, max_tokens: int
) -> dict[str, list[TokenPair]]:
    """Return the pairs in tokens by state, without single ratings; their texts are in memory one at a time."""
    by_state: dict[str, list[TokenPair]] = {}
    for pair_id in pair_ids:
        for row in get_pairs(db, [pair_id]):
            if row.single:
                continue
            try:
                pair, _ = tokenize_pair(tokenizer, row, max_tokens)
            except (TokenizerError, UnusablePrompt) as error:
                log.warning("pair %d is left out: %s", row.id, error)
            else:
                by_state.setdefault(row.state, []).append(pair)
    return by_state
