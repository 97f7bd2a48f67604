"""The commands `edged store`, `edged backup` and `edged restore`: the database, and backups of the data folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edged.cli.options import asks_daemon, config_option, explain_os_errors, shown
from edged.cli.output import make_table, number, progress_bar, size
from edged.cli.settings import load_settings, settings_of
from edged.client.client import Client, DaemonError, NotRunning

if TYPE_CHECKING:
    from edged.settings.load import Settings
    from edged.store import Store
    from edged.store.restore import Contents

T = TypeVar("T")
data_dir_option = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Folder of a daemon that is stopped."
)


def ask_or_open(data_dir: Path | None, ask: Callable[[], T], work: Callable[[Store], T]) -> T:
    """Return what `work` does with the database in `data_dir`, or without that folder what `ask` hears of the daemon.

    Raises DaemonError, StoreError while a daemon uses the folder, and what the functions raise.
    """
    from edged.store import Store
    from edged.store.data_dir import DATABASE_FILE

    if data_dir is None:
        try:
            return ask()
        except NotRunning as error:
            raise NotRunning(f"{error}; of one that is stopped, name the folder: --data-dir DIR") from None
    path = data_dir.expanduser() / DATABASE_FILE
    if not path.is_file():
        raise DaemonError(f'data folder "{data_dir}" has no {DATABASE_FILE}')
    store = Store(path)
    try:
        return work(store)
    finally:
        store.close()


@click.group()
def store() -> None:
    """The database: what it holds, how large it is."""


@store.command()
@asks_daemon
def status(client: Client) -> Any:
    """Size, rows by table, the oldest completion."""
    data = client.get("/v1/store")
    rows = ((name, number(count), number(data["deleted"].get(name, 0))) for name, count in data["rows"].items())
    about = f"{data['path']}: {describe(data)}"
    return data, lambda: [about, make_table("table", "rows", "deleted since the start", rows=rows)]


@store.command()
@data_dir_option
@config_option
@asks_daemon
def prune(client: Client, data_dir: Path | None, config: Path | None) -> Any:
    """Delete now what the settings no longer keep.

    The daemon does this by itself every ten minutes. In the folder of one that is stopped, --config says what is kept.
    """
    data = ask_or_open(
        data_dir, lambda: client.post("/v1/store/prune", {}), lambda store: _prune(store, settings_of(config))
    )
    deleted = ", ".join(f"{number(count)} of {table}" for table, count in data["deleted"].items() if count)
    return data, f"deleted: {deleted or 'nothing'}; {size(data['store']['used_bytes'])} are in use"


def _prune(store: Store, settings: Settings) -> dict[str, Any]:
    from edged.settings.live import Live
    from edged.store.maintenance import Maintenance

    maintenance = Maintenance(store, Live(settings))
    return {"deleted": maintenance.sweep(), "store": maintenance.report()}


@store.command()
@asks_daemon
def vacuum(client: Client) -> Any:
    """Rewrite the database without free space.

    Answers go on; what is to be stored waits until it is done. It needs room for a second copy on the disk.
    """
    data = client.post("/v1/store/vacuum", {})
    return data, f"{size(data['bytes_before'])} before, {size(data['bytes_after'])} now"


def describe(data: dict[str, Any]) -> str:
    """Return the database's size and contents in one line."""
    most = f" of at most {size(data['max_bytes'])}" if data["max_bytes"] else ""
    oldest = data["oldest_completion"]
    since = f" since {oldest[:10]}" if oldest else ""
    log = f", {size(data['log_bytes'])} of log" if data["log_bytes"] else ""
    return f"{size(data['used_bytes'])}{most}{log}, {number(data['rows']['completions'])} completions{since}"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--verify", "only_verify", is_flag=True, help="Check a backup that is there; make none.")
@click.option(
    "--all-versions", is_flag=True, help="Every version on disk, to roll back to; else each adapter's newest."
)
@data_dir_option
@config_option
@asks_daemon
def backup(client: Client, file: Path, only_verify: bool, **source: Any) -> Any:
    """Write database, adapters, profiles and settings to FILE, a tar (.gz: compressed).

    A running daemon goes on serving and learning meanwhile; of one that is stopped, the data folder is read.
    The file is read again and checked before the command ends.
    """
    from edged.store.backup import write_file
    from edged.store.restore import verify

    with explain_os_errors(f"{file} cannot be written"):
        if not only_verify:
            with _chunks(client, **source) as (total, chunks):
                write_file(_with_progress(chunks, total), file)
        contents = verify(file)
    return _summary(file, contents), f"{file}: {_described(file, contents)}; verified"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--data-dir", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--force", is_flag=True, help="Put a folder with data aside, and this in its place.")
