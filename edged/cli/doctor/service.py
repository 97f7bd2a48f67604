"""Checks of the service: systemd's units, and the daemon's answers."""

import pwd
from pathlib import Path

import edged
from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine, output_of
from edged.cli.output import duration
from edged.cli.settings import served_settings
from edged.client.client import Address, Client, DaemonError, NotRunning, Refused
from edged.refusal import REFUSED
from edged.settings.load import Settings

SERVICE, SOCKET = "edged.service", "edged.socket"
_FOLDERS = (
    *("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system"),
    *("usr/lib/systemd/system", "lib/systemd/system"),
)


def unit_file(root: Path, name: str) -> Path | None:
    """Return the path of the unit file that systemd uses; None if there is none."""
    return next((path for folder in _FOLDERS if (path := root / folder / name).is_file()), None)


def _values(root: Path, unit: str, name: str) -> list[str]:
    """Return the values that the unit file gives the key `name`, one a line; empty without a file."""
    path = unit_file(root, unit)
    lines = path.read_text(errors="replace").splitlines() if path is not None else []
    return [line.partition("=")[2].strip() for line in lines if line.startswith(f"{name}=")]


def account(root: Path) -> pwd.struct_passwd | None:
    """Return the account of the service unit's User=; None without a unit, or if it is root or does not exist."""
    names = _values(root, SERVICE, "User")
    try:
        entry = pwd.getpwnam(names[-1] if names else "root")
    except KeyError:
        return None
    return entry if entry.pw_uid != 0 else None


def units(it: Examination) -> Finding:
    """Check that the systemd units are installed, valid, have a watchdog, and start at boot."""
    found = [path for name in (SERVICE, SOCKET) if (path := unit_file(it.root, name)) is not None]
    if not found:
        seen = "not installed: nobody starts edged after a restart, or when it has hung"
        return doubtful(seen, "`sudo tools/install` from a checkout")
    names = ", ".join(path.name for path in found)
    code, output = output_of(["systemd-analyze", "verify", *map(str, found)], it.left_s(3.0))
    ours = [line for line in output.splitlines() if "edged." in line]
    if code == 127:
        return doubtful(f"{names} installed, not verified: {output}", "install systemd")
    if ours:
        return doubtful(f"{names}: {ours[0]}", f"correct it, then `sudo systemctl daemon-reload`: {found[0]}")
    if "WatchdogSec=" not in "".join(path.read_text(errors="replace") for path in found):
        return doubtful(f"{names}: no watchdog", f"add WatchdogSec=30 to [Service] in {found[0]}")
    seen = f"{names} installed, with a watchdog"
    if not (it.root / "run/systemd/system").is_dir():
        return fine(f"{seen}; systemd does not run here")
    _, states = output_of(["systemctl", "is-enabled", SERVICE, SOCKET], it.left_s(2.0))
    unit = _unit_state(it)
    if unit["ActiveState"] == "activating":
        return _starting(unit)
    if unit["ActiveState"] == "failed":
        return broken("edged.service has failed", "`journalctl -u edged -e` says why")
    if "enabled" not in states.split():
        return doubtful(f"{seen}, not enabled", "`sudo systemctl enable --now edged.socket`")
    return fine(f"{seen}, enabled")


def _unit_state(it: Examination) -> dict[str, str]:
    """Return the service's ActiveState, SubState and StatusText from systemd; "" where it reports none."""
    names = ("ActiveState", "SubState", "StatusText")
    command = ["systemctl", "show", SERVICE, f"--property={','.join(names)}"]
    lines = output_of(command, it.left_s(2.0))[1].splitlines() if (it.root / "run/systemd/system").is_dir() else []
    return dict.fromkeys(names, "") | {name: value for name, _, value in (line.partition("=") for line in lines)}


def _starting(unit: dict[str, str]) -> Finding:
    """Return the finding for a service that systemd is starting, or restarting after a failed start."""
    seen = f"{SERVICE} is {unit['ActiveState']} ({unit['SubState']}): {unit['StatusText'] or 'it says nothing yet'}"
    if unit["StatusText"].startswith(REFUSED) or unit["SubState"] == "auto-restart":
        return broken(seen, "mend it, then `sudo systemctl restart edged`; `journalctl -u edged -e` says more")
    return doubtful(seen, "ask again in a moment; `journalctl -u edged -e` says more")


def daemon(it: Examination) -> tuple[Finding, bool, Settings | None]:
    """Check the daemon: (finding, whether it runs, its settings or None if it does not give them to this user)."""
    listens = (Path(value) for value in _values(it.root, SOCKET, "ListenStream") if value.startswith("/"))
    sockets, theirs, unit = it.sockets, next(listens, None), _unit_state(it)
    if theirs is not None and unit["ActiveState"] in ("inactive", "failed", "activating"):
        # Connecting there would start a daemon that does not run, and one that starts may not answer for minutes.
        sockets = tuple(path for path in sockets if path != theirs)
        if not any(path.exists() for path in sockets):
            if unit["ActiveState"] == "activating":
                starting = _starting(unit)
                return starting, starting.state != "fail", None
            return fine(f"does not run: the first request on {theirs} starts it"), False, None
    with Client(Address(sockets=sockets), timeout_s=it.left_s(3.0)) as client:
        try:
            client.get("/readyz")
            status, served = client.get("/v1/status"), served_settings(client)
        except NotRunning:
            seen = f"none answers on {' or '.join(map(str, sockets))}"
            return doubtful(seen, "`sudo systemctl start edged`, or `edged serve`"), False, None
        except DaemonError as error:
            return _unhealthy(error), True, None
    version = status["version"]
    if version != edged.__version__:
        seen = f"{version} runs, {edged.__version__} is installed"
        return doubtful(seen, "`sudo systemctl restart edged`"), True, served
    if problems := status["degraded"]:
        return doubtful(f"it runs, but {'; '.join(problems)}", "`journalctl -u edged -e` says more"), True, served
    return fine(f"{version} serves {status['model']['name']}, up {duration(status['uptime_s'])}"), True, served


def _unhealthy(error: DaemonError) -> Finding:
    """Return the finding for a daemon that runs but does not answer normally."""
    if not isinstance(error, Refused):
        return broken(str(error), "restart it; systemd's watchdog would have")
    if error.code in ("loading", "draining"):
        return doubtful(str(error), "ask again in a moment")
    if error.code == "engine_stopped":
        return broken(str(error), "restart it, and see its log")
    return doubtful(f"it runs, and tells this user nothing: {error}", "run this as its user")
