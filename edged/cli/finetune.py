"""The commands `edged finetune` and `edged files`: fine-tuning jobs over files of examples."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import asks_daemon, explain_os_errors
from edged.cli.output import make_table, number, show_progress
from edged.client.client import Client

JOBS, FILES = "/v1/fine_tuning/jobs", "/v1/files"
ASK_S = 0.5
"""Interval at which a job is looked at."""
_BOUNDARY = "edged-form-with-one-file"


@click.group()
def finetune() -> None:
    """Fine-tuning jobs: a file of examples in, an adapter out."""


@finetune.command()
@click.argument("data")
@click.option(
    "--suffix", "-s", metavar="NAME", help="The new adapter's name; none: your own with a part of the job's id."
)
@click.option("--method", default="supervised", help="supervised, dpo, ipo, simpo, orpo or kto.")
@click.option(
    "--epochs", type=click.IntRange(1), metavar="N", help="How often each example is seen; none: by their number."
)
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Examples of a step; none: by their number.")
@click.option(
    "--learning-rate-multiplier",
    type=float,
    metavar="X",
    help="Times jobs.learning_rate; none: 1. Small models need more.",
)
@click.option("--beta", type=float, metavar="B", help="The loss's beta, where the method has one.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of the examples' order; none: any.")
@click.option("--from", "parent", metavar="USER", help="Begin with this user's adapter; none: from nothing.")
@click.option("--valid", metavar="DATA", help="Tell the loss of these examples, too, on which nothing is trained.")
@click.option("--watch", "watched", is_flag=True, help="Wait for the end, and tell how it goes.")
@asks_daemon
def create(client: Client, data: str, suffix: str | None, method: str, watched: bool, **more: Any) -> Any:
    """Make an adapter of DATA: a file of JSON lines, or the id of one that was uploaded."""
    base = client.get("/v1/models")["data"][0]["id"]
    chosen = {"n_epochs": more["epochs"], "batch_size": more["batch_size"], "beta": more["beta"]}
    chosen["learning_rate_multiplier"] = more["learning_rate_multiplier"]
    own = {"hyperparameters": {name: value for name, value in chosen.items() if value is not None}}
    body = {"model": f"{base}:{more['parent']}" if more["parent"] else base, **_file_ids(client, data, more["valid"])}
    body |= {"suffix": suffix, "seed": more["seed"], "method": {"type": method, method: own}}
    job = client.post(JOBS, body)
    return _watch(client, job["id"]) if watched else (job, f"{job['id']}: `edged finetune watch {job['id']}`")


@finetune.command("list")
@asks_daemon
def list_jobs(client: Client) -> Any:
    """Your latest jobs, newest first."""
    data = client.get(f"{JOBS}?limit=100")
    rows = [
        (job["id"], job["status"], job["fine_tuned_model"] or "–", job["method"]["type"], _when(job["created_at"]))
        for job in data["data"]
    ]
    return data, lambda: make_table("job", "status", "model", "method", "created", rows=rows) if rows else "no jobs"


@finetune.command()
@click.argument("job")
@asks_daemon
def show(client: Client, job: str) -> Any:
    """A job, the end of its report, and its checkpoints: versions at the ends of epochs, which answer, too."""
    data = client.get(_path(JOBS, job))
    report, kept = (client.get(f"{_path(JOBS, job)}/{part}?limit=10")["data"] for part in ("events", "checkpoints"))
    told = f"checkpoints: {', '.join(each['fine_tuned_model_checkpoint'] for each in reversed(kept)) or 'none'}"
    return {**data, "events": report, "checkpoints": kept}, lambda: [
        *map(_line, reversed(report)),
        told,
        _summary(data),
    ]


@finetune.command()
@click.argument("job")
@asks_daemon
def watch(client: Client, job: str) -> Any:
    """Wait for a job's end, and tell how it goes. Exit code 1: it did not succeed. Ctrl-C ends the command alone."""
    return _watch(client, job)


def _watch(client: Client, job_id: str) -> Any:
    seen = ""
    while True:
        job = client.get(_path(JOBS, job_id))
        for event in reversed(list(_events_after(client, job_id, seen))):
            seen = event["id"]
            show_progress(_line(event))
        if job["finished_at"] is not None:
            return job, _summary(job), int(job["status"] != "succeeded")
        time.sleep(ASK_S)


