"""Kits: the files by which NVFlare runs at the hub and on a box, what they must say, and the processes. No NVFlare."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ORG = "edged"
SUM_KEY, SUM_PUBLIC_KEY = "sum.key", "sum.pub"
"""Keys of encrypted sums: that of all boxes, and the hub's, which cannot decrypt."""
BOX_STARTUP = ("client.crt", "client.key", "fed_client.json", "rootCA.pem", SUM_KEY)
HUB_STARTUP = ("fed_server.json", "rootCA.pem", "server.crt", "server.key", SUM_PUBLIC_KEY)
_OURS = "edged.federated_nvflare"
_NVFLARE = "nvflare.app_common"
_RIGHTS = ("clone_job", "download_job", "manage_job", "operate", "view", "byoc", "shell_commands")
_ROLES = ("project_admin", "org_admin", "lead", "member")
_NOBODY = {role: {right: "none" for right in (*_RIGHTS, "server-predeployed-flwr")} for role in _ROLES}
_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "level": "INFO", "formatter": "plain"}},
    "loggers": {"root": {"level": "INFO", "handlers": ["console"]}},
}


def _component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "path": path, "args": arguments}


BOX_LOCAL: dict[str, Any] = {
    "resources.json": {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [f"{_OURS}.executor.RoundExecutor", f"{_OURS}.ledger_filter.LedgerFilter"],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            _component("resource_manager", f"{_OURS}.resources.BoxResources"),
            _component(
                "resource_consumer",
                f"{_NVFLARE}.resource_consumers.passthrough_resource_consumer.PassthroughResourceConsumer",
            ),
            _component("process_launcher", f"{_OURS}.launcher.QuietLauncher"),
        ],
    },
    # Also a job of a person who may submit at the hub must bring no code: such a job skips the list above.
    "authorization.json": {
        "format_version": "1.0",
        "permissions": {role: {**rights, "submit_job": "any"} for role, rights in _NOBODY.items()},
    },
    "privacy.json": {
        "scopes": [
            {"name": "edged", "task_result_filters": [{"path": f"{_OURS}.ledger_filter.LedgerFilter", "args": {}}]}
        ],
        "default_scope": "edged",
    },
    "log_config.json": _LOG,
}
"""What a box's folder `local` has, and nothing else."""


def hub_local(kit: Path, max_boxes: int) -> dict[str, Any]:
    """Return what the hub's folder `local` has: NVFlare wants absolute folders, so they are written when it starts."""
    store = f"{_NVFLARE}.storages.filesystem_storage.FilesystemStorage"
    snapshots = {"path": store, "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"}}
    server = {"admin_storage": "transfer", "max_num_clients": max_boxes, "heart_beat_timeout": 60, "admin_timeout": 10}
    jobs = "nvflare.apis.impl.job_def_manager.SimpleJobDefManager"
    admin = {"submit_job": "any", "manage_job": "any", "view": "any"}
    return {
        "resources.json": {
            "format_version": 2,
            "class_list_enforcement_mode": "enforce",
            "class_allow_list": [f"{_OURS}.controller.RoundController"],
            "servers": [server],
            "snapshot_persistor": {
                "path": f"{_NVFLARE}.state_persistors.storage_state_persistor.StorageStatePersistor",
                "args": {"uri_root": "/", "storage": snapshots},
            },
            "components": [
                _component("job_scheduler", f"{_OURS}.scheduler.VennScheduler"),
                _component("job_manager", jobs, uri_root=str(kit / "jobs"), job_store_id="job_store"),
                _component("job_store", store),
                _component(
                    "process_launcher", f"{_NVFLARE}.job_launcher.server_process_launcher.ServerProcessJobLauncher"
                ),
            ],
        },
        "authorization.json": {
            "format_version": "1.0",
            "permissions": {**_NOBODY, "project_admin": {**_NOBODY["project_admin"], **admin}},
        },
        "log_config.json": _LOG,
    }


class KitError(RuntimeError):
    """A kit that is not used; the message names the file, what it says, and the way out."""


