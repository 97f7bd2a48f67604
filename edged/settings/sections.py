"""What can be set, section by section; `[access]` and `[limits]` are in `edged.settings.access`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]):([0-5]\d)")

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSettings(Section):
    """Which model is served."""

    path: str = Field("demo", description='directory of save_pretrained, hub name, or "demo" (embedded)')
    name: str = Field("", description="name in the API; empty: the directory's name")
    device: str = Field("auto", description='"auto", "cpu", "cuda" or "cuda:N"')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 on CUDA, float32 on CPU"
    )
    quantize: Literal["", "nf4", "llm-int8", "int8", "int4"] = Field(
        "", description="quantize plain weights while loading: nf4, llm-int8 (bitsandbytes), int8, int4 (torchao)"
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of an operation; 0: 1 for small models, else as many as other programs leave cores",
    )
    pack_weights: bool = Field(
        True, description="CPU, float32: a packed copy of the weights, for prompts and larger batches"
    )
    short_layers: bool = Field(
        True, description="CPU, float32: few tokens pass products and layers of the common kind by compiled kernels"
    )
    narrow_weights: bool = Field(
        True,
        description="CPU, float32: few tokens read weights that are 16-bit numbers from a copy of half the size; the"
        " results are the same (beside pack_weights and short_layers)",
    )
    decode_attention: Literal["auto", "padded", "ragged", "native", "triton"] = Field(
        "auto", description="native, ragged (CPU) and triton (CUDA) read K/V in place; padded copies it"
    )
    prefill_attention: Literal["auto", "gathered", "triton"] = Field(
        "auto", description="triton (CUDA) reads the K/V before a chunk in place; gathered copies it"
    )
    lora_kernel: Literal["auto", "torch", "native", "triton"] = Field(
        "auto",
        description="native (CPU, float32; beside short_layers) and triton (CUDA) add all adapters' updates at once",
    )
    graph_memory_mb: int = Field(
        512, ge=0, description="CUDA: most memory of captured decode iterations / 2^20; 0: none are captured"
    )
    keep_freed_memory: bool = Field(
        True, description="CPU: keep freed memory for the next iteration; given back when idle"
    )
    huge_pages: bool = Field(
        True, description="CPU: weights in huge pages; edged serve starts itself again to have them"
    )
    max_context_tokens: int = Field(0, ge=0, description="longest prompt plus answer; 0: what fits model and cache")
    trust_remote_code: bool = Field(
        False, description="run Python code that came with the model, with all of edged's rights; off: it is refused"
    )


class ServingSettings(Section):
    """How requests are batched."""

    max_sequences: Count = Field(64, description="sequences that run at once; others wait")
    max_queue: Count = Field(1024, description="requests that may wait; beyond it the API answers 429")
    max_batch_tokens: Annotated[int, Field(ge=16)] = Field(1024, description="tokens of one iteration's forward")
    default_max_tokens: Count = Field(512, description="answer length when the request names none")
    on_update: Literal["hot", "pin"] = Field(
        "hot", description='a new version reaches running answers ("hot") or only later ones ("pin")'
    )
    drain_s: Positive = Field(8.0, description="how long SIGTERM waits for running answers")


class CacheSettings(Section):
    """The paged K/V cache."""

    page_size: Count = Field(16, description="tokens of one page")
    memory_mb: int = Field(0, ge=0, description="bytes of K/V pages / 2^20; 0: derived from free memory")
    prefix_sharing: bool = Field(True, description="reuse pages of equal prompt prefixes")
    share_across: Literal["all", "user"] = Field(
        "all", description="whose prefixes one may reuse; user: only one's own, so that nobody can time another's"
    )
    spill: Literal["auto", "off", "host", "disk"] = Field(
        "auto", description="where evicted prefixes go; auto: to pinned memory from a discrete GPU, else nowhere"
    )
    spill_mb: Count = Field(2048, description="most memory or disk of spilled prefixes / 2^20")
    pruning: Literal["off", "auto", "on"] = Field(
        "auto", description="of long answers' old K/V: auto only where memory is short, as it costs accuracy"
    )
    pruned_tokens: Count = Field(
        512, description="old tokens that a KV head keeps, on the mean: C_total of MACE 4.3 / KV heads"
    )
    prune_recent: Count = Field(128, description="latest tokens, which every head keeps")
    prune_window: Count = Field(256, description="W of MACE 4.3: tokens unused for so many iterations go first")
    prune_norm: float = Field(
        0.0, ge=0.0, description="tau of MACE 4.3: a head whose output's mean L2 norm is below it keeps one page"
    )


class SchedulerSettings(Section):
    """MACE's priorities and packing; most follow from `finetune_max_wait_s`."""

    policy: str = Field(
        "mace", description="mace, a baseline or an ablation: see docs/policies.md; fcfs never fine-tunes"
    )
    profile: str = Field("", description="the device's measured prices, by edged profile; empty: the data folder's own")
    plan_ahead: Literal["auto", "on", "off"] = Field(
        "auto", description="plan the next iteration while the present one runs; auto: on CUDA"
    )
    finetune_max_wait_s: Positive = Field(5.0, description="longest time that serving may starve fine-tuning")
    finetune_min_share: Share = Field(0.05, description="share of time that fine-tuning keeps under overload")
    idle_quantum_ms: Positive = Field(50.0, description="fine-tuning per iteration when nothing is served")
    ttft_factor: Positive = Field(5.0, description="TTFT target over the prompt's own forward latency")
    ttft_floor_ms: Positive = Field(200.0, description="TTFT targets are never tighter than this")
    tbt_factor: Positive = Field(2.0, description="TBT target over the decode latency of the batch without fine-tuning")
    tbt_floor_ms: Positive = Field(50.0, description="TBT targets are never tighter than this")
    batch_ttft_factor: Positive = Field(50.0, description="ttft_factor of requests of the batch class")
    batch_ttft_floor_ms: Positive = Field(5000.0, description="ttft_floor_ms of requests of the batch class")
    batch_tbt_factor: Positive = Field(10.0, description="tbt_factor of requests of the batch class")
    batch_tbt_floor_ms: Positive = Field(500.0, description="tbt_floor_ms of requests of the batch class")
    tbt_slowdown: Annotated[float, Field(ge=1.0)] = Field(
        1.05,
        description="mean time between tokens beside fine-tuning, over that of serving alone, before its min share",
    )
    lambda_memory: float = Field(1.0, ge=0.0, description="lambda1 of MACE 4.2: weight of unused memory")
    lambda_latency: float = Field(1.0, ge=0.0, description="lambda2 of MACE 4.2: weight of latency mismatch")
    gamma: float = Field(0.1, ge=0.0, description="gamma of MACE 4.1: weight of the DPO loss in a priority")
    tau_memory: Share = Field(0.95, description="tau_mem of Algorithm 1: share of pages at which a bin closes")
    tau_tasks: Count = Field(256, description="tau_task of Algorithm 1: tasks looked at in one decision")
    retrain_every_s: Positive = Field(30.0, description="ekya, periodic-async: interval at which fine-tuning is due")
    retrain_window_s: float = Field(
        0.0, ge=0.0, description="ekya: longest that fine-tuning stops serving; 0: half of retrain_every_s"
    )
    fixed_requests: Count = Field(50, description="mace-bin: most sequences of an iteration that serves")
    fixed_steps: Count = Field(2, description="mace-bin: most fine-tune steps of an iteration that learns")

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("policies")
        if known and policy not in known:
            raise PydanticCustomError("literal_error", "it must be {expected}", {"expected": str(list(known))})
        return policy

    @field_validator("retrain_window_s")
    @classmethod
    def _leaves_time_to_serve(cls, window_s: float, info: ValidationInfo) -> float:
        every_s = info.data.get("retrain_every_s", math.inf)
        if window_s >= every_s:
            raise PydanticCustomError(
                "window",
                "it must be shorter than retrain_every_s ({every_s} s), or nothing is ever served",
                {"every_s": every_s},
            )
        return window_s