def _events_after(client: Client, job_id: str, seen: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a job that came after one, newest first."""
    for event in client.get(f"{_path(JOBS, job_id)}/events?limit=100")["data"]:
        if event["id"] == seen:
            return
        yield event


def _line(event: dict[str, Any]) -> str:
    data = event["data"]
    speed = f", {number(data['tokens_per_s'], 0)} tokens/s" if "tokens_per_s" in data else ""
    return f"{_when(event['created_at'])} {event['message']}{speed}"


def _summary(job: dict[str, Any]) -> str:
    if job["error"]:
        return f"{job['id']} failed: {job['error']['message']}"
    model = f": {job['fine_tuned_model']} answers" if job["fine_tuned_model"] else ""
    return f"{job['id']} {job['status']}{model}"


def _add_change(what: str, told: str) -> None:
    @finetune.command(what, help=told)
    @click.argument("job")
    @asks_daemon
    def change(client: Client, job: str) -> Any:
        data = client.post(f"{_path(JOBS, job)}/{what}", {})
        return data, _summary(data)


_add_change("cancel", "End a job; its last version stays.")
_add_change("pause", "Have a job stand still.")
_add_change("resume", "Have a paused job go on.")


@click.group()
def files() -> None:
    """Files of examples for fine-tuning jobs."""


@files.command("list")
@asks_daemon
def list_files(client: Client) -> Any:
    """Your files, newest first."""
    data = client.get(FILES)
    rows = [(row["id"], row["filename"], number(row["bytes"], 0), row["purpose"]) for row in data["data"]]
    return data, lambda: make_table("file", "name", ">bytes", "purpose", rows=rows) if rows else "no files"


@files.command()
@click.argument("file", type=click.Path(path_type=Path))
@asks_daemon
def add(client: Client, file: Path) -> Any:
    """Upload a file of JSON lines."""
    data = _upload(client, file)
    return data, f"{data['id']}: {data['bytes']} bytes"


@files.command("show")
@click.argument("file")
@asks_daemon
def show_file(client: Client, file: str) -> Any:
    """One file."""
    data = client.get(_path(FILES, file))
    return data, "{filename}: {bytes} bytes, {purpose}".format(**data)


@files.command()
@click.argument("file")
@asks_daemon
def delete(client: Client, file: str) -> Any:
    """Delete a file."""
    data = client.call("DELETE", _path(FILES, file))
    return data, f"{file} is deleted"


@dataclass(frozen=True, slots=True)
class _Form:
    """A form with a file, in pieces; each iteration reads it anew."""

    path: Path

    def __iter__(self) -> Iterator[bytes]:
        name = os.fsencode(self.path.name).decode("utf-8", "replace").translate(dict.fromkeys(map(ord, '"\r\n'), "'"))
        head = 'Content-Disposition: form-data; name="purpose"\r\n\r\nfine-tune'
        file = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        yield f"--{_BOUNDARY}\r\n{head}\r\n--{_BOUNDARY}\r\n{file}".encode()
        with self.path.open("rb") as content:
            while piece := content.read(1 << 18):
                yield piece
        yield f"\r\n--{_BOUNDARY}--\r\n".encode()


def _demand_readable(path: Path) -> None:
    """Raise DaemonError where a file cannot be read."""
    with explain_os_errors(f"{path} cannot be read"):
        path.open("rb").close()


def _upload(client: Client, path: Path) -> dict[str, Any]:
    _demand_readable(path)
    return client.call("POST", FILES, _Form(path), f"multipart/form-data; boundary={_BOUNDARY}")


def _file_ids(client: Client, data: str, valid: str | None) -> dict[str, str | None]:
    """Return the ids of a job's files, DATA's and that of validation; those that are paths are uploaded.

    Nothing is, where one of them cannot be read. Raises DaemonError.
    """
    given = {"training_file": data, "validation_file": valid}
    paths = {name: Path(text) for name, text in given.items() if text and not _is_id(text)}
    for path in paths.values():
        _demand_readable(path)
    return given | {name: _upload(client, path)["id"] for name, path in paths.items()}


def _is_id(data: str) -> bool:
    return data.startswith("file-") and not Path(data).exists()


def _path(route: str, name: str) -> str:
    return f"{route}/{quote(name, safe='')}"


def _when(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
