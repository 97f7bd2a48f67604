"""Campaigns at the hub, by the submitter's kit: they are submitted, listed and cancelled."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError

from edged.federated.averaging import read_start, write_start
from edged.federated.campaign_file import CampaignFile, CampaignRefused
from edged.federated_nvflare.hub_rounds import STARTS, campaign_of
from edged.federated_nvflare.kits import KitError

_OURS = "edged.federated_nvflare"
_CONNECT_S = 10.0
_SERVER = {
    "format_version": 2,
    "server": {"heart_beat_timeout": 60, "task_request_interval": 0.5},
    # Seconds after which a box whose process is gone is waited for no longer.
    "dead_client_grace_period": 15.0,
    "dead_client_check_lead_time": 15.0,
    "workflows": [{"id": "round", "path": f"{_OURS}.controller.RoundController", "args": {}}],
    "components": [],
}
BOX_JOB = {
    "format_version": 2,
    "executors": [{"tasks": ["round", "start"], "executor": {"path": f"{_OURS}.executor.RoundExecutor", "args": {}}}],
    "task_data_filters": [],
    "task_result_filters": [],
    "components": [],
}


def write_job(folder: Path, job: CampaignFile, starts: Mapping[str, Path] = MappingProxyType({})) -> Path:
    """Write NVFlare's job of a campaign: configuration, and the `starts` that it names, of PEFT folders.

    Returns its folder. Raises CampaignRefused, OSError.
    """
    if {*job.starts} != starts.keys():
        named = ", ".join(job.starts) or "none"
        raise CampaignRefused(f'campaign "{job.name}" names the starts {named}: give each by --start NAME=FOLDER')
    meta = {"name": job.name, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
    meta["custom_props"] = {"edged": job.table()}
    campaign_of(meta)
    config = folder / job.name / "app" / "config"
    config.mkdir(parents=True)
    (folder / job.name / "meta.json").write_text(json.dumps(meta), "utf-8")
    (config / "config_fed_server.json").write_text(json.dumps(_SERVER), "utf-8")
    (config / "config_fed_client.json").write_text(json.dumps(BOX_JOB), "utf-8")
    for name, path in starts.items():
        try:
            weights, alpha = read_start(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CampaignRefused(f'"{path}" is no start: {error}') from None
        write_start(config / STARTS / name, weights, alpha)
    return folder / job.name


def submit(kit: Path, job: CampaignFile, starts: Mapping[str, Path] = MappingProxyType({})) -> str:
    """Submit a campaign and return the id of its first NVFlare job. Raises KitError, CampaignRefused."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(Path(folder), job, starts)
        with session(kit) as hub:
            if job.name in _latest(hub):
                raise KitError(f'campaign "{job.name}" was submitted before: give this one a name of its own')
            return str(hub.submit_job(str(path)))


def campaigns(kit: Path) -> list[dict[str, Any]]:
    """Return the campaigns at the hub, the oldest first, each with its state and progress. Raises KitError."""
    with session(kit) as hub:
        return [_told(meta) for meta in _latest(hub).values()]


def cancel(kit: Path, name: str) -> None:
    """End a campaign; its boxes drop the round under way. Raises KitError."""
    with session(kit) as hub:
        known = _latest(hub)
        if name not in known:
            raise KitError(f'no campaign "{name}" is at the hub: known are {", ".join(known) or "none"}')
        hub.abort_job(known[name]["job_id"])


@contextlib.contextmanager
def session(kit: Path) -> Iterator[Any]:
    """Yield NVFlare's session of a submitter's kit. Raises KitError where the hub refuses or does not answer."""
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
    except ImportError:
        raise KitError("NVFlare is not installed, which speaks to the hub: pip install 'edged[federated]'") from None
    path = kit.resolve() / "startup" / "fed_admin.json"
    if not path.is_file():
        raise KitError(f'"{path}" is not there: give the folder of the submitter that `provision` made')
    admin = json.loads(path.read_text("utf-8"))["admin"]
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    hub = None
    # NVFlare's session makes its folders where it is, and prints.
    with contextlib.chdir(kit), contextlib.redirect_stdout(io.StringIO()):
        try:
            hub = new_secure_session(admin["username"], str(path.parents[1]), timeout=_CONNECT_S)
            yield hub
        except KitError:
            raise
        except Exception as error:  # NVFlare's errors have no common class
            raise KitError(f"the hub at {admin['host']}:{admin['port']}: {error}") from None
        finally:
            if hub is not None:
                hub.close()


def _latest(hub: Any) -> dict[str, dict[str, Any]]:
    """Return the meta data of the latest NVFlare job of each campaign."""
    found: dict[str, dict[str, Any]] = {}
    for meta in sorted(hub.list_jobs(detailed=True), key=lambda meta: meta.get("submit_time") or 0.0):
        if isinstance(meta.get("custom_props"), dict) and "edged" in meta["custom_props"]:
            if meta.get("edged_refused") and meta["name"] in found:
                continue
            found[meta["name"]] = meta
    return found


def _told(meta: dict[str, Any]) -> dict[str, Any]:
    progress = {"rounds_complete": 0, "records": 0, "boxes_with_start": 0, **meta.get("edged_progress", {})}
    rounds = campaign_of(meta).rounds
    is_complete, status = progress["rounds_complete"] >= rounds, meta["status"].removeprefix("FINISHED:")
    states = {"SUBMITTED": "complete" if is_complete else "waits for boxes"}
    states |= dict.fromkeys(("RUNNING", "DISPATCHED"), "hands out the start" if is_complete else "in a round")
    states |= {"ABORTED": "cancelled", "CAN_NOT_SCHEDULE": f"refused: {meta.get('edged_refused', 'see the hub log')}"}
    refusals = [each for each in meta.get("job_deploy_detail") or [] if not each.endswith(": OK")]
    state = states.get(status, "; ".join([f"ended: {status}", *refusals]))
    return {"name": meta["name"], "state": state, "rounds": rounds, **progress, "nvflare_job": meta["job_id"]}
