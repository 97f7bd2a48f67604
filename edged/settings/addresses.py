"""Addresses: of the daemon's Unix socket, for daemon and commands, and on loopback.

Must not import anything slow: every command does.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

SOCKET_FILE = "edged.sock"
MAX_PATH_BYTES = 107
"""The kernel's bound on a Unix socket's path."""


def socket_paths(named: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the path `named` by flag or setting, else `EDGED_SOCKET`, else `edged.sock` in each runtime folder.

    The daemon listens on the first; commands take the first that answers.
    """
    if path := named or environ.get("EDGED_SOCKET", ""):
        return (Path(path).expanduser(),)
    folders = [environ.get("RUNTIME_DIRECTORY", "").split(":")[0], environ.get("XDG_RUNTIME_DIR", "")]
    if not any(folders) and os.geteuid():
        # A plain user without a runtime folder may not write to /run.
        folders.append(str(Path(environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "edged"))
    folders.append("/run/edged")
    return tuple(Path(folder) / SOCKET_FILE for folder in dict.fromkeys(folders) if folder)


def too_long(path: Path) -> bool:
    """Whether the kernel refuses a socket of that path."""
    return len(os.fsencode(path)) > MAX_PATH_BYTES


def is_loopback(name: str) -> bool:
    """Whether a host name is localhost or a loopback address."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