class AlignSettings(Section):
    """Preference learning: DPO on LoRA."""

    enabled: bool = Field(True, description="train on feedback; off: feedback is only stored")
    beta: Positive = Field(0.5, description="DPO's temperature: the larger, the nearer an adapter stays to the base")
    loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="DPO (Rafailov et al.) or IPO (Azar et al.)")
    sft_weight: float = Field(
        1.0, ge=0.0, description="weight of the chosen answer's NLL per token beside the preference loss (RPO)"
    )
    learning_rate: Positive = Field(
        5e-4, description="AdamW's step size; less for steps of less than micro_batch_pairs"
    )
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW's weight decay")
    max_grad_norm: Positive = Field(1.0, description="gradients are clipped to this L2 norm")
    rank: Count = Field(16, description="LoRA rank")
    alpha: Positive = Field(32.0, description="LoRA alpha; the update is scaled by alpha / rank")
    target_modules: str | list[str] = Field("all-linear", description="PEFT's target_modules")
    epochs: Count = Field(1, description="times that a pair is trained on")
    micro_batch_pairs: Count = Field(4, description="pairs of one optimizer step")
    replay_share: Share = Field(0.25, description="older pairs added to a step, as a share of its new pairs")
    loss_threshold: float = Field(0.05, ge=0.0, description="a pair whose loss is below it is learnt (CheckEnd)")
    window_tokens: Count = Field(256, description="tokens of one backward unit")
    keep_graph: bool = Field(
        True, description="where memory allows, a step keeps its graph: no layer is computed twice"
    )
    joint_adapters: Count = Field(
        4, description="adapters whose pairs share a step's work, where they fit into window_tokens; 1: none do"
    )
    max_pair_tokens: Annotated[int, Field(ge=16)] = Field(1024, description="longer pairs keep the prompt's end")
    max_loaded_adapters: Count = Field(64, description="adapters kept in memory when idle; others are read from disk")
    max_active_adapters: Count = Field(32, description="adapters held in the model at once")


