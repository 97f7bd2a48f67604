"""The commands `edged adapters` (list, show, rollback, mend, export, import, forget)."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

import click

from edged.cli.options import asks_daemon, explain_os_errors
from edged.cli.output import make_table, moment, number, short, size
from edged.cli.status import NO_ADAPTER, beliefs, fetch_metrics, metrics_plot, metrics_table, verdict
from edged.cli.store import ask_or_open, data_dir_option
from edged.client.client import Client, DaemonError, NotRunning

if TYPE_CHECKING:
    from edged.store import Store

_LONGEST_TEST_S = 120.0
_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter, for peft and for the daemon."""


@click.group()
def adapters() -> None:
    """What was learned for each user."""


@adapters.command("list")
@asks_daemon
def list_(client: Client) -> Any:
    """All adapters: a verdict, what waits and is held, size on disk, last use."""
    data = fetch_metrics(client, with_series=False)
    titles = ("adapter", "verdict", "pairs", "waiting", "held", "on disk", "last use (UTC)")
    rows = (
        (
            *(f"{item['adapter']} v{item['version']}", item["verdict"]),
            *(str(item[f"pairs_{state}"]) for state in ("seen", "queued", "quarantined")),
            *(size(item["disk_bytes"]), moment(item["last_used_at"])),
        )
        for item in data["adapters"]
    )
    return data, lambda: make_table(*titles, rows=rows) if data["adapters"] else NO_ADAPTER


@adapters.command()
@click.argument("name")
@asks_daemon
def show(client: Client, name: str) -> Any:
    """One adapter: metrics, versions, and how it came about."""
    data = client.get(_path(name))
    titles = ("version", "made (UTC)", "reason", "held out", "KL", "neutral text", "to return", "answer")
    caption = (
        "held out: pairs of the test that it predicts; KL in nats/token; neutral text: how much less likely it became; "
        "version 0 is the untrained adapter"
    )
    shown = [item for item in data["versions"] if item["reason"] != "practised" or item["on_disk"]]
    if left_out := len(data["versions"]) - len(shown):
        caption += f"; {left_out} that practice made and that are no longer on disk are left out"
    versions = make_table(*titles, rows=(_version_row(item, data) for item in shown), caption=caption)
    begun = next((item for item in data["versions"] if item["reason"].startswith("start ")), None)
    lines = [
        f"believes: {beliefs(data)}" if data["beliefs"] else "",
        f"{begun['reason']}: taken as version {begun['version']}; `edged starts scores {name}`" if begun else "",
    ]
    return data, lambda: [verdict(data), *filter(None, lines), metrics_table([data]), versions, metrics_plot(data)]


def _version_row(item: dict[str, Any], adapter: dict[str, Any]) -> list[str]:
    share, pairs, change = item["held_out_reward_accuracy"], item["held_out_pairs"], item.get("neutral_nll_change")
    way_back = f"edged adapters rollback {adapter['adapter']} {item['version']}" if item["on_disk"] else "not on disk"
    return [
        str(item["version"]),
        moment(item["created_at"]),
        item["reason"],
        f"{round(share * pairs)} of {pairs}" if pairs else "–",
        number(item["kl_nats"]),
        "–" if change is None else f"{100 * change:+.1f} %",
        f"serving{', on disk' * item['on_disk']}" if item["version"] == adapter["version"] else way_back,
        short(item.get("answer") or "–"),
    ]


@adapters.command()
@click.argument("name")
@click.argument("version", type=click.IntRange(0))
@asks_daemon
def rollback(client: Client, name: str, version: int) -> Any:
    """Serve an earlier VERSION of NAME again.

    It gets a new number, so that nothing is lost; VERSION 0 is the untrained adapter.
    """
    data = client.post(f"{_path(name)}/rollback", {"version": version})
    how = "already" if data["version"] == version else f"again, as version {data['version']}"
    return data, f"{name} serves version {version} {how}"


