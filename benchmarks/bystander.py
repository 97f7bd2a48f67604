"""Waits of an account that asks for little, in quiet and while another account abuses the daemon.

    python -m benchmarks.bystander                                     every abuse, about 15 minutes
    python -m benchmarks.bystander --abuse "forget,rollback" --seconds 20
    python -m benchmarks.bystander --before ../old-checkout            the daemon of another checkout, too

All abuses meet one daemon with the demo model, but for rollbacks, which have one with a large adapter. The bystander
asks for the status and for answers of one token, three connections with pauses of 20 ms, all the time; the abuser, a
process of another account, has every second window. So both are measured in turns, and what else runs on the machine
meets both. A window begins when what the one before it left is done. The bound: the abused p99.9 is at most 100 ms
above the quiet one. Root alone can be two accounts.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - an account that is not root may not be able to read it
import json
import multiprocessing
import os
import secrets
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.checkout import ROOT
from benchmarks.support.command import finish, keep, markdown, names, option, parse, say
from benchmarks.support.machine_limits import report_header
from benchmarks.support.random_llama import SHAPES, write_random_llama, write_tokenizer
from edged.client.client import Address, Client, DaemonError, Refused
from edged.runtime.process import allow_files
from examples.quickstart.daemon import TemporaryDaemon, free_port

BOUND_MS = 100.0
BYSTANDER, ABUSER = 1, 65534
"""Their uids: neither is an admin."""
NAME = "nobody"
"""The abuser's user, which the account of that uid may speak for."""
PAUSE_S = 0.02
SETTLED_S = 60.0
"""Longest time after an abuse until the next window begins."""
SEATS = 64
"""The default of serving.max_sequences."""
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "worst": 100.0}
_SMALL_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
"""Daemons do not start themselves again to have huge pages."""
_forked = multiprocessing.get_context("fork")

Attack = Callable[[Client, dict[str, Any], int], object]
"""One act of an abuser's connection, with what the connection remembers, and the act's number."""