@shown
def restore(file: Path, data_dir: Path, force: bool) -> Any:
    """Make a data folder of the backup FILE, while the daemon is stopped.

    Everything is checked before the folder appears.
    """
    from edged.store.restore import restore as put

    contents, aside = put(file, data_dir, force)
    command, problem = _next_start(data_dir, contents)
    places = {"data_dir": str(data_dir), "aside": aside and str(aside)}
    text = [
        f"{data_dir}: {_described(file, contents)}",
        f"what was there is in {aside}" if aside else None,
        f"start with: {command}",
        f"before that: {problem}" if problem else None,
    ]
    return {**_summary(file, contents), **places, "start_with": command, "problem": problem}, text


def _next_start(data_dir: Path, contents: Contents) -> tuple[str, str]:
    """Return the command that serves a restored folder with its own settings and model, and what prevents it, or ""."""
    from edged.cli.doctor.model import find
    from edged.models import name_of
    from edged.settings.load import ConfigError
    from edged.store.backup import CONFIG_FILE
    from edged.store.base_models import base_name

    config = data_dir / CONFIG_FILE
    command = f"edged serve --config {shlex.quote(str(config))} --data-dir {shlex.quote(str(data_dir))}"
    try:
        model = load_settings(config).model
    except ConfigError as error:
        return command, str(error)
    taught = {base_name(data_dir, item["base"]) for item in contents.manifest["adapters"]} - {""}
    if taught and name_of(model) not in taught:
        others = ", ".join(sorted(taught))
        return command, f'its settings name "{name_of(model)}", adapters were learned on {others}: add --model DIR'
    _, missing = find(model)
    if missing is None or missing.state == "warn":
        return command, f"{missing.seen}: {missing.way_out}" if missing else ""
    return command, f"{missing.seen} on this box: copy the model there, or give its place (model.path, --model DIR)"


@contextmanager
def _chunks(
    client: Client, data_dir: Path | None, config: Path | None, all_versions: bool
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the backup's size in bytes and its chunks, from the daemon or, if none runs, from the data folder.

    Raises BackupError if the folder has no database.
    """
    also = ""
    if data_dir is None:
        try:
            headers, chunks = client.download("/v1/backup?versions=all" if all_versions else "/v1/backup")
            yield int(headers.get("X-Edged-Bytes") or 0), chunks
            return
        except NotRunning as error:
            also = f"{error}; and its "
    from edged.settings.toml import to_toml, without_secrets
    from edged.store.backup import BackupError, staged, stream
    from edged.store.data_dir import DATABASE_FILE, data_folder, folder_bytes
    from edged.store.lock import FolderLock

    settings = settings_of(config)
    folder = (data_dir or data_folder(settings.store.data_dir, os.environ)).expanduser()
    with explain_os_errors(f'data folder "{folder}" cannot be used'):
        if not (folder / DATABASE_FILE).is_file():
            raise BackupError(f'{also}data folder "{folder}" has no {DATABASE_FILE}: there is nothing to back up')
        lock = FolderLock(folder)
    try:
        with staged(folder, to_toml(without_secrets(settings)), lambda: None, all_versions) as stage:
            yield folder_bytes(stage), stream(stage, folder)
    finally:
        lock.release()


def _with_progress(chunks: Iterator[bytes], total: int) -> Iterator[bytes]:
    """Yield the chunks, with a progress bar on a terminal."""
    done, quiet = 0, click.get_current_context().params["as_json"]
    with progress_bar("", quiet=quiet) as show:
        for chunk in chunks:
            yield chunk
            done = min(done + len(chunk), total)
            show(done, total, f"{size(done)} of {size(total)}")


def _summary(file: Path, contents: Contents) -> dict[str, Any]:
    manifest = contents.manifest
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        **{key: manifest[key] for key in ("edged", "created_at", "data_dir", "adapters")},
        "files": len(manifest["files"]),
        "rows": contents.rows,
    }


def _described(file: Path, contents: Contents) -> str:
    manifest, rows = contents.manifest, contents.rows
    return (
        f"{size(file.stat().st_size)} of {manifest['created_at'][:19]}, {number(rows.get('completions', 0))} "
        f"completions, {number(rows.get('pairs', 0))} pairs, {number(len(manifest['adapters']))} adapter versions"
    )
