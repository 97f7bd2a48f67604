"""A box's part of the Ray cluster: its processes, their flags and environment, their end. Imports no Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from edged.fleet.credentials import tls_of, token_of
from edged.settings.addresses import is_loopback, too_long
from edged.settings.fleet import NODE_NAME
from edged.settings.load import ConfigError, Settings
from edged.store.data_dir import data_folder
from edged.store.lock import FileLock, LockTaken

TEMPORARY, STARTED = "temp", "started"
"""In a box's folder: where Ray's processes write, and where the logs are of what replicas started."""
_LONGEST = "session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_VITAL = ("raylet", "gcs_server")
PORT = 6379
_FLAGS = {
    **{"--num-cpus": "0", "--object-store-memory": "78643200", "--include-log-monitor": "false"},
    **{"--dashboard-agent-listen-port": "0", "--min-worker-port": "0", "--max-worker-port": "0"},
}
_ENVIRONMENT = {
    **{"RAY_AUTH_MODE": "token", "RAY_USE_TLS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    **{"RAY_memory_monitor_refresh_ms": "0", "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"},
}
_REACHED_S, _LOOK_S, _STARTED_S, _LEFT_S = 5.0, 1.0, 120.0, 30.0


class ClusterError(RuntimeError):
    """The error of a cluster that cannot be joined or has ended; the message says where to look."""


def folder_of(settings: Settings) -> Path:
    """Return the folder of a box's Ray: its lock, its token, its logs."""
    return data_folder(settings.store.data_dir, os.environ).resolve() / "ray"