@adapters.command()
@click.argument("name")
@asks_daemon
def mend(client: Client, name: str) -> Any:
    """Test the language of NAME's version now; where it is broken, go back to the newest that is not.

    The daemon's guard does this by itself. Pairs that broken versions had learned are learned again.
    """
    before = {item["version"]: item["tested_at"] for item in client.get(_path(name))["versions"]}
    version, end = client.post(f"{_path(name)}/mend", {})["version"], time.monotonic() + _LONGEST_TEST_S
    if version == 0:
        raise DaemonError(f"{name} has learned nothing yet: the untrained adapter answers as the base model")
    while True:
        data = client.get(_path(name))
        since = [item for item in reversed(data["versions"]) if item["version"] >= version]
        tested = next((item for item in since if item["tested_at"] != before.get(item["version"])), None)
        if tested is not None:
            break
        if time.monotonic() > end:
            within = f"within {_LONGEST_TEST_S:.0f} s"
            raise DaemonError(f"{name} was not tested {within}: `edged status` tells what fine-tuning waits for")
        time.sleep(0.2)
    if not tested["problem"]:
        return data, f"version {tested['version']} of {name} passes its test: nothing is to be mended"
    again = next((item["restored"] for item in data["versions"] if item["reason"].startswith("guard")), 0)
    served = f"version {again}" if again else "the untrained adapter"
    return data, (
        f"version {tested['version']} of {name} was broken ({tested['problem']}): {served} is served again, and tested "
        "in its turn; what broken versions had learned is learned again"
    )