def write_local(kit: Path, files: Mapping[str, Any]) -> None:
    """Have the kit's folder `local` hold these files alone. Raises OSError."""
    local = kit / "local"
    local.mkdir(exist_ok=True)
    for path in local.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (local / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def check_box_kit(kit: Path) -> dict[str, Any]:
    """Return the startup file of a box's kit that keeps the box closed. Raises KitError for any other kit."""
    _demand_files(kit / "startup", {*BOX_STARTUP})
    _demand_files(kit / "local", {*BOX_LOCAL})
    for name, expected in BOX_LOCAL.items():
        for where, found, wanted in _differences(expected, _read(kit / "local" / name)):
            said = f"{where} is {_short(found)} where it must be {_short(wanted)}"
            raise KitError(f'"{kit / "local" / name}" opens the box: {said}: take the file as `provision` wrote it')
    path = kit / "startup" / "fed_client.json"
    startup = _read(path)
    client = startup.get("client", {})
    if startup.get("require_signed_jobs", True) is not True:
        raise KitError(f'"{path}" opens the box: require_signed_jobs is not true: remove it')
    if client.get("connection_security") != "mtls" or client.get("ssl_root_cert") != "rootCA.pem":
        raise KitError(f'"{path}" opens the box: its connection to the hub must be "mtls", checked by "rootCA.pem"')
    for key in (kit / "startup" / name for name in ("client.key", SUM_KEY)):
        if key.stat().st_mode & 0o077:
            raise KitError(f'"{key}" may be read by others: chmod 600')
    return startup


def _demand_files(folder: Path, expected: set[str]) -> None:
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if missing := sorted(expected - found):
        raise KitError(f'"{folder / missing[0]}" is not there: give the folder of a box that `provision` made')
    if strange := sorted(found - expected):
        raise KitError(f'"{folder / strange[0]}" is no file of a kit, and NVFlare might read it: remove it')


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KitError(f'"{path}" cannot be read: {error}') from None
    if not isinstance(content, dict):
        raise KitError(f'"{path}" is no JSON object: take the file as `provision` wrote it')
    return content


def _differences(expected: Any, found: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two values of JSON differ, what is found, and what is expected."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            yield from _differences(expected.get(key), found.get(key), f"{where}.{key}" if where else key)
    elif expected != found or type(expected) is not type(found):
        yield where, found, expected


def _short(value: Any) -> str:
    text = json.dumps(value)
    return "not there" if value is None else text if len(text) <= 100 else f"{text[:99]}…"


def exec_hub(kit: Path, max_boxes: int) -> None:
    """Become the hub's process. Raises KitError, OSError."""
    kit = kit.resolve()
    _demand_nvflare()
    for name in HUB_STARTUP:
        if not (kit / "startup" / name).is_file():
            raise KitError(f'"{kit / "startup" / name}" is not there: give the folder of a hub that `provision` made')
    write_local(kit, hub_local(kit, max_boxes))
    _exec(kit, "server.server_train", "fed_server.json", NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT="60")


def exec_agent(kit: Path, **environment: str) -> None:
    """Become a box's agent, whose processes reach the daemon as `environment` says. Raises KitError, OSError."""
    kit = kit.resolve()
    name = check_box_kit(kit)["client"]["fqsn"]
    if not joined(kit):
        raise KitError(
            f'this box has not joined by "{kit}": `edged federated join {kit}` shows what will leave, and asks'
        )
    _demand_nvflare()
    (kit / _PID).write_text(str(os.getpid()))
    _exec(kit, "client.client_train", "fed_client.json", f"uid={name}", **environment)


def _exec(kit: Path, module: str, startup: str, *variables: str, **environment: str) -> None:
    options = ["secure_train=true", *variables, f"org={ORG}", "config_folder=config"]
    command = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(kit), "-s", startup]
    # PYTHONSAFEPATH: a file in the kit is never a module. Two arenas: many threads that do little.
    own = {
        "PYTHONSAFEPATH": "1",
        "EDGED_KIT": str(kit),
        "MALLOC_ARENA_MAX": "2",
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    os.execve(sys.executable, [*command, "--set", *options], {**os.environ, **own})


def _demand_nvflare() -> None:
    if importlib.util.find_spec("nvflare") is None:
        raise KitError("NVFlare is not installed, by which boxes reach a hub: pip install 'edged[federated]'")


_JOINED, _PID = "joined.json", "agent.pid"


def joined(kit: Path) -> bool:
    """Tell whether this box has joined by a kit."""
    return (kit / _JOINED).is_file()


def join(kit: Path, agreed: Mapping[str, Any]) -> None:
    """Remember that this box's operator agreed to what was shown. Raises OSError."""
    path = kit / _JOINED
    path.touch(0o600)
    path.write_text(json.dumps(agreed) + "\n", "utf-8")


def leave(kit: Path) -> int | None:
    """Have the agent of a kit start no more; returns the process of one that runs. Raises OSError."""
    (kit / _JOINED).unlink(missing_ok=True)
    try:
        pid = int((kit / _PID).read_text())
        runs = b"client_train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if runs else None