def check(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a box that cannot be one of a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed, which keeps a fleet's members: pip install 'edged[fleet]'")
    fleet = settings.fleet
    _check_name(settings)
    if not fleet.url:
        raise ConfigError(
            "fleet.url is not set: give --url, the address at which the ingresses reach this box's daemon"
        )
    if not fleet.ingresses:
        raise ConfigError("fleet.ingresses is empty: name the URLs at which boxes register")
    token_of(settings), tls_of(settings)
    if too_long((folder := folder_of(settings)) / TEMPORARY / _LONGEST):
        raise ConfigError(f'folder "{folder}" is too long for Ray\'s sockets: give store.data_dir a shorter one')
    if environ.get("RAY_USE_TLS") != "0" and not (settings.api.certificate and settings.api.key and fleet.authority):
        raise ConfigError(
            "boxes speak TLS to each other: set api.certificate, api.key and fleet.authority"
            " (on one machine RAY_USE_TLS=0 goes without)"
        )


def _check_name(settings: Settings) -> None:
    if not NODE_NAME.fullmatch(settings.api.node):
        raise ConfigError(f'api.node = "{settings.api.node}": give this box a name of letters, digits and "-" (--name)')


def environment(settings: Settings, folder: Path, environ: Mapping[str, str], head: bool) -> dict[str, str]:
    """Return the environment of a box's Ray processes. Raises ConfigError where it has no token of the cluster."""
    token = Path(environ.get("RAY_AUTH_TOKEN_PATH") or folder / "token")
    if head and not token.exists():
        token.touch(0o600)
        token.write_text(secrets.token_hex(32) + "\n")
    if not token.is_file() or not token.read_text().strip():
        raise ConfigError(f'"{token}" is not there: copy the cluster\'s token, the file of that name at the head')
    made = {**_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(token), **environ}
    if made["RAY_USE_TLS"] != "0":
        made["RAY_TLS_SERVER_CERT"], made["RAY_TLS_SERVER_KEY"] = settings.api.certificate, settings.api.key
        made["RAY_TLS_CA_CERT"] = settings.fleet.authority
    return made


def run(settings: Settings, address: str, port: int, ingress: bool, environ: Mapping[str, str]) -> None:
    """Have this box in the cluster whose head is at `address`, or be its head (""), until SIGTERM or SIGINT.

    Raises ConfigError, or ClusterError where the cluster cannot be reached or has ended.
    """
    check(settings, environ)
    folder = folder_of(settings)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = environment(settings, folder, environ, not address)
    try:
        lock = FileLock(folder / "lock")
    except LockTaken as error:
        raise ConfigError(f"this box is in a cluster already, by process {error.holder}: edged fleet leave") from None
    signal.signal(signal.SIGTERM, _exit)
    try:
        end(folder / TEMPORARY)  # what a killed one left
        shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
        if address:
            _reach(address)
        with (folder / "start.log").open("wb") as output:
            start = partial(
                subprocess.run, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=made, check=True
            )
            start(_command(settings, address, port, ingress, folder), timeout=_STARTED_S)
            if not address:
                asked = {"port": port, "ingresses": len(settings.fleet.ingresses), "spawn": settings.fleet.spawn}
                # A process of its own, which ends: a driver that stays has 100 MB, and the GCS takes it with it.
                start([sys.executable, "-P", "-m", "edged.fleet.ray.app", json.dumps(asked)], timeout=_STARTED_S)
        vital = [process for process in writers(folder / TEMPORARY) if process.name() in _VITAL]
        what = "this box is the head" if not address else f"this box is in the cluster of {address}"
        print(f"edged: {what}", file=sys.stderr)
        while vital and all(map(_runs, vital)):
            time.sleep(_LOOK_S)
        problem = "has ended"
    except subprocess.SubprocessError as error:
        problem = f"does not start ({type(error).__name__}, {folder}/start.log)"
    except KeyboardInterrupt:
        return
    finally:
        end(folder / TEMPORARY)
        lock.release()
    raise ClusterError(f"Ray {problem} on this box: its logs are in {folder / TEMPORARY}")


def _exit(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # what is to be ended then, is
    sys.exit(0)


def _command(settings: Settings, address: str, port: int, ingress: bool, folder: Path) -> list[str]:
    """Return the command that starts Ray's processes on this box."""
    flags = {**_FLAGS, "--temp-dir": str(folder / TEMPORARY)}
    flags["--resources"] = json.dumps({"edged": 1, **({"ingress": 1} if ingress else {})})
    own = urlsplit(settings.fleet.url).hostname or ""
    if not is_loopback(own):  # Ray takes the machine's address in the place of loopback's.
        flags["--node-ip-address"] = own
    if address:
        flags["--address"] = address
    else:
        # Ray starts a server for remote drivers wherever gRPC is installed; it asks for the token, too.
        flags |= {"--port": str(port), "--ray-client-server-port": str(port + 1), "--include-dashboard": "false"}
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *([] if address else ["--head"])]
    return command + [part for flag in flags.items() for part in flag]


def _reach(address: str) -> None:
    """Raise ClusterError where no head listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, ValueError, OverflowError) as error:
        way_out = "start it there with `edged fleet init`"
        raise ClusterError(f'no head answers at "{address}" ({error}): {way_out}') from None


def leave(settings: Settings) -> None:
    """Take this box out of its cluster and its fleet: Ray ends here, ingresses forget the box, children end.

    Raises ConfigError, or ClusterError where it is not this user's, or an ingress cannot be told.
    """
    _check_name(settings)
    folder, name = folder_of(settings), settings.api.node
    token, tls, untold = token_of(settings), tls_of(settings), []
    _stop(folder / "lock")
    for ingress in settings.fleet.ingresses:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"{ingress}/v1/fleet/nodes/{name}", headers=headers, method="DELETE")
        try:
            urllib.request.urlopen(request, timeout=_REACHED_S, context=tls if ingress.startswith("https") else None)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                untold.append(f"{ingress} answers {error.code}")
        except (OSError, HTTPException) as error:
            untold.append(f"{ingress}: {error}")
    end(folder / STARTED, _LEFT_S)
    if untold:
        raise ClusterError(
            f'not every ingress has forgotten "{name}" ({", ".join(untold)}): leave again when it answers'
        )


def _stop(path: Path) -> None:
    """End the process that holds a lock, and wait until it has."""
    ends_s = time.monotonic() + _LEFT_S
    while time.monotonic() < ends_s:
        try:
            return FileLock(path).release()
        except FileNotFoundError:
            return
        except LockTaken as error:
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(error.holder), signal.SIGTERM)
        except PermissionError:
            break
        time.sleep(0.2)
    raise ClusterError(f'"{path}" is held by a process that does not end or is not yours: use the account edged-ray')


def end(folder: Path, patience_s: float = 3.0) -> None:
    """End the processes that write files below a folder: Ray's retitle themselves, and outlive their raylet.

    Those that have not after `patience_s` are killed, and those that were still started meanwhile.
    """
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        found = writers(folder)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(found, patience_s)


def writers(folder: Path) -> list[psutil.Process]:
    """Return the Python and Ray processes that have a file below a folder open."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = Path(process.exe()).name.startswith(("python", *_VITAL))  # not somebody's pager
            if ours and any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