@adapters.command()
@click.argument("name")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@asks_daemon
def export(client: Client, name: str, output: Path) -> Any:
    """Write NAME's newest version as a PEFT folder.

    PEFT and TRL load it as it is, vLLM where it is LoRA, and so does `edged adapters import`.
    """
    refuse_full(output)
    headers, chunks = client.download(f"{_path(name)}/export")
    with explain_os_errors(f"{output} cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        # Temporary files, as a half-written adapter would make the next export fail.
        with tempfile.TemporaryDirectory(dir=output) as whole, tempfile.TemporaryFile(dir=whole) as packed:
            packed.writelines(chunks)
            packed.seek(0)
            _unpack(packed, Path(whole))
            for file in _FILES:
                (Path(whole) / file).rename(output / file)
    version = int(headers["X-Edged-Version"])
    with explain_os_errors(f"{output} cannot be written"):
        (output / "README.md").write_text(_card(output, version, client.get(_path(name))), "utf-8")
    data = {"adapter": name, "version": version, "path": str(output)}
    return data, f"{name} version {version} is in {output}"


def _card(folder: Path, version: int, adapter: dict[str, Any]) -> str:
    """Return a model card of an exported version: its base, its pairs, its tests."""
    config = json.loads((folder / _FILES[0]).read_text("utf-8"))
    base, kind = config.get("base_model_name_or_path"), "A DoRA" if config.get("use_dora") else "A LoRA"
    kind = "An IA3" if config.get("peft_type") == "IA3" else kind
    test: dict[str, Any] = next((item for item in adapter["versions"] if item["version"] == version), {})
    share, pairs, change = (
        test.get(key) for key in ("held_out_reward_accuracy", "held_out_pairs", "neutral_nll_change")
    )
    measured = [
        f"- {adapter['pairs_trained']} of {adapter['pairs_seen']} preference pairs learned; {adapter['verdict']}",
        f"- held-out pairs predicted: {round(share * pairs)} of {pairs}" if share is not None and pairs else "",
        f"- KL to the base: {test['kl_nats']:.3f} nats/token" if test.get("kl_nats") is not None else "",
        f"- NLL of neutral text: {100 * change:+.1f} %" if change is not None else "",
    ]
    head = (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: peft\n---\n\n# {adapter['adapter']}, version {version}\n\n"
    )
    return head + f"{kind} adapter that edged learned while it served.\n\n" + "\n".join(filter(None, measured)) + "\n"


def refuse_full(folder: Path) -> None:
    """Raise DaemonError if `folder` exists and is not empty, so that exporting there would touch existing files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DaemonError(f"{folder} exists and is not an empty folder: choose another --output")


def _unpack(packed: IO[bytes], folder: Path) -> None:
    """Extract an adapter's two files by name into `folder`; other members of the archive are ignored.

    Raises DaemonError if one is missing or the archive is malformed.
    """
    try:
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            for name in _FILES:
                source = tar.extractfile(name)
                if source is None:
                    raise KeyError(name)
                with source, (folder / name).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, KeyError) as error:
        raise DaemonError(f"what the daemon sent is no adapter ({error}): is it another version of edged?") from None


@adapters.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--user", "-u", required=True, metavar="NAME", help="Whose newest version it becomes.")
@asks_daemon
def import_(client: Client, source: Path, user: str) -> Any:
    """Serve the PEFT adapter in SOURCE for NAME: a folder, or its adapter_model.safetensors.

    It becomes a new version, which can be rolled back. Only safetensors are read, never a pickle.
    """
    data = upload(client, user, checked_folder(source))
    return data, f"{source} is version {data['version']} of {user}"


def upload(client: Client, user: str, folder: Path, query: str = "") -> dict[str, Any]:
    """Upload the adapter in `folder` as the user's newest version; returns the daemon's answer."""
    return client.call("POST", f"{_path(user)}/import{query}", packed(folder), "application/x-tar")


def packed(folder: Path) -> bytes:
    """Return a tar of the adapter in `folder`."""
    archive = io.BytesIO()
    with explain_os_errors(f"{folder} cannot be read"), tarfile.open(fileobj=archive, mode="w:") as tar:
        for name in _FILES:
            tar.add(folder / name, arcname=name)
    return archive.getvalue()


def checked_folder(source: Path) -> Path:
    """Return the adapter's folder, where `source` is that folder or its .safetensors file.

    Raises DaemonError for other formats and if a file is missing.
    """
    folder = source if source.is_dir() else source.parent
    if not source.is_dir() and source.suffix != ".safetensors":
        way_out = "convert it where you trust it, with peft's model.save_pretrained(DIRECTORY)"
        pickles = "pickles (.bin, .pt) are never read"
        raise DaemonError(f"{source} is not a folder or a .safetensors file: {pickles}; {way_out}")
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise DaemonError(f"{folder} has no {missing[0]}: give what peft's save_pretrained wrote, as safetensors")
    return folder


@adapters.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@data_dir_option
@asks_daemon
def forget(client: Client, name: str, yes: bool, data_dir: Path | None) -> Any:
    """Delete everything learned for NAME.

    That is the adapter with all its versions, and the user's completions, signals and pairs. A search afterwards shows
    that nothing is left; exit code 1 says that it found something. Backups and exports that were made before still hold
    NAME.
    """
    if not yes:
        click.confirm(_question(client, name), abort=True)
    data = ask_or_open(data_dir, lambda: client.call("DELETE", _path(name)), lambda store: _forget_stopped(store, name))
    rows, searched = sum(data["rows_deleted"].values()), data["searched"]
    found = [f"the {it['what']} in {it['table']}.{it['column']} ({it['rows']} rows)" for it in searched["found"]]
    nothing = "nothing was found" if data["vacuumed"] else "nothing was found; the database keeps the room, see the log"
    others, new = searched["said_by_others"], searched["new_rows"]
    text = [
        f"{name} is forgotten: {rows} rows deleted, {searched['columns']} columns and the adapters' files searched for "
        f"the name and {searched['texts']} texts",
        *(f"FOUND {what}" for what in [*found, *searched["files"]]),
        nothing if data["verified"] else None,
        f"{others} rows of other users hold the same words" if others else None,
        f"{new} rows came after it had begun, and stay" if new else None,
        f"copies made before still hold {name}: backups (a restore brings {name} back), folders put aside by a "
        "restore, exports",
    ]
    return data, text, 0 if data["verified"] else 1


def _question(client: Client, name: str) -> str:
    """Return the question that is asked before NAME is forgotten, which tells where there is no such adapter."""
    with contextlib.suppress(NotRunning):
        known = [item["adapter"] for item in client.get("/v1/adapters")["adapters"]]
        if name not in known:
            rest = "Delete what else may be stored of this name, such as completions?"
            return f'No adapter is called "{name}" (known: {", ".join(known) or "none yet"}). {rest}'
    return f"Delete everything learned for {name}?"


def _forget_stopped(store: Store, name: str) -> dict[str, Any]:
    from edged.settings.access import USER_NAME
    from edged.store.forgetting import forget_stopped

    done = forget_stopped(store, name) if USER_NAME.fullmatch(name) else None
    if done is None:
        raise DaemonError(f'nothing of "{name}" is stored in {store.path.parent}')
    return {"adapter": name, "forgotten": True, **done}


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