class Site(TemporaryDaemon):
    """A daemon from a checkout, open to all accounts."""

    READY_S, STOP_S = 300.0, 60.0

    def __init__(self, checkout: Path, settings: dict[str, str]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="edged-bystander-"))
        folder.chmod(0o755)
        self.settings, self._port = settings, free_port()
        # For the abuser, who knows the socket alone.
        (folder / "port").write_text(str(self._port))
        self._environment = {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", **_SMALL_PAGES, **settings}
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon's process; the settings come from the environment alone."""
        own = {
            "API__SOCKET": str(self.socket),
            "API__SOCKET_MODE": "0666",
            "STORE__DATA_DIR": str(self.data),
            "MODEL__THREADS": "1",
            "API__LISTEN": f"127.0.0.1:{self._port}",
            "API__TOKEN": secrets.token_hex(16),
        }
        named = {f"EDGED_{name}": value for name, value in own.items()}
        return self._spawn(["-m", "edged.cli", "serve"], {**named, **self._environment})

    def settle(self) -> None:
        """Wait until nothing is asked for any more, within bounds."""
        deadline = time.monotonic() + SETTLED_S
        while time.monotonic() < deadline:
            time.sleep(0.5)
            with contextlib.suppress(DaemonError), self.client() as client:
                status = client.get("/v1/status")
                if sum(status["queue"][stage] for stage in ("waiting", "prefill", "decode")) < 3:
                    return


# -- abuses ------------------------------------------------------------------------------------------------------------

INVALID = b'{"prompt":[' + b"-1," * 349_000 + b"-1]}"
"""A body of nearly 1 MiB, every element of which is wrong."""
_ASK = "/v1/completions"
_BOUNDARY, _FORM = b"XbX", "multipart/form-data; boundary=XbX"
_LINE = b'{"prompt":"a","completion":"b"}\n'
DEMO_TOKENS = 1536
"""The demo model's vocabulary."""


def sampling(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Ask with the parameters that together make scores infinite."""
    ids = list(range(5, 800))
    extreme = {"repetition_penalty": 1e-45, "min_tokens": 1, "stop_token_ids": ids[:16], "temperature": 0}
    return client.post(_ASK, {"prompt": ids, "max_tokens": 2, **extreme})


def invalid(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send a large body that is wrong everywhere."""
    return client.call("POST", _ASK, INVALID)


def long_pairs(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Teach pairs as long as a body may be."""
    return _teach(client, f"{id(memory)} {turn}", f"{turn} " + "word " * 190_000)


def web_page(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Teach as a web page of another site would."""
    body = json.dumps({"user": NAME, "prompt": str(turn), "chosen": "good", "rejected": "bad"}).encode()
    evil = b"Host: evil.example\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\n"
    head = b"POST /v1/feedback HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (evil, len(body))
    with _connect(client) as raw:
        raw.sendall(head + body)
        status = int(raw.recv(65536).split()[1])
        if status >= 400:
            raise Refused(status, {})


def bad_tokens(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Name the last token of the vocabulary, and such as are not in it, wherever a request may name one."""
    last, beyond = DEMO_TOKENS - 1, (DEMO_TOKENS, 2**31 - 1)[turn % 2]
    fields: list[dict[str, Any]] = [
        {"logit_bias": {str(last): 100}, "min_tokens": 4, "stop_token_ids": [last]},
        *({"logit_bias": {str(beyond): 100}}, {"stop_token_ids": [beyond], "min_tokens": 2}, {"prompt": [beyond]}),
    ]
    return client.post(_ASK, {"prompt": "hi", "max_tokens": 4, "n": 4, **fields[turn % len(fields)]})


def structure(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send bodies of little but structure: too much of it, and just as much as may be."""
    lists, keys = b"[]," * 349_000 + b"[]", b",".join(b'"%x":0' % number for number in range(32_000))
    return client.call("POST", _ASK, (b'{"x":[%s]}' % lists, b'{"x":{%s}}' % keys)[turn % 2])


def preamble(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send a form with a million empty lines before its first boundary."""
    return client.call("POST", "/v1/files", b"\n" * 2**20 + b"--%s--\r\n" % _BOUNDARY, _FORM)


def chunks(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Send a body in chunks of one byte over TCP, without a token, until the daemon takes no more."""
    port = int(client.address.sockets[0].with_name("port").read_text())
    path = (b"/healthz", b"/v1/models", _ASK.encode(), b"/nothing")[turn % 4]
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
        for _ in range(200):
            raw.sendall(b"1\r\na\r\n" * 40_000)


def half_upload(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Begin to upload a large file, and stop half way."""
    with _connect(client) as raw:
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        raw.sendall(head % (_FORM.encode(), 64 << 20) + _form(_LINE * 2**19))
        time.sleep(1.0)


def large_job(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Have a large file checked for a job, and cancel it when it has begun."""
    if "file" not in memory:
        memory["file"] = client.call("POST", "/v1/files", _form(_LINE * 2**19, ended=True), _FORM)["id"]
    job = client.post("/v1/fine_tuning/jobs", {"model": "demo", "training_file": memory["file"]})["id"]
    time.sleep(2.0)
    client.post(f"/v1/fine_tuning/jobs/{job}/cancel", {})


def logprobs(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Ask for as many log-probabilities as one answer may have."""
    many = {"n": 16, "max_tokens": 390, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    return client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **many})


def signals(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Change one's mind about one answer again and again."""
    if "id" not in memory:
        memory["id"] = client.post(_ASK, {"prompt": "hi", "max_tokens": 3, "user": NAME})["id"]
    return client.post("/v1/feedback", {"completion_id": memory["id"], "signal": ("up", "down")[turn % 2]})


def forget(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Say something and have it forgotten."""
    for number in range(4):
        _teach(client, f"{turn} {number}", f"a needle of more than twenty four characters {number}")
    return client.call("DELETE", f"/v1/adapters/{NAME}")


def connections(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Open and hold 1,000 connections, and ask on one after the other."""
    held: list[socket.socket] = memory.setdefault("held", [])
    if len(held) < 1000:
        held.append(_connect(client))
    raw = held[turn % len(held)]
    raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    if not raw.recv(65536):
        held.remove(raw)
        raise Refused(503, {})


def all_seats(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Ask for as many long answers at once as there are seats."""
    return client.post(_ASK, {"prompt": "hi", "max_tokens": 900, "n": SEATS, "ignore_eos": True})


def special_tokens(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send text that names special tokens, as much as a body may have."""
    return client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|system|>" * 100_000}]})


def leave(client: Client, memory: dict[str, Any], turn: int) -> None:
    """Ask, or teach, and leave before the answer."""
    asked = (_ASK, {"prompt": "hi", "max_tokens": 400, "n": 8, "stream": True})
    taught = ("/v1/feedback", {"user": NAME, "prompt": f"q{turn}", "chosen": "good", "rejected": f"bad {turn}"})
    path, said = (asked, taught)[turn % 2]
    body = json.dumps(said).encode()
    with _connect(client) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        time.sleep(0.01)


def roll_back(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Go back to the oldest version on disk, which is read, checked and published anew."""
    versions = client.get(f"/v1/adapters/{NAME}")["versions"]
    oldest = min(version["version"] for version in versions if version["on_disk"] and version["version"])
    return client.post(f"/v1/adapters/{NAME}/rollback", {"version": oldest})


def empty_messages(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send as many messages as a request may have, all of them empty."""
    pair = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    return client.post("/v1/chat/completions", {"messages": pair * 5000, "max_tokens": 1})


def import_pairs(client: Client, memory: dict[str, Any], turn: int) -> object:
    """Send the next of many pairs, as `edged feedback import` does."""
    return _teach(client, f"question {id(memory)} {turn}", f"a good answer {turn}")


def import_all(pairs: int, client: Client, memory: dict[str, Any], turn: int) -> None:
    """Send the next of so many pairs, again where the queue of pairs is full, and end after the last one."""
    if turn > pairs:
        raise StopIteration
    sent = False
    while not sent:
        try:
            import_pairs(client, memory, turn)
            sent = True
        except Refused as refused:
            if refused.status != 429:
                raise
            time.sleep(PAUSE_S)


def _teach(client: Client, prompt: str, chosen: str) -> object:
    return client.post("/v1/feedback", {"user": NAME, "prompt": prompt, "chosen": chosen, "rejected": "bad"})


def _form(content: bytes, ended: bool = False) -> bytes:
    """Return a form with a file, or its beginning."""
    named = b'--%s\r\nContent-Disposition: form-data; name="%s"'
    purpose = named % (_BOUNDARY, b"purpose") + b"\r\n\r\nfine-tune\r\n"
    file = named % (_BOUNDARY, b"file") + b'; filename="a.jsonl"\r\n\r\n' + content
    return purpose + file + b"\r\n--%s--\r\n" % _BOUNDARY * ended


def _connect(client: Client) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(30.0)
    raw.connect(str(client.address.sockets[0]))
    return raw


# -- what there is before an abuse -------------------------------------------------------------------------------------


def fill(megabytes: int, site: Site) -> None:
    """Copy a stored answer until the database has this size, as months of use leave it."""
    with site.client() as client:
        name = client.post(_ASK, {"prompt": "hi", "max_tokens": 2, "user": "ann"})["id"]
    site.stop()
    with contextlib.closing(sqlite3.connect(site.data / "edged.db", isolation_level=None)) as db:
        for first in range(0, megabytes, 64):
            db.execute("BEGIN")
            for number in range(first, min(first + 64, megabytes)):
                for table, key, new in (
                    ("completions", "id", {"id": "?"}),
                    ("choices", "completion_id", {"completion_id": "?", "text": "hex(randomblob(524288))"}),
                ):
                    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
                    values = ", ".join(new.get(column, column) for column in columns)
                    sql = f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {key} = ?"
                    db.execute(sql, [f"cmpl-{number}", name])
            db.execute("COMMIT")
    site.process = site.start()
    site.wait_until_ready()


def learn_versions(site: Site) -> None:
    """Teach the abuser's adapter until two versions are on disk."""
    on_disk: list[int] = []
    deadline = time.monotonic() + 240.0
    with site.client(120.0) as client:
        turn = 0
        while len(on_disk) < 2:
            for number in range(4):
                _teach(client, f"question {turn} {number}", f"a good answer {turn} {number}")
            turn, settled, known = turn + 1, False, len(on_disk)
            while not settled and len(on_disk) == known:
                if time.monotonic() > deadline:
                    raise DaemonError(f"no two versions on disk; {site.log_end()}")
                time.sleep(0.5)
                with contextlib.suppress(Refused):
                    found = client.get(f"/v1/adapters/{NAME}")
                    settled = not found["pairs_queued"] and turn > 50
                    on_disk = [version["version"] for version in found["versions"] if version["on_disk"]]


@contextlib.contextmanager
def large_adapter(megabytes: int) -> Iterator[dict[str, str]]:
    """Settings of a model whose adapters' versions have this size on disk: weights and AdamW's two moments."""
    shape = SHAPES["4m"]
    heads = shape.hidden + shape.kv_heads * (shape.hidden // shape.heads)
    sides = 4 * shape.hidden + 2 * heads + 3 * (shape.hidden + shape.intermediate)
    rank = max(1, round(megabytes * 2**20 / (3 * 4 * sides * shape.layers)))
    with tempfile.TemporaryDirectory(prefix="edged-bystander-model-") as folder:
        write_random_llama(Path(folder), shape)
        write_tokenizer(Path(folder), ["a question and a good answer to it"], 512)
        yield {"EDGED_MODEL__PATH": folder, "EDGED_ALIGN__RANK": str(rank), "EDGED_STORE__SAVE_EVERY_S": "0.5"}


@dataclass(frozen=True, slots=True)
class Abuse:
    """An abuse: `attack` again and again on so many `connections`, after `prepare`.

    One that `ends` goes on until its attacks raise StopIteration, whatever the length of a window.
    """

    attack: Attack
    connections: int
    prepare: Callable[[Site], object] = lambda site: None
    ends: bool = False


def abuses_of(options: Namespace) -> dict[str, Abuse]:
    """Return the abuses by name, with the sizes of the command line."""
    return {
        "all seats": Abuse(all_seats, 2),
        "invalid bodies": Abuse(invalid, 4),
        "logprobs": Abuse(logprobs, 2),
        "connections": Abuse(connections, 1),
        "sampling": Abuse(sampling, 4),
        "web page": Abuse(web_page, 4),
        "bad tokens": Abuse(bad_tokens, 4),
        "structure": Abuse(structure, 4),
        "preamble": Abuse(preamble, 2),
        "chunks": Abuse(chunks, 4),
        "half uploads": Abuse(half_upload, 4),
        "large jobs": Abuse(large_job, 1),
        "special tokens": Abuse(special_tokens, 4),
        "empty messages": Abuse(empty_messages, 4),
        "leave": Abuse(leave, 8),
        "signals": Abuse(signals, 32),
        "long pairs": Abuse(long_pairs, 4),
        "import": Abuse(import_pairs, 4),
        "whole import": Abuse(partial(import_all, options.import_pairs // 4), 4, ends=True),
        "forget": Abuse(forget, 2, partial(fill, options.database_mb)),
        "rollback": Abuse(roll_back, 1, learn_versions),
    }


NAMES = list(abuses_of(Namespace(database_mb=0, import_pairs=0)))


# -- the two accounts --------------------------------------------------------------------------------------------------


def become(uid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def stand_by(path: Path, stop: Any, report: Any) -> None:
    """Ask until `stop` is set, then send (what, when, seconds, whether it was answered) of every request."""
    become(BYSTANDER)
    samples: list[tuple[str, float, float, bool]] = []

    def one(what: str, ask: Callable[[Client], object]) -> None:
        with Client(Address(sockets=(path,)), 60.0) as client:
            while not stop.is_set():
                began, answered = time.monotonic(), False
                with contextlib.suppress(DaemonError):
                    ask(client)
                    answered = True
                samples.append((what, began, time.monotonic() - began, answered))
                time.sleep(PAUSE_S)

    def answer(client: Client) -> object:
        return client.post(_ASK, {"prompt": "hi", "max_tokens": 1})

    kinds = (("status", lambda client: client.get("/v1/status")), ("answer", answer), ("answer", answer))
    threads = [threading.Thread(target=one, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.send(samples)


def attack_until(path: Path, abuse: Abuse, stop: Any, report: Any) -> None:
    """Abuse until `stop` is set, then send how often which status came; "lost" without one."""
    allow_files()
    # What its own programs compute shall not take the processor from the daemon.
    os.nice(19)
    become(ABUSER)
    statuses: Counter[str] = Counter()

    def one(number: int) -> None:
        memory: dict[str, Any] = {}
        turn = 0
        with Client(Address(sockets=(path,)), 300.0) as client:
            while not stop.is_set():
                turn += 1
                try:
                    abuse.attack(client, memory, turn)
                    statuses["200"] += 1
                except StopIteration:
                    return
                except Refused as refused:
                    statuses[str(refused.status)] += 1
                    if refused.status == 429:
                        time.sleep(PAUSE_S)
                except (DaemonError, OSError, ValueError):
                    statuses["lost"] += 1
                    time.sleep(PAUSE_S)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(abuse.connections)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not stop.wait(0.1):
        pass
    report.send(dict(statuses))
    # Answers that were asked for are not waited for.
    os._exit(0)


@contextlib.contextmanager
def account(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Run `work` in a process of its own, which is given; at the end what it reports is in the list."""
    stop = _forked.Event()
    ours, theirs = _forked.Pipe()
    process = _forked.Process(target=work, args=(*arguments, stop, theirs), daemon=True)
    process.start()
    theirs.close()
    reported: list[Any] = []
    try:
        yield process, reported
        stop.set()
        if ours.poll(120.0):
            with contextlib.suppress(EOFError):
                reported.append(ours.recv())
    finally:
        process.kill()
        process.join()


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(site: Site, abuse: Abuse, options: Namespace) -> dict[str, Any]:
    """Return the bystander's waits of one abuse, in ms, quiet and abused."""
    statuses: Counter[str] = Counter()
    windows: list[tuple[float, float, str]] = []
    abuse.prepare(site)
    said = len(site.log)
    with account(stand_by, site.socket) as (_, told):
        time.sleep(1.0)
        for _ in range(options.rounds):
            for when in ("quiet", "abused"):
                began = time.monotonic()
                if when == "abused":
                    with account(attack_until, site.socket, abuse) as (process, reported):
                        process.join(None if abuse.ends else options.seconds)
                    statuses.update(*reported)
                else:
                    time.sleep(options.seconds)
                windows.append((began, time.monotonic(), when))
                site.settle()
    samples = told[0] if told else []
    stalls = [line for line in site.log[said:].splitlines() if "stood still" in line]
    found: dict[str, Any] = {"statuses": dict(statuses), "stalls": stalls, "exit_code": site.process.poll()}
    by_kind = sorted(windows, key=lambda window: window[2])
    for when in ("quiet", "abused"):
        # A request that meets an abuse counts there, whenever it began.
        within = [
            (what, seconds, answered)
            for what, at, seconds, answered in samples
            if next((kind for first, last, kind in by_kind if at < last and at + seconds > first), "") == when
        ]
        found[when] = {
            "unanswered": sum(not answered for _, _, answered in within),
            **{
                kind: percentiles([1e3 * seconds for what, seconds, _ in within if kind in ("all", what)])
                for kind in ("all", "status", "answer")
            },
        }
    return found


@contextlib.contextmanager
def sites() -> Iterator[Callable[[Path, dict[str, str]], Site]]:
    """A function that returns a checkout's running daemon, a new one where the old one ended or had other settings."""
    running: dict[Path, Site] = {}

    def site_of(where: Path, settings: dict[str, str]) -> Site:
        site = running.get(where)
        if site is None or site.settings != settings or site.process.poll() is not None:
            if site is not None:
                site.remove()
            site = running[where] = Site(where, settings)
            site.wait_until_ready()
        return site

    try:
        yield site_of
    finally:
        for site in running.values():
            site.remove()


def checkout(text: str) -> Path:
    """Parse the folder of a checkout."""
    if not (Path(text) / "edged" / "daemon.py").is_file():
        raise ArgumentTypeError(f'"{text}" has no edged/daemon.py: give a checkout of edged')
    return Path(text).resolve()


def percentiles(waits_ms: list[float]) -> dict[str, float]:
    """Return the count and the percentiles of waits, infinite ones of none."""
    figures = {name: round(float(np.percentile(waits_ms or [np.inf], share)), 1) for name, share in PERCENTILES.items()}
    return {"count": len(waits_ms), **figures}


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--abuse", f"some of {', '.join(NAMES)}", "", type=names(NAMES)),
        option("--seconds", "of each window", 8.0, 1.5),
        option("--rounds", "windows of each kind", 3, 1),
        option("--database-mb", "size of the database in which somebody is forgotten / 2^20", 1024, 8, least=1),
        option("--adapter-mb", "size of a version that is rolled back / 2^20", 500, 4, least=1),
        option("--import-pairs", "pairs of the whole import", 100_000, 400, least=4),
        option("--before", "another checkout, whose daemon is measured, too", "", type=checkout),
        quick="short windows, a small database and a small adapter",
    )
    if os.geteuid():
        sys.exit("benchmarks.bystander: only root can be two accounts at once: run it with sudo")
    abuses = abuses_of(options)
    sides = {**({"before": options.before} if options.before else {}), "now": ROOT}
    rows: list[dict[str, Any]] = []
    report = {**report_header("cpu"), "seconds": options.seconds, "rounds": options.rounds, "rows": rows}
    with sites() as site_of, contextlib.ExitStack() as stack:
        for name in options.abuse or NAMES:
            settings = stack.enter_context(large_adapter(options.adapter_mb)) if name == "rollback" else {}
            for side, where in sides.items():
                say(f"{name}, {side}")
                try:
                    found = measure(site_of(where, settings), abuses[name], options)
                except DaemonError as error:
                    found = {"failed": str(error)}
                rows.append({"abuse": name, "side": side, **found})
                say(table(rows[-1:]).splitlines()[-1])
                keep(options, report)
    finish(options, report, table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of Markdown; waits are in ms."""
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["abuse"], row["side"], "", "", "", row["failed"].splitlines()[0]])
            continue
        quiet, abused = (row[when]["all"] for when in ("quiet", "abused"))
        more_ms = abused["p99.9"] - quiet["p99.9"]
        verdict = "met" if more_ms <= BOUND_MS and not row["abused"]["unanswered"] else "**not met**"
        came = ", ".join(f"{count} x {status}" for status, count in sorted(row["statuses"].items()))
        waits = [", ".join(f"{each[name]:,.0f}" for name in PERCENTILES) for each in (quiet, abused)]
        lines.append([row["abuse"], row["side"], came, *waits, f"{more_ms:+,.0f} {verdict}"])
    shown = ", ".join(PERCENTILES)
    return "\n".join(
        markdown(["abuse", "daemon", "its answers", f"quiet: {shown} ms", f"abused: {shown} ms", "p99.9"], lines)
    )


if __name__ == "__main__":
    main()