class FeedbackSettings(Section):
    """How much each kind of feedback counts, and what of it is held back."""

    weight_pair: Share = Field(1.0, description="of explicit pairs, times what each came with; 0: not learned from")
    weight_chosen: Share = Field(1.0, description="of a choice between candidates")
    weight_edit: Share = Field(1.0, description="of an edited answer over the original")
    weight_regenerate: Share = Field(1.0, description="of an answer that was regenerated, and of the one accepted then")
    weight_thumbs: Share = Field(1.0, description="of up, down and rejected")
    weight_rephrase: Share = Field(0.5, description="of what the next turn shows: a rephrasing or correction")
    weight_dwell: Share = Field(0.5, description="of reading time")
    weight_skip: Share = Field(0.5, description="of a skipped answer")
    pairs_per_hour: int = Field(
        1000, ge=0, description="a user's pairs that are trained on per hour, others wait; 0: no limit"
    )
    quarantine: bool = Field(True, description="keep pairs that look poisoned out of training until somebody decides")
    suspicious_deviations: Positive = Field(
        6.0,
        description="deviations of the loss above the adapter's median: counts for a burst; twice as many: left out",
    )
    burst_share: Share = Field(
        0.5, description="share of suspicious ones among 8 pairs that quarantines them and those that follow"
    )
    alarm_s: Positive = Field(3600.0, description="how long a burst has a user's new pairs quarantined, unless decided")


class GuardSettings(Section):
    """When a version is taken back by itself."""

    held_out_share: Share = Field(0.1, description="share of pairs kept out of training as a test")
    held_out_pairs: Annotated[int, Field(ge=0)] = Field(16, description="most held-out pairs per user")
    held_out_age: Count = Field(200, description="a user's pairs after which a held-out one is trained on instead")
    min_pairs: Count = Field(4, description="held-out pairs needed before the guard judges")
    evaluate_every: Count = Field(8, description="versions between two tests while pairs keep coming")
    max_accuracy_drop: Share = Field(0.34, description="held-out reward accuracy lost against the best version")
    max_kl_nats: Positive = Field(0.5, description="KL to the base per held-out answer token, in nats")
    max_nll_change: Positive = Field(0.1, description="NLL of neutral text over the base's: 0.1 is 10 % more")


