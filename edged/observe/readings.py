"""The metrics of the present: what the status, the device monitor, the store and the learned adapters say now."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edged.align.metrics import OTHER, AdapterReading
from edged.observe.catalogue import Samples
from edged.runtime.process import heap_bytes

_STAGES = ("waiting", "prefill", "decode")
_TOTALS = (
    ("edged_preemptions_total", "preemptions"),
    ("edged_prunings_total", "prunings"),
    ("edged_pruned_pages_total", "pruned_pages"),
    ("edged_pairs_trained_total", "pairs_trained"),
    ("edged_optimizer_steps_total", "optimizer_steps"),
    ("edged_steps_skipped_total", "steps_skipped"),
)
_TOKENS = (("prompt", "prompt_tokens"), ("output", "output_tokens"), ("finetune", "finetune_tokens"))
_ENERGY = (("serving", "serving_j"), ("finetune", "finetune_j"), ("idle", "idle_j"))
_PRESSURE = (
    ("box", "some", "memory_pressure_some_percent"),
    ("box", "full", "memory_pressure_full_percent"),
    ("daemon", "some", "cgroup_pressure_some_percent"),
)
_ROLLBACKS = (("operator", "rollbacks"), ("guard", "guard_rollbacks"))
_WRITE_AHEAD = "-wal"


def put_status(status: Mapping[str, Any], samples: Samples) -> None:
    """What `Engine.status` reports, but its latencies: those have histograms."""
    totals, queue = status["totals"], status["queue"]
    for name, key in _TOTALS:
        samples.put(name, totals[key])
    for kind, key in _TOKENS:
        samples.put("edged_tokens_total", totals[key], kind)
    for cause, key in _ROLLBACKS:
        samples.put("edged_rollbacks_total", totals[key], cause)
    for outcome, count in status["outcomes"].items():
        samples.put("edged_requests_total", count, outcome)
    for stage in _STAGES:
        samples.put("edged_queue_requests", queue[stage], stage)
    for kind in ("prefill", "decode", "finetune"):
        samples.put("edged_busy_seconds_total", status["busy"][f"{kind}_s"], kind)
    for target in ("ttft", "tbt"):
        samples.put("edged_slo_attainment_ratio", status["slo"][f"{target}_attainment"], target)
    _put_pages(status["pages"], status["prefix"], samples)
    _put_predictions(status["cost_model"], samples)
    _put_learning(status["finetune"], samples)


def put_degraded(engine: Sequence[str], store: str, samples: Samples) -> None:
    """How many things are not as they should be: each of the engine's, and the database if it has a problem."""
    samples.put("edged_degraded", len(engine) + bool(store))


def _put_pages(pages: Mapping[str, Any], prefix: Mapping[str, Any], samples: Samples) -> None:
    idle = {state: pages[state] for state in ("cached", "free", "retired")}
    for state, count in {"used": pages["total"] - sum(idle.values()), **idle}.items():
        samples.put("edged_pages", count, state)
    samples.put("edged_page_bytes", pages["bytes_per_page"])
    samples.put("edged_prefix_lookup_tokens_total", prefix["prompt_tokens"])
    samples.put("edged_prefix_hit_tokens_total", prefix["hit_tokens"])
    samples.put("edged_prefix_restored_tokens_total", prefix["restored_tokens"])
    samples.put("edged_prefix_evicted_pages_total", prefix["evicted_pages"])
    samples.put("edged_prefix_spilled_tokens_total", prefix["spilled_pages"] * pages["page_size"])
    spill = prefix["spill"]
    samples.put("edged_spill_pages", spill["pages"], "used")
    samples.put("edged_spill_pages", spill["capacity"] - spill["pages"], "free")


def _put_predictions(cost: Mapping[str, Any], samples: Samples) -> None:
    # Before anything was measured the mean over all is only assumed.
    errors = {"all": cost["mape_percent"] if cost["iterations"] else None, **cost["mape_percent_by_kind"]}
    for kind, percent in errors.items():
        samples.put("edged_prediction_error_ratio", _ratio(percent), kind)
    samples.put("edged_device_drift_ratio", cost["drift"])


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0


