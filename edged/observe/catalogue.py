"""Every metric that `GET /metrics` can show: name, type, labels, meaning. docs/metrics.md is checked against it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

Buckets = tuple[list[tuple[str, float]], float]
"""A histogram's state: how many values were at most each bound, the last of which is +Inf, and the values' sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; counters' names end with `_total`, the info's with `_info`."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    help: str


def _of_kind(kind: Literal["counter", "gauge", "histogram"]) -> Callable[..., Metric]:
    """Return a function of (name, help, *labels) that makes a metric of this kind."""
    return lambda name, help, *labels: Metric(name, kind, labels, help)


_counter, _gauge, _histogram = _of_kind("counter"), _of_kind("gauge"), _of_kind("histogram")


CATALOGUE = (
    Metric("edged_build_info", "info", ("version", "model", "dtype", "device", "policy"), "What runs here; always 1"),
    _gauge("edged_ready", "1 while completions are served; 0 while loading, draining, and after the engine stopped"),
    _gauge("edged_degraded", "Things that are not as they should be; `edged status` has a sentence for each"),
    _gauge("edged_start_time_seconds", "Unix time at which the daemon began to serve"),
    # Latency
    _histogram("edged_ttft_seconds", "From a request's arrival to its first token", "class"),
    _histogram("edged_tbt_seconds", "From a token to the next one of the same answer", "class"),
    _counter("edged_slo_tokens_total", "Tokens that met their target, or missed it", "target", "class", "result"),
    _gauge("edged_slo_attainment_ratio", "Share of the latest 1000 tokens that came in time", "target"),
    _histogram("edged_qoe_ratio", "How well readers of streamed answers were served; 1: nobody waited", "class"),
    _counter("edged_stall_seconds_total", "Seconds that readers waited for tokens beyond what they expect"),
    _counter("edged_finetune_lent_seconds_total", "Seconds of fine-tuning in time that readers had no need of"),
    _histogram("edged_iteration_seconds", "Iterations from taking pages to tokens, by what was in them", "mix"),
    _histogram("edged_decision_seconds", "What the scheduler took to plan an iteration"),
    _counter("edged_iterations_over_budget_total", "Iterations that took longer than the slack of those they served"),
    _histogram("edged_event_loop_stall_seconds", "How late the event loop wakes a task, 20 times a second"),
    _histogram("edged_writer_stall_seconds", "Writes of the database: waited for a turn, ran, their commit", "part"),
    _gauge("edged_iteration_slack_seconds", "Budget minus measured time, mean of the latest iterations"),
    # Work
    _counter("edged_requests_total", "Requests that ended, by how; refused: the queue was full", "outcome"),
    _gauge("edged_queue_requests", "Requests now, by stage", "stage"),
    _gauge("edged_queue_limit_requests", "Requests that may wait (serving.max_queue)"),
    _counter("edged_tokens_total", "Tokens computed: of prompts, of answers, of preference pairs", "kind"),
    _counter("edged_busy_seconds_total", "Seconds in which the device worked, by what for", "kind"),
    _gauge("edged_applications", "Runs of applications that are open, by whether a call of theirs is", "state"),
    _histogram("edged_application_seconds", "From a run's first call to the end of its last one"),
    _histogram("edged_fair_lateness_seconds", "How much later than under fair sharing a run ended, under justitia"),
    _histogram("edged_demand_error_ratio", "How far a run's expected cost was from the real one, over that; justitia"),
    _gauge("edged_bin_tokens", "Forward tokens of an iteration by kind, mean of the latest 32", "kind"),
    _gauge("edged_bin_units", "Fine-tune units of an iteration, mean of the latest 32"),
    _counter("edged_preemptions_total", "Times that a task had to give its pages back"),
    # Pages
    _gauge("edged_pages", "K/V pages by state; cached: prefixes nobody uses now; retired: given back", "state"),
    _gauge("edged_page_bytes", "Size of a K/V page"),
    _counter("edged_prunings_total", "Times that a sequence's old K/V was pruned"),
    _counter("edged_pruned_pages_total", "Pages that pruning gave back"),
    _counter("edged_prefix_lookup_tokens_total", "Prompt tokens that were looked up among the shared prefixes"),
    _counter("edged_prefix_hit_tokens_total", "Prompt tokens that were found there and not computed again"),
    _counter("edged_prefix_restored_tokens_total", "Of these, tokens that came back from the offload"),
    _counter("edged_prefix_earlier_tokens_total", "Tokens found there that an earlier version of the adapter computed"),
    _counter("edged_prefix_evicted_pages_total", "Pages of shared prefixes that were dropped"),
    _counter("edged_prefix_spilled_tokens_total", "Tokens whose pages went to the offload instead"),
    _gauge("edged_spill_pages", "Room for offloaded prefixes, in pages", "state"),
    # Predictions
    _gauge("edged_prediction_error_ratio", "How far predicted times were off, mean of the latest iterations", "kind"),
    _gauge("edged_device_drift_ratio", "Times now over the usual ones of the last hours of work; above 1: slower"),
    # Alignment
    _gauge(
        "edged_finetune_enabled", "1 where pairs are learned; 0 when paused, switched off, held back, or impossible"
    ),
    _gauge("edged_pairs_pending", "Pairs that wait for training or are in a step"),
    _counter("edged_pairs_trained_total", "Pairs that were trained on"),
    _counter("edged_optimizer_steps_total", "Optimizer steps"),
    _counter("edged_steps_skipped_total", "Optimizer steps that were not taken, as for a loss that is not finite"),
    _counter("edged_rollbacks_total", "Versions that were taken back, by whom", "cause"),
    _gauge("edged_quarantined_pairs", "Pairs that look poisoned and wait for a decision"),
    _gauge("edged_quarantine_alarms", "Users whose new pairs are quarantined unseen, after a burst"),
    _gauge("edged_adapters", "Adapters: known, in memory, in a slot of the model", "place"),
    _gauge("edged_adapter_win_rate_ratio", "Share of the latest 50 pairs whose chosen answer was likelier", "adapter"),
    _gauge("edged_adapter_clpd_nats", "Mean log p(chosen) - log p(rejected) of these pairs", "adapter"),
    _gauge("edged_adapter_reward_accuracy_ratio", "Share of these pairs with a positive reward margin", "adapter"),
    _gauge(
        "edged_adapter_liked_ratio",
        "Share of the latest answers that the user's taste model likes: as served, by the adapter alone, by the base",
        "adapter",
        "answers",
    ),
    _gauge("edged_adapter_kl_nats", "KL to the base per token of held-out answers, at the latest test", "adapter"),
    _gauge("edged_adapter_neutral_nll_change_ratio", "NLL of neutral text over the base's, less 1", "adapter"),
    _gauge("edged_adapter_version", "Version that is served", "adapter"),
    _gauge("edged_adapter_pairs_pending", "Pairs that wait", "adapter"),
    _gauge("edged_jobs", "Fine-tuning jobs by status", "status"),
    _counter("edged_job_tokens_total", "Tokens of fine-tuning jobs' examples that were trained on"),
    # Governors
    _gauge("edged_memory_governor_step", "Held: 0 nothing, 1 caches, 2 pruning, 3 also fine-tuning, 4 also admission"),
    _gauge("edged_power_governor_share_ratio", "Share of the time that heat, power and quiet hours leave fine-tuning"),
    _counter("edged_energy_joules_total", "What was drawn since start, by what for", "kind"),
    # The box
    _gauge("edged_temperature_celsius", "The sensor nearest to its limit, else the hottest"),
    _gauge("edged_temperature_limit_celsius", "Where that part is slowed down, if it says so"),
    _gauge("edged_power_watts", "What the box or its GPU draws"),
    _gauge("edged_memory_bytes", "The box's memory", "state"),
    _gauge("edged_memory_pressure_ratio", "Share of the last 10 s in which tasks waited for memory", "of", "tasks"),
    _gauge("edged_gpu_memory_bytes", "Memory of a GPU that has its own", "state"),
    _gauge("edged_process_memory_bytes", "Resident memory of the daemon"),
    _gauge("edged_heap_bytes", "The daemon's C heap: in use, and free within it (kept or given back)", "state"),
    _gauge("edged_python_blocks", "Blocks that Python objects of the daemon take"),
    _gauge("edged_cpu_ratio", "Processor time: the box's as a share of all cores, the daemon's as cores", "of"),
    _gauge("edged_disk_bytes", "Size of the file system with the data folder, and what is free of it", "state"),
    _gauge("edged_database_bytes", "The database with its write-ahead log"),
    _counter("edged_store_errors_total", "Reads and writes of the database that failed"),
    _counter("edged_records_lost_total", "Records that were overwritten before these metrics saw them", "record"),
)

_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


class Samples(Collector):
    """Values of one moment, by metric and label, several labels as a tuple; None, for what is not known, is left out.

    A histogram's are `Buckets`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises ValueError for a metric that the catalogue does not have."""
        self._values = values
        if unknown := values.keys() - {metric.name for metric in CATALOGUE}:
            raise ValueError(f"the catalogue has no {sorted(unknown)}")

    def collect(self) -> Iterator[Family]:
        """Families in the catalogue's order, for prometheus_client's encoders."""
        for metric in CATALOGUE:
            value = self._values.get(metric.name)
            labels = () if metric.kind == "info" else metric.labels
            family = _FAMILIES[metric.kind](metric.name.removesuffix("_info"), metric.help, labels=labels)
            for own, each in (value if isinstance(value, Mapping) else {(): value}).items():
                if each is not None:
                    _add(metric, family, (own,) if isinstance(own, str) else own, each)
            if family.samples:
                yield family


def _add(metric: Metric, family: Any, labels: tuple[str, ...], value: Any) -> None:
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
    if metric.kind == "info":
        family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
    elif metric.kind == "histogram":
        family.add_metric(labels, *value)
    else:
        family.add_metric(labels, value)