class GovernorSettings(Section):
    """What edged gives up for its neighbours, for heat and for power."""

    enabled: bool = Field(True, description="follow the box's memory, temperature and power; off: they are only shown")
    memory_reserve_mb: int = Field(
        0, ge=0, description="memory that the box is to have free for others / 2^20; 0: a twentieth, 256 to 2048"
    )
    pressure_percent: Annotated[float, Field(ge=1.0, le=100.0)] = Field(
        10.0, description="share of time that tasks wait for memory (PSI) from which memory counts as short"
    )
    temperature_limit_c: float = Field(
        0.0, ge=0.0, description="temperature that is not to be reached; 0: where the sensors say that parts slow down"
    )
    temperature_margin_c: Positive = Field(
        10.0, description="so far below the limit fine-tuning begins to give way; nearer, it pauses"
    )
    on_battery: Literal["pause", "slow", "ignore"] = Field("pause", description="fine-tuning while on battery")
    quiet_hours: str = Field("", description='no fine-tuning then, local time, such as "22:00-06:00"; empty: none')

    @field_validator("quiet_hours")
    @classmethod
    def _are_hours(cls, hours: str) -> str:
        minutes_of(hours)
        return hours


def minutes_of(hours: str) -> tuple[int, int] | None:
    """(first, end) minute of the day of hours such as "22:00-06:00"; None for "". PydanticCustomError otherwise."""
    if not hours:
        return None
    found = _HOURS.fullmatch(hours.strip())
    first, end = (60 * int(found[n]) + int(found[n + 1]) for n in (1, 3)) if found else (0, 0)
    if first == end:
        raise PydanticCustomError("hours", 'write two times of the day such as "22:00-06:00", or "" for none')
    return first, end


class ApiSettings(Section):
    """The socket."""

    socket: str = Field("", description="Unix socket; empty: EDGED_SOCKET, then the runtime folders")
    listen: str = Field("", description="HOST:PORT of an additional TCP listener; empty: none")
    token: str = Field("", description="an admin's token over TCP, in clear; of those in [access] a hash is kept")
    socket_mode: Literal["0600", "0660", "0666"] = Field(
        "0660", description="who may open the Unix socket: its owner, its group too, everybody; [access] says for what"
    )
    max_body_kb: Count = Field(1024, description="largest request body in KiB")
    max_stop_chars: Count = Field(1024, description="longest stop string")
    max_logprobs: Count = Field(
        131_072, description="log-probabilities of an answer that is no stream: n x max_tokens x (1 + alternatives)"
    )


class StoreSettings(Section):
    """What is kept on disk."""

    data_dir: str = Field("", description="folder of database and adapters; empty: STATE_DIRECTORY or XDG data home")
    new_base: Literal["refuse", "shelve", "learn"] = Field(
        "refuse",
        description="where another base model was taught in this folder: refuse to start; shelve what was learned until"
        " that one is served again; shelve it and learn its pairs anew",
    )
    keep_completions: Count = Field(100_000, description="completions kept; feedback's own stay")
    keep_samples: Count = Field(20_000, description="iteration samples kept")
    keep_days: float = Field(
        90.0, ge=0.0, description="age at which completions, samples and old versions' records go, in days; 0: never"
    )
    keep_feedback_days: float = Field(
        0.0, ge=0.0, description="age at which signals and pairs that are done with go, in days; 0: never"
    )
    max_database_mb: int = Field(
        4096, ge=0, description="size from which the oldest completions without feedback go / 2^20; 0: any"
    )
    keep_versions: Count = Field(
        5, description="adapter versions kept on disk per user, beside the newest that passed its test"
    )
    save_every_s: Positive = Field(5.0, description="shortest time between two saves of one adapter")


class LogSettings(Section):
    """What the daemon says on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug has a line for every request; info only for those that failed or were slow"
    )
    format: Literal["auto", "human", "json"] = Field("auto", description="auto: JSON lines under systemd, else plain")
    slow_ttft_s: Positive = Field(10.0, description="a request whose first token took longer is a warning")


class MetricsSettings(Section):
    """What `GET /metrics` shows."""

    adapters: int = Field(
        20, ge=0, description="adapters shown by name, the latest active; the rest is summed as other"
    )
