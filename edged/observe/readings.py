"""Present values of metrics by name and label, from the status, the store and the learned adapters.

A value that is None is not known; several labels are a tuple, in the catalogue's order.
"""

import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edged.align.metrics import OTHER, AdapterReading
from edged.runtime.process import heap_bytes

Readings = dict[str, Any]
_TOTALS = ("preemptions", "prunings", "pruned_pages", "pairs_trained", "optimizer_steps", "steps_skipped")
_PRESSURE = {
    ("box", "some"): "memory_pressure_some_percent",
    ("box", "full"): "memory_pressure_full_percent",
    ("daemon", "some"): "cgroup_pressure_some_percent",
}
_MEANS = {
    "edged_adapter_win_rate_ratio": "win_rate",
    "edged_adapter_clpd_nats": "clpd_nats",
    "edged_adapter_reward_accuracy_ratio": "reward_accuracy",
    "edged_adapter_kl_nats": "kl_nats",
    "edged_adapter_neutral_nll_change_ratio": "nll_change",
    "edged_adapter_pairs_pending": "pairs_pending",
}


def engine_readings(status: Mapping[str, Any]) -> Readings:
    """Return the metrics of `Engine.status`, except its latencies, which have histograms."""
    totals, pages, prefix, spill = status["totals"], status["pages"], status["prefix"], status["prefix"]["spill"]
    cost, tuning = status["cost_model"], status["finetune"]
    idle = {state: pages[state] for state in ("cached", "free", "retired")}
    # Before anything was measured the mean over all is only assumed.
    errors = {"all": cost["mape_percent"] if cost["iterations"] else None, **cost["mape_percent_by_kind"]}
    return {
        **{f"edged_{name}_total": totals[name] for name in _TOTALS},
        "edged_tokens_total": {
            kind: totals[f"{kind}_tokens"] for kind in ("prompt", "output", "candidate", "finetune")
        },
        "edged_stall_seconds_total": totals["stall_s"],
        "edged_finetune_lent_seconds_total": status["scheduler"]["lent_s"],
        "edged_rollbacks_total": {"operator": totals["rollbacks"], "guard": totals["guard_rollbacks"]},
        "edged_requests_total": status["outcomes"],
        "edged_queue_requests": {stage: status["queue"][stage] for stage in ("waiting", "prefill", "decode")},
        "edged_busy_seconds_total": {kind: status["busy"][f"{kind}_s"] for kind in ("prefill", "decode", "finetune")},
        "edged_slo_attainment_ratio": {target: status["slo"][f"{target}_attainment"] for target in ("ttft", "tbt")},
        "edged_pages": {"used": pages["total"] - sum(idle.values()), **idle},
        "edged_page_bytes": pages["bytes_per_page"],
        "edged_prefix_lookup_tokens_total": prefix["prompt_tokens"],
        "edged_prefix_hit_tokens_total": prefix["hit_tokens"],
        "edged_prefix_restored_tokens_total": prefix["restored_tokens"],
        "edged_prefix_earlier_tokens_total": prefix["earlier_tokens"],
        "edged_prefix_evicted_pages_total": prefix["evicted_pages"],
        "edged_prefix_spilled_tokens_total": prefix["spilled_pages"] * pages["page_size"],
        "edged_spill_pages": {"used": spill["pages"], "free": spill["capacity"] - spill["pages"]},
        "edged_prediction_error_ratio": {kind: _ratio(percent) for kind, percent in errors.items()},
        "edged_device_drift_ratio": cost["drift"],
        "edged_finetune_enabled": tuning["enabled"] and not tuning["held"],
        "edged_pairs_pending": tuning["pairs_queued"],
        "edged_quarantine_alarms": len(tuning["alarms"]),
        "edged_adapters": {"memory": tuning["adapters_loaded"], "slot": tuning["adapters_active"]},
    }


def governor_readings(report: Mapping[str, Any]) -> Readings:
    """Return the governors' steps and shares, and the energy where power can be read."""
    energy = report["energy"] or {}
    return {
        "edged_memory_governor_step": report["memory"]["step"],
        "edged_power_governor_share_ratio": report["power"]["finetune_share"],
        "edged_energy_joules_total": {kind: energy.get(f"{kind}_j") for kind in ("serving", "finetune", "idle")},
    }


def device_readings(device: Mapping[str, Any]) -> Readings:
    """Return the monitor's readings, None where the box has no such sensor, and this process's heap."""
    available = device["memory_available_bytes"]
    gpu_total, gpu_used = device["gpu_memory_total_bytes"], device["gpu_memory_used_bytes"]
    gpu_known = gpu_total is not None and gpu_used is not None
    return {
        "edged_temperature_celsius": device["temperature_c"],
        "edged_temperature_limit_celsius": device["temperature_limit_c"],
        "edged_power_watts": device["power_w"],
        "edged_process_memory_bytes": device["process_rss_bytes"],
        "edged_heap_bytes": dict(zip(("in_use", "free"), heap_bytes() or (None, None), strict=True)),
        "edged_python_blocks": sys.getallocatedblocks(),
        "edged_cpu_ratio": {"box": _ratio(device["cpu_percent"]), "daemon": _ratio(device["process_cpu_percent"])},
        "edged_memory_pressure_ratio": {labels: _ratio(device[key]) for labels, key in _PRESSURE.items()},
        "edged_memory_bytes": {"available": available, "used": device["memory_total_bytes"] - available},
        "edged_gpu_memory_bytes": {"available": gpu_total - gpu_used, "used": gpu_used} if gpu_known else None,
    }


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0


def store_readings(report: Mapping[str, Any], errors: int) -> Readings:
    """The database's files as `Maintenance` reports them, the disk that they are on, and how often it failed."""
    disk = {}
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(Path(report["path"]).parent)
        disk = {"free": usage.free, "used": usage.total - usage.free}
    size = report["database_bytes"] + report["log_bytes"]
    return {"edged_store_errors_total": errors, "edged_disk_bytes": disk, "edged_database_bytes": size}


def adapter_readings(versions: Mapping[str, int], shown: Sequence[AdapterReading]) -> Readings:
    """Adapters by name as far as they are `shown`, the others together; `versions` are those that are served."""
    named = [reading.adapter for reading in shown]
    served = {name: versions.get(name, 0) for name in named}
    if OTHER in named:
        served[OTHER] = sum(version for name, version in versions.items() if name == OTHER or name not in named)
    means = {metric: {reading.adapter: getattr(reading, mean) for reading in shown} for metric, mean in _MEANS.items()}
    return {**means, "edged_adapter_version": served}
