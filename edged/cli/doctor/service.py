"""Checks of the service: systemd's units, and the daemon that should answer.

Owns what units should say and do. Must not know how the daemon works.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import edged
from edged.cli.client import Address, Client, DaemonError, NotRunning, Refused
from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine, output_of
from edged.cli.doctor.installed import SERVICE, SOCKET, unit_file
from edged.cli.output import duration

_UNITS = (SERVICE, SOCKET)


def units(it: Examination) -> Iterator[Finding]:
    """Installed, without mistakes, watched, and started at boot."""
    found = [path for name in _UNITS if (path := unit_file(it.root, name)) is not None]
    if not found:
        seen = "not installed: nobody starts edged after a restart, or when it has hung"
        yield doubtful("units", seen, "`sudo tools/install` from a checkout")
        return
    names = ", ".join(path.name for path in found)
    code, told = output_of(["systemd-analyze", "verify", *map(str, found)], it.left_s(3.0))
    ours = [line for line in told.splitlines() if "edged." in line]
    if code == 127:
        yield doubtful("units", f"{names} installed, not verified: {told}", "install systemd")
    elif ours:
        yield doubtful("units", f"{names}: {ours[0]}", f"correct it, then `sudo systemctl daemon-reload`: {found[0]}")
    elif "WatchdogSec=" not in "".join(path.read_text(errors="replace") for path in found):
        yield doubtful("units", f"{names}: no watchdog", f"add WatchdogSec=30 to [Service] in {found[0]}")
    else:
        yield from _enabled(it, names)


def _enabled(it: Examination, names: str) -> Iterator[Finding]:
    seen = f"{names} installed, with a watchdog"
    if not (it.root / "run/systemd/system").is_dir():
        yield fine("units", f"{seen}; systemd does not run here")
        return
    _, states = output_of(["systemctl", "is-enabled", *_UNITS], it.left_s(2.0))
    _, failed = output_of(["systemctl", "is-failed", "edged.service"], it.left_s(2.0))
    if failed == "failed":
        yield broken("units", "edged.service has failed", "`journalctl -u edged -e` says why")
    elif "enabled" not in states.split():
        yield doubtful("units", f"{seen}, not enabled", "`sudo systemctl enable --now edged.socket`")
    else:
        yield fine("units", f"{seen}, enabled")


def _sleeping(it: Examination) -> Path | None:
    """systemd's socket for a daemon that does not run: to ask there would start it."""
    unit = unit_file(it.root, SOCKET)
    if unit is None or not (it.root / "run/systemd/system").is_dir():
        return None
    listens = [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith("ListenStream=/")]
    _, state = output_of(["systemctl", "is-active", "edged.service"], it.left_s(2.0))
    return Path(listens[0]) if listens and state in ("inactive", "failed") else None


def daemon(it: Examination) -> tuple[Finding, bool]:
    """Whether it answers and serves; and whether it runs at all."""
    name = "daemon"
    sockets = it.sockets
    if (sleeping := _sleeping(it)) is not None:
        sockets = tuple(path for path in sockets if path != sleeping)
        if not any(path.exists() for path in sockets):
            return fine(name, f"does not run: the first request on {sleeping} starts it"), False
    with Client(Address(sockets=sockets), timeout_s=it.left_s(3.0)) as client:
        try:
            client.get("/readyz")
            status = client.get("/v1/status")
        except NotRunning:
            way_out = "`sudo systemctl start edged`, or `edged serve`"
            return doubtful(name, f"none answers on {' or '.join(map(str, sockets))}", way_out), False
        except Refused as error:
            if error.code in ("loading", "draining"):
                return doubtful(name, str(error), "ask again in a moment"), True
            if error.code == "engine_stopped":
                return broken(name, str(error), "restart it, and see its log"), True
            return doubtful(name, f"it runs, and tells this user nothing: {error}", "run this as its user"), True
        except DaemonError as error:
            return broken(name, str(error), "restart it; systemd's watchdog would have"), True
    version = status["version"]
    if version != edged.__version__:
        seen = f"{version} runs, {edged.__version__} is installed"
        return doubtful(name, seen, "`sudo systemctl restart edged`"), True
    if problems := status["degraded"]:
        return doubtful(name, f"it runs, but {'; '.join(problems)}", "`journalctl -u edged -e` says more"), True
    return fine(name, f"{version} serves {status['model']['name']}, up {duration(status['uptime_s'])}"), True
