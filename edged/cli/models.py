"""The commands `edged models`: models of the hub on this box, and what a model can before it is served."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.options import config_option, explain_os_errors, shown
from edged.cli.output import echo, make_table, progress_bar, size
from edged.cli.settings import settings_of
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from edged.cli.doctor.finding import Finding
    from edged.settings.load import Settings

_WITHIN_S = 300.0
"""Seconds that a check may take: a large vocabulary is read, and a large model is built without its weights."""
name_argument = click.argument("name", metavar="NAME[@REVISION]")


@click.group()
def models() -> None:
    """Models of the Hugging Face hub on this box, and what a model can.

    They lie in HF_HOME: without one, the installed daemon's where edged is installed, else ~/.cache/huggingface.
    """


@models.command()
@name_argument
@config_option
@shown
def pull(name: str, config: Path | None) -> Any:
    """Download a model, so that a start needs no network.

    REVISION is a branch, a tag or a commit. What broke off goes on where it was. HF_TOKEN is a token of the hub for
    models that want one. As root, the installed daemon's account does it: the daemon itself may stay without a network.
    """
    from edged.cli.doctor.examine import examination
    from edged.cli.doctor.finding import in_place_of
    from edged.models.hub import demand_room, download

    settings = _settings(config, name)
    _demand_hub_name(settings)
    with explain_os_errors(), progress_bar("asking") as progress, in_place_of(examination(settings, config).account):
        needed = demand_room(settings.model)
        # Of all files, where the client counts those that have begun.
        folder = download(settings.model, lambda done, total, now: progress(done, needed or total, now))
    found, commit = settings.model.path, folder.name
    how = f'To serve this very revision:\n\n[model]\npath = "{found}"\nrevision = "{commit}"'
    done = f"{size(needed)} downloaded" if needed else "nothing had to be downloaded"
    if needed is None:
        done = "the hub cannot be asked, and this is what is known of it here"
    return {"name": found, "revision": commit, "folder": str(folder), "downloaded_bytes": needed or 0}, [
        f"{found} is in {folder}: {done}",
        how,
    ]


@models.command("list")
@config_option
@shown
def list_(config: Path | None) -> Any:
    """The models of the hub on this box."""
    settings_of(config)  # names the folder
    from edged.models.hub import downloaded_models

    found = downloaded_models()
    data = {"models": [asdict(each) for each in found], "size_bytes": sum(each.size_bytes for each in found)}
    if not found:
        return data, "no model of the hub is on this box: edged models pull NAME"
    rows = (
        (each.name, each.revision[:12], ", ".join(each.refs), size(each.size_bytes), "" if each.whole else "not whole")
        for each in found
    )
    return data, lambda: make_table("model", "revision", "called", ">size", "", rows=rows)


@models.command()
@name_argument
@config_option
@shown
def remove(name: str, config: Path | None) -> Any:
    """Delete a model from this box: all of its revisions, or the one that is named.

    Refused for the one that is served, or that the settings name: the next start would look for it.
    """
    from edged.cli.doctor import service
    from edged.cli.doctor.examine import examination
    from edged.cli.doctor.finding import in_place_of
    from edged.models.hub import name_and_revision, remove, revisions_of

    asked = _settings(config, name)
    _demand_hub_name(asked)
    meant = revisions_of(asked.model)
    it = examination(settings_of(config), config)
    _, running, theirs = service.daemon(it)
    served = (theirs or it.settings).model
    wanted = served.revision or "main"
    if served.path == asked.model.path and any(wanted in (*each.refs, each.revision) for each in meant):
        who = "the running daemon serves it" if running else "the settings name it (model.path)"
        raise DaemonError(f'model "{name_and_revision(served)}" is in use: {who}; serve another one first')
    with explain_os_errors(), in_place_of(it.account):
        freed = remove(meant)
    gone = [f"{each.name}@{each.revision}" for each in meant]
    return {"removed": gone, "freed_bytes": freed}, [f"{each} removed" for each in gone] + [f"{size(freed)} are free"]


@models.command()
@click.argument("model", metavar="PATH_OR_NAME")
@config_option
@shown
def check(model: str, config: Path | None) -> Any:
    """Say what a model can here, before it is served: a directory, a name on the hub, with @REVISION or without.

    Whether it is served and trained, its chat template, tools, reasoning, and the memory that it needs. Of one that is
    not on this box the files but the weights are fetched, and left nowhere. `edged doctor` says it of the served one.

    Exit code: 0 when all is well, 1 with warnings, 2 when it cannot be served.
    """
    from edged.cli.doctor.check import CheckProcess
    from edged.cli.doctor.command import findings_table
    from edged.cli.doctor.examine import FILE_CHECKS, MODEL_CHECKS, examination
    from edged.cli.doctor.finding import EXIT_CODES, worst
    from edged.cli.doctor.model import weights
    from edged.models import local_model
    from edged.models.hub import download_texts, downloaded

    settings = _settings(config, model)
    with tempfile.TemporaryDirectory(prefix="edged-model-") as temporary, explain_os_errors():
        folder, rows, fetched = local_model(settings.model) or downloaded(settings.model), list(FILE_CHECKS), None
        if folder is None:
            folder = Path(temporary)
            fetched = download_texts(settings.model, folder)
            rows = [row for row in FILE_CHECKS if row.run is not weights]
        it = examination(settings, config, within_s=_WITHIN_S)
        it = replace(it, model_dir=folder, checks=CheckProcess(settings, folder), running=True)
        found = [each for row in (*rows, *MODEL_CHECKS) if (each := row.finding(it)) is not None]
        needs, tokens = dict(it.needs), dict(it.tokens)
    if fetched is not None:
        found.insert(0, _to_download(fetched))
    if not (needs and tokens) and worst(found) != "fail":
        raise DaemonError(f'model "{model}" could not be looked at within {_WITHIN_S:.0f} s: see `edged doctor`')
    state = worst(found)
    about = {"model": model, "folder": None if fetched is not None else str(folder), "state": state}
    data = {**about, "findings": [asdict(each) for each in found], "memory": needs, "chat": tokens}
    return data, lambda: findings_table(found), EXIT_CODES[state]


@models.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
@shown
def convert(file: Path, folder: Path) -> Any:
    """Make a checkpoint of a GGUF file in a new FOLDER, which is served and trained like any other.

    Its blocks become bfloat16, which needs two to five times the file's size on the disk. Refused, with the reason, is
    a file of which not every number would be understood.
    """
    from edged.models.gguf import is_gguf
    from edged.runtime.process import prepare

    if not is_gguf(file):
        raise DaemonError(f'"{file}" is no GGUF file: a folder with safetensors is served as it is')
    echo(f"edged: reading {file} ({size(file.stat().st_size)})", err=True)
    prepare()
    try:
        from edged.engine.model.gguf_checkpoint import convert
    except ImportError as error:
        raise DaemonError(f"the installed transformers reads no such file ({error}): install edged again") from None
    with explain_os_errors():
        made = convert(file, folder)
    data = {"folder": str(folder), **made}
    return data, [
        f"{folder} has {made['class']}: {size(made['bytes'])} in {made['dtype']}, of {', '.join(made['blocks'])}",
        f"To serve it: edged serve --model {folder} (model.quantize packs it again)",
    ]


def _to_download(weights: dict[str, int]) -> Finding:
    from edged.cli.doctor.finding import Finding

    if not weights:
        seen = "its repository has no *.safetensors: pickles may run code, and are not loaded"
        return Finding("model", "fail", seen, "take a repository that has them")
    return Finding("model", "ok", f"not on this box: {size(sum(weights.values()))} of weights to download")


def _settings(config: Path | None, model: str) -> Settings:
    """Return the settings, with the model that is named as PATH, NAME or NAME@REVISION."""
    path, _, revision = (model, "", "") if Path(model).expanduser().exists() else model.partition("@")
    found = settings_of(config)
    return found.model_copy(update={"model": found.model.model_copy(update={"path": path, "revision": revision})})


def _demand_hub_name(settings: Settings) -> None:
    """Raise DaemonError for a directory and the demo model, ModelMissing for what is no name."""
    from edged.models import local_model

    if local_model(settings.model) is not None:
        raise DaemonError(f'"{settings.model.path}" is no model of the hub: give OWNER/NAME')
