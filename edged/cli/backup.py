"""`edged backup` and `edged restore`: everything that was learned and stored, as one file."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import config_option, shown, with_client
from edged.cli.output import number, show_progress, size
from edged.cli.settings import load_settings, settings_of
from edged.client.client import Client, DaemonError, NotRunning

if TYPE_CHECKING:
    from edged.store.restore import Contents


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--verify", "only_verify", is_flag=True, help="Check a backup that is there; make none.")
@click.option(
    "--all-versions", is_flag=True, help="Every version on disk, to roll back to; else each adapter's newest."
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Folder of a daemon that is stopped.")
@config_option
@shown
@with_client
def backup(
    client: Client,
    file: Path,
    only_verify: bool,
    all_versions: bool,
    data_dir: Path | None,
    config: Path | None,
) -> Any:
    """Write database, adapters, profiles and settings to FILE, a tar (.gz: compressed).

    A running daemon goes on serving and learning meanwhile; of one that is stopped, the data folder is read.
    The file is read again and checked before the command ends.
    """
    from edged.store.backup import write_file
    from edged.store.restore import verify

    try:
        if not only_verify:
            with _chunks(client, data_dir, config, all_versions) as (total, chunks):
                write_file(_watched(chunks, total), file)
        contents = verify(file)
    except OSError as error:
        raise DaemonError(f"{file} cannot be written: {error.strerror or error}") from None
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
    """The command that serves a restored folder with its own settings and model, and why it could not yet, or ""."""
    from edged.cli.doctor.model import find
    from edged.models.source import name_of
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
    """The backup's size and bytes, from the daemon or, where none runs, from the folder."""
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
    try:
        folder = (data_dir or data_folder(settings.store.data_dir, os.environ)).expanduser()
        if not (folder / DATABASE_FILE).is_file():
            raise BackupError(f'{also}data folder "{folder}" has no {DATABASE_FILE}: there is nothing to back up')
        lock = FolderLock(folder)
    except OSError as error:
        raise DaemonError(f'data folder "{folder}" cannot be used: {error.strerror}') from None
    try:
        with staged(folder, to_toml(without_secrets(settings)), lambda: None, all_versions) as stage:
            yield folder_bytes(stage), stream(stage, folder)
    finally:
        lock.release()


def _watched(chunks: Iterator[bytes], total: int) -> Iterator[bytes]:
    """The chunks; on a terminal, how many there were."""
    done, told = 0, sys.stderr.isatty() and not click.get_current_context().params["as_json"]
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        if told:
            show_progress(f"{size(min(done, total))} of {size(total)}")
    if told:
        show_progress("")


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