def _put_learning(finetune: Mapping[str, Any], samples: Samples) -> None:
    samples.put("edged_finetune_enabled", finetune["enabled"] and not finetune["held"])
    samples.put("edged_pairs_pending", finetune["pairs_queued"])
    samples.put("edged_quarantine_alarms", len(finetune["alarms"]))
    samples.put("edged_adapters", finetune["adapters_loaded"], "memory")
    samples.put("edged_adapters", finetune["adapters_active"], "slot")


def put_governors(report: Mapping[str, Any], samples: Samples) -> None:
    """What is held back, and the energy where power can be read."""
    samples.put("edged_memory_governor_step", report["memory"]["step"])
    samples.put("edged_power_governor_share_ratio", report["power"]["finetune_share"])
    energy = report["energy"] or {}
    for kind, key in _ENERGY:
        samples.put("edged_energy_joules_total", energy.get(key), kind)


def put_device(reading: Mapping[str, Any], samples: Samples) -> None:
    """What the monitor reads; boxes without a sensor lack its key, or have None there."""
    samples.put("edged_temperature_celsius", reading.get("temperature_c"))
    samples.put("edged_temperature_limit_celsius", reading.get("temperature_limit_c"))
    samples.put("edged_power_watts", reading.get("power_w"))
    samples.put("edged_process_memory_bytes", reading.get("process_rss_bytes"))
    _put_heap(samples)
    for of, key in (("box", "cpu_percent"), ("daemon", "process_cpu_percent")):
        samples.put("edged_cpu_ratio", _ratio(reading.get(key)), of)
    for of, tasks, key in _PRESSURE:
        samples.put("edged_memory_pressure_ratio", _ratio(reading.get(key)), of, tasks)
    total, available = reading.get("memory_total_bytes"), reading.get("memory_available_bytes")
    if total is not None and available is not None:
        samples.put("edged_memory_bytes", available, "available")
        samples.put("edged_memory_bytes", total - available, "used")
    total, used = reading.get("gpu_memory_total_bytes"), reading.get("gpu_memory_used_bytes")
    if total is not None and used is not None:
        samples.put("edged_gpu_memory_bytes", total - used, "available")
        samples.put("edged_gpu_memory_bytes", used, "used")


def _put_heap(samples: Samples) -> None:
    samples.put("edged_python_blocks", sys.getallocatedblocks())
    heap = heap_bytes()
    if heap is not None:
        in_use, free = heap
        samples.put("edged_heap_bytes", in_use, "in_use")
        samples.put("edged_heap_bytes", free, "free")


def put_store(database: Path, errors: int, samples: Samples) -> None:
    """The database's files, the disk that they are on, and how often the database failed."""
    samples.put("edged_store_errors_total", errors)
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(database.parent)
        samples.put("edged_disk_bytes", disk.free, "free")
        samples.put("edged_disk_bytes", disk.total - disk.free, "used")
    size = 0
    for file in (database, database.with_name(database.name + _WRITE_AHEAD)):
        with contextlib.suppress(OSError):
            size += os.stat(file).st_size
    samples.put("edged_database_bytes", size)


def put_adapters(versions: Mapping[str, int], shown: list[AdapterReading], samples: Samples) -> None:
    """Adapters by name as far as they are `shown`, the others together; `versions` are those that are served."""
    samples.put("edged_adapters", len(versions), "known")
    named = {reading.adapter for reading in shown}
    for reading in shown:
        name = reading.adapter
        samples.put("edged_adapter_win_rate_ratio", reading.win_rate, name)
        samples.put("edged_adapter_clpd_nats", reading.clpd_nats, name)
        samples.put("edged_adapter_reward_accuracy_ratio", reading.reward_accuracy, name)
        samples.put("edged_adapter_kl_nats", reading.kl_nats, name)
        samples.put("edged_adapter_neutral_nll_change_ratio", reading.nll_change, name)
        samples.put("edged_adapter_pairs_pending", reading.pairs_pending, name)
        if name != OTHER:
            samples.put("edged_adapter_version", versions.get(name, 0), name)
    if OTHER in named:
        rest = sum(version for name, version in versions.items() if name == OTHER or name not in named)
        samples.put("edged_adapter_version", rest, OTHER)
