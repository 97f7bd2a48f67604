"""Typed settings of edged: what can be set, section by section (`[access]` and `[limits]` are in
`edged.settings.access`, `[fairness]` in `edged.settings.fairness`), and how it is read: a TOML file, the environment
and flags, in rising order of precedence.
"""

import logging
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from edged.settings.access import USER_NAME as USER_NAME
from edged.settings.access import AccessSettings as AccessSettings
from edged.settings.access import LimitSettings as LimitSettings
from edged.settings.access import Section, setting
from edged.settings.by_user import ByUser, from_the_environment
from edged.settings.fairness import FairnessSettings as FairnessSettings
from edged.settings.federated import FederatedSettings as FederatedSettings
from edged.settings.fleet import NODE_NAME
from edged.settings.fleet import FleetSettings as FleetSettings
from edged.settings.jobs import JobSettings as JobSettings
from edged.settings.starts import StartSettings as StartSettings
from edged.settings.wrong import demand, nearest

log = logging.getLogger("edged.settings")

SECRET_SETTINGS = ("api.token", "access.tokens")
"""Settings whose values are in no message, no log and no backup."""
RENAMED = {
    "align.idle_passes": "align.practice",
    "align.idle_replay": "align.practice",
    "cache.spill": "cache.offload",
    "cache.spill_mb": "cache.offload_mb",
    "model.short_layers": "model.cpu_kernels",
    "model.narrow_weights": "model.fp16_weights",
    "align.keep_graph": "align.recompute",
}
"""Former names of settings, which are read with a line in the log, and their names now."""
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]):([0-5]\d)")

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
WordsPerS = Annotated[float, Field(ge=0.5, le=60.0)]


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of bounds; the message names it and the way out."""


TEMPLATE_OWN = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "padding"),
        *("continue_final_message", "tokenize", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token"),
    }
)
"""Names of chat templates' arguments that edged, or the model's own files, give: nobody else may."""
TemplateArguments = Annotated[dict[str, str | int | float | bool], BeforeValidator(from_the_environment)]


class ModelSettings(Section):
    """Which model is served."""

    path: str = setting("demo", 'directory of save_pretrained, hub name, or "demo" (embedded)')
    revision: str = setting("", "branch, tag or commit of a hub name; a commit never changes; empty: main")
    name: str = setting("", "name in the API; empty: the directory's name")
    device: str = setting("auto", '"auto", "cpu", "cuda" or "cuda:N"')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "auto: bfloat16 on CUDA, float32 on CPU")
    quantize: Literal["", "nf4", "llm-int8", "int8", "int4"] = setting(
        "", "quantize plain weights, FP8 and MXFP4 while loading: nf4, llm-int8 (bitsandbytes), int8, int4 (torchao)"
    )
    threads: int = setting(0, "CPU threads of an operation; 0: 1 for small models, else cores that others leave", ge=0)
    pack_weights: bool = setting(True, "CPU, float32: a packed copy of the weights, for prompts and larger batches")
    cpu_kernels: bool = setting(True, "CPU, float32: few tokens pass products, layers and states by compiled kernels")
    fp16_weights: bool = setting(
        True,
        "CPU, float32: few tokens read weights that are 16-bit numbers from a copy of half the size; the"
        " results are the same (beside pack_weights and cpu_kernels)",
    )
    decode_attention: Literal["auto", "padded", "ragged", "native", "triton"] = setting(
        "auto", "native, ragged (CPU) and triton (CUDA) read K/V in place; padded copies it"
    )
    prefill_attention: Literal["auto", "gathered", "triton"] = setting(
        "auto", "triton (CUDA) reads the K/V before a chunk in place; gathered copies it"
    )
    lora_kernel: Literal["auto", "torch", "native", "triton"] = setting(
        "auto", "native (CPU, float32; beside cpu_kernels) and triton (CUDA) add all adapters' updates at once"
    )
    fused_layers: bool = setting(
        True, "CUDA: decodes pass common layers and states with few launches, by merged products and Triton's kernels"
    )
    graph_memory_mb: int = setting(512, "CUDA: most memory of captured decode graphs / 2^20; 0: none is captured", ge=0)
    keep_freed_memory: bool = setting(True, "CPU: keep freed memory for the next iteration; given back when idle")
    huge_pages: bool = setting(True, "CPU: weights in huge pages; edged serve starts itself again to have them")
    max_context_tokens: int = setting(0, "longest prompt plus answer; 0: what fits model and cache", ge=0)
    trust_remote_code: bool = setting(
        False, "run Python code that came with the model, with all of edged's rights; off: it is refused"
    )
    chat_template_kwargs: TemplateArguments = setting(
        {}, "arguments of the chat template where a request names no others, such as { enable_thinking = false }"
    )
    response_template: str = setting(
        "",
        "JSON file, as transformers describes it, by which calls and reasoning are read; empty: a known one that fits",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(TEMPLATE_OWN & arguments.keys()):
            raise PydanticCustomError("own", "{name} is edged's own to give: leave it out", {"name": own[0]})
        return arguments


class ServingSettings(Section):
    """How requests are batched."""

    max_sequences: Count = setting(64, "sequences that run at once; others wait")
    max_queue: Count = setting(1024, "requests that may wait; beyond it the API answers 429")
    max_batch_tokens: int = setting(1024, "tokens of one iteration's forward", ge=16)
    default_max_tokens: Count = setting(512, "answer length when the request names none")
    best_of: str = setting(
        "auto",
        "answers that a user's taste model chooses from: auto (4, once it is sure), off, or a number; drawn in room"
        " that nothing else needs; off and 1 also make no edits",
        pattern=r"auto|off|[1-9]\d?",
    )
    prompt_lookup: bool = setting(
        True, "tokens that followed the latest ones before are tried beside them, in room below the knee; same answers"
    )
    on_update: Literal["hot", "pin"] = setting(
        "hot", 'a new version reaches running answers ("hot") or only later ones ("pin")'
    )
    drain_s: Positive = setting(8.0, "how long SIGTERM waits for running answers")
    exit_when_idle_s: float = setting(
        0.0,
        "with systemd's sockets alone: end after so long without a request, once all is learned; the next starts the"
        " daemon again; 0: never",
        ge=0.0,
    )

    @property
    def by_taste(self) -> bool:
        """Whether answers are chosen, and edited, by their users' tastes."""
        return self.best_of not in ("off", "1")


class CacheSettings(Section):
    """The paged K/V cache."""

    page_size: Count = setting(16, "tokens of one page")
    memory_mb: int = setting(0, "bytes of K/V pages / 2^20; 0: derived from free memory", ge=0)
    prefix_sharing: bool = setting(True, "reuse pages of equal prompt prefixes")
    copy_states_every: Count = setting(64, "tokens of an answer until what layers keep of it is copied for a next turn")
    share_across: Literal["all", "user"] = setting(
        "all", "whose prefixes one may reuse; user: only one's own, so that nobody can time another's"
    )
    offload: Literal["auto", "off", "host", "disk"] = setting(
        "auto", "where evicted prefixes go; auto: to pinned memory from a discrete GPU, else nowhere"
    )
    offload_mb: Count = setting(2048, "most memory or disk of offloaded prefixes / 2^20")
    pruning: Literal["off", "auto", "on"] = setting(
        "auto", "of long answers' old K/V: auto only where memory is short, as it costs accuracy"
    )
    pruned_tokens: Count = setting(512, "old tokens that a KV head keeps, on the mean: C_total of MACE 4.3 / KV heads")
    prune_recent: Count = setting(128, "latest tokens, which every head keeps")
    prune_window: Count = setting(256, "W of MACE 4.3: tokens unused for so many iterations go first")
    prune_norm: float = setting(0.0, "tau of MACE 4.3: a head whose output's mean L2 norm is less keeps a page", ge=0.0)


class SchedulerSettings(Section):
    """MACE's priorities and packing; most follow from `finetune_max_wait_s`."""

    policy: str = setting("mace", "mace, a baseline or an ablation: see docs/policies.md; fcfs never fine-tunes")
    profile: str = setting("", "the device's measured prices, by edged profile; empty: the data folder's own")
    plan_ahead: Literal["auto", "on", "off"] = setting("auto", "plan the next iteration while one runs; auto: on CUDA")
    finetune_max_wait_s: Positive = setting(30.0, "longest time that serving may starve fine-tuning")
    finetune_min_share: Share = setting(0.05, "share of time that fine-tuning keeps under overload")
    idle_quantum_ms: Positive = setting(50.0, "fine-tuning per iteration when nothing is served")
    ttft_factor: Positive = setting(5.0, "TTFT target over the prompt's own forward latency")
    ttft_floor_ms: Positive = setting(200.0, "TTFT targets are never tighter than this")
    refuse_ttft_factor: float = setting(
        0.0, "requests are refused whose TTFT is predicted to be more than this many targets; 0: none are", ge=0.0
    )
    tbt_factor: Positive = setting(2.0, "TBT target over the decode latency of the batch without fine-tuning")
    tbt_floor_ms: Positive = setting(50.0, "TBT targets are never tighter than this")
    batch_ttft_factor: Positive = setting(50.0, "ttft_factor of requests of the batch class")
    batch_ttft_floor_ms: Positive = setting(5000.0, "ttft_floor_ms of requests of the batch class")
    batch_tbt_factor: Positive = setting(10.0, "tbt_factor of requests of the batch class")
    batch_tbt_floor_ms: Positive = setting(500.0, "tbt_floor_ms of requests of the batch class")
    tbt_slowdown: float = setting(
        1.05,
        "mean time between tokens beside fine-tuning, over that of serving alone, before its min share",
        ge=1.0,
        le=100.0,
    )
    reader_reserve_s: float = setting(
        2.0, "text that readers keep in hand, in seconds of reading, beside prompts and fine-tuning", ge=0.0
    )
    reader_horizon_s: Positive = setting(10.0, "andes: span over which it is told what serving a reader gains")
    lambda_memory: float = setting(1.0, "lambda1 of MACE 4.2: weight of unused memory", ge=0.0)
    lambda_latency: float = setting(1.0, "lambda2 of MACE 4.2: weight of latency mismatch", ge=0.0)
    gamma: float = setting(0.1, "gamma of MACE 4.1: weight of the DPO loss in a priority", ge=0.0)
    tau_memory: Share = setting(0.95, "tau_mem of Algorithm 1: share of pages at which a bin closes")
    tau_tasks: Count = setting(256, "tau_task of Algorithm 1: tasks looked at in one decision")
    retrain_every_s: Positive = setting(30.0, "ekya, periodic-async: interval at which fine-tuning is due")
    retrain_window_s: float = setting(0.0, "ekya: how long training may stop serving; 0: half retrain_every_s", ge=0.0)
    temporal_every: Count = setting(128, "temporal: iterations that serve between two groups of pairs")
    slo_ms: float = setting(0.0, "flexllm: longest iteration; 0: the least TBT target of those who are served", ge=0.0)

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
            message = "it must be shorter than retrain_every_s ({every_s} s), or nothing is ever served"
            raise PydanticCustomError("window", message, {"every_s": every_s})
        return window_s


class ReadingSettings(Section):
    """The readers of answers that are streamed, where a request says nothing of its own."""

    words_per_s: WordsPerS = setting(6.0, "words that a reader takes in a second")
    users: ByUser[WordsPerS] = setting({}, 'words a second of users, such as { ann = 4.0, "camera*" = 10.0 }')
    learn: bool = setting(True, "learn other users' words a second from their dwell signals")
    ttft_ms: float = setting(1000.0, "time to the first token that is no wait for a reader", ge=0.0)


class AlignSettings(Section):
    """Preference learning: DPO, or another loss, on LoRA."""

    enabled: bool = setting(True, "train on feedback; off: feedback is only stored")
    beta: Positive = setting(0.5, "DPO's temperature: the larger, the nearer an adapter stays to the base")
    loss: Literal["sigmoid", "ipo", "simpo", "orpo", "sft", "dft"] = setting(
        "sigmoid", "DPO (sigmoid), IPO, SimPO, ORPO; sft, dft: the chosen answer's NLL alone"
    )
    unpaired: Literal["off", "apo", "kto"] = setting(
        "apo", "loss of a rating without an opposite one, by who teaches: APO-zero or KTO; off: it waits"
    )
    label_smoothing: float = setting(0.0, "sigmoid, simpo: share of pairs taken to say the opposite", ge=0.0, le=0.5)
    simpo_gamma: float = setting(0.5, "simpo: margin that is wanted between the answers", ge=0.0)
    sft_weight: float = setting(
        1.0, "sigmoid, ipo, simpo: weight of the chosen answer's NLL per token beside preference loss (RPO)", ge=0.0
    )
    learning_rate: Positive = setting(5e-4, "AdamW's step size; less for steps of less than micro_batch_pairs")
    weight_decay: float = setting(0.0, "AdamW's weight decay", ge=0.0)
    max_grad_norm: Positive = setting(1.0, "gradients are clipped to this L2 norm")
    rank: Count = setting(16, "LoRA rank")
    alpha: Positive = setting(32.0, "LoRA alpha; the update is scaled by alpha / rank")
    target_modules: str | list[str] = setting("all-linear", "PEFT's target_modules")
    kl_budget: Positive = setting(
        0.3, "most KL to the base, in nats a token of an adapter's own answers, that practice goes to"
    )
    epochs: Count = setting(1, "times that a pair is trained on")
    practice: bool = setting(
        True, "learn further from answers that an adapter draws in spare time, as its user's taste model judges them"
    )
    micro_batch_pairs: Count = setting(4, "pairs of one optimizer step")
    accumulate_s: float = setting(
        0.0, "how long pairs wait until a step has micro_batch_pairs, unless its user asks for an answer", ge=0.0
    )
    replay_share: Share = setting(0.25, "older pairs added to a step, as a share of its new pairs")
    loss_threshold: float = setting(0.05, "a pair whose loss is below it has converged (CheckEnd)", ge=0.0)
    window_tokens: Count = setting(256, "tokens of one backward unit")
    recompute: Literal["auto", "full", "selective", "none"] = setting(
        "auto", "in a step's backward, of its forward: full, what is cheap, nothing; auto: the least that memory allows"
    )
    fill_ahead: bool = setting(True, "flexllm: where memory allows, a step's next pairs are computed beside its units")
    joint_adapters: Count = setting(4, "adapters whose pairs share a step, where they fit into window_tokens; 1: none")
    max_pair_tokens: int = setting(
        1024, "longer pairs keep the prompt's end; texts of over 32 characters a token are refused", ge=16
    )
    max_loaded_adapters: Count = setting(64, "adapters kept in memory when idle; others are read from disk")
    max_active_adapters: Count = setting(32, "adapters held in the model at once")

    @field_validator("practice", mode="before")
    @classmethod
    def _was_a_number(cls, value: Any) -> Any:
        return value if isinstance(value, bool) or not str(value).isdigit() else int(value) > 0

    @field_validator("recompute", mode="before")
    @classmethod
    def _was_a_switch(cls, value: Any) -> Any:
        former = dict.fromkeys(("true", "1", "yes", "on", "y", "t"), "auto")
        former |= dict.fromkeys(("false", "0", "no", "off", "n", "f", "inputs"), "full")
        former |= {"lean": "selective", "graph": "none"}
        return former.get(str(value).lower(), value)


class FeedbackSettings(Section):
    """How much each kind of feedback counts, and what of it is held back."""

    weight_pair: Share = setting(1.0, "of explicit pairs, times what each came with; 0: not learned from")
    weight_chosen: Share = setting(1.0, "of a choice between candidates")
    weight_edit: Share = setting(1.0, "of an edited answer over the original")
    weight_regenerate: Share = setting(1.0, "of an answer that was regenerated, and of the one accepted then")
    weight_thumbs: Share = setting(1.0, "of up, down and rejected")
    weight_rephrase: Share = setting(0.5, "of what the next turn shows: a rephrasing or correction")
    weight_dwell: Share = setting(0.5, "of reading time")
    weight_skip: Share = setting(0.5, "of a skipped answer")
    pairs_per_hour: int = setting(1000, "a user's pairs that are trained on per hour, others wait; 0: no limit", ge=0)
    quarantine: bool = setting(True, "keep pairs that look poisoned out of training until somebody decides")
    suspicious_deviations: Positive = setting(
        6.0, "deviations of the loss above the adapter's median: counts for a burst; twice as many: left out"
    )
    burst_share: Share = setting(0.5, "share of suspicious pairs among 8 that quarantines them and those that follow")
    alarm_s: Positive = setting(3600.0, "how long a burst has a user's new pairs quarantined, unless decided")


class GuardSettings(Section):
    """Tests of versions, and the bounds beyond which one is taken back."""

    held_out_share: Share = setting(0.1, "share of pairs kept out of training as a test")
    held_out_pairs: int = setting(16, "most held-out pairs per user", ge=0)
    held_out_age: Count = setting(200, "a user's pairs after which a held-out one is trained on instead")
    min_pairs: Count = setting(4, "held-out pairs needed before the guard judges")
    evaluate_every: Count = setting(8, "versions between two tests while pairs keep coming")
    max_accuracy_drop: Share = setting(0.34, "held-out reward accuracy lost against the best version")
    max_kl_nats: Positive = setting(0.5, "KL to the base per held-out answer token, in nats")
    max_nll_change: Positive = setting(0.1, "NLL of neutral text over the base's: 0.1 is 10 % more")


class GovernorSettings(Section):
    """The governors: memory, work and power that edged gives up for others."""

    enabled: bool = setting(True, "follow the box's memory, temperature and power; off: they are only shown")
    memory_reserve_mb: int = setting(0, "memory to leave free for others / 2^20; 0: a twentieth, 256 to 2048", ge=0)
    pressure_percent: float = setting(
        10.0, "share of time that tasks wait for memory (PSI) from which memory counts as short", ge=1.0, le=100.0
    )
    temperature_limit_c: float = setting(
        0.0, "temperature that is not to be reached; 0: where the sensors say that parts slow down", ge=0.0
    )
    temperature_margin_c: Positive = setting(10.0, "so far below the limit fine-tuning slows down; nearer, it pauses")
    on_battery: Literal["pause", "slow", "ignore"] = setting("pause", "fine-tuning while on battery")
    quiet_hours: str = setting("", 'no fine-tuning then, local time, such as "22:00-06:00"; empty: none')

    @field_validator("quiet_hours")
    @classmethod
    def _are_hours(cls, hours: str) -> str:
        minutes_of(hours)
        return hours


def minutes_of(hours: str) -> tuple[int, int] | None:
    """Return (first, end) minute of the day of hours like "22:00-06:00"; None for "". Raises PydanticCustomError."""
    if not hours:
        return None
    found = _HOURS.fullmatch(hours.strip())
    first, end = (60 * int(found[n]) + int(found[n + 1]) for n in (1, 3)) if found else (0, 0)
    if first == end:
        raise PydanticCustomError("hours", 'write two times of the day such as "22:00-06:00", or "" for none')
    return first, end


_ORIGIN = r"^[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+$"
"""A site as browsers write it: without a path, in small letters."""


class ApiSettings(Section):
    """The socket."""

    socket: str = setting("", "Unix socket; empty: EDGED_SOCKET, then the runtime folders")
    listen: str = setting("", "HOST:PORT of an additional TCP listener; empty: none")
    node: str = setting("", "this box's name in a fleet, in the ids of its answers", pattern=rf"({NODE_NAME.pattern})?")
    certificate: str = setting("", "certificate chain (PEM) of TCP listeners, beside api.key; empty: no TLS")
    key: str = setting("", "private key (PEM) of api.certificate, in a file that only edged's account may read")
    authority: str = setting("", "certificates (PEM) one of which must have signed a TCP client's; empty: no client's")
    token: str = setting("", "an admin's token over TCP, in clear; of those in [access] a hash is kept")
    socket_mode: Literal["0600", "0660", "0666"] = setting(
        "0660", "who may open the Unix socket: its owner, its group too, everybody; [access] says for what"
    )
    browser_origins: list[Annotated[str, StringConstraints(pattern=_ORIGIN)]] = setting(
        [], 'sites whose web pages may use edged, such as "https://chat.example" or "app://obsidian.md"'
    )
    max_body_kb: Count = setting(1024, "largest request body in KiB")
    tools_without_template: Literal["ignore", "refuse"] = setting(
        "ignore", "tools that the model's chat template cannot write: answer without them and say so, or 400"
    )
    task_header: str = setting(
        "X-Edged-Task",
        "header that marks a background task, such as a chat's title: batch class, never kept or learned from;"
        " empty: none",
        pattern=r"[A-Za-z0-9-]{0,64}",
    )
    max_stop_chars: Count = setting(1024, "longest stop string")
    max_schema_kb: int = setting(64, "largest schema or grammar of an answer in KiB", ge=1, le=512)
    max_logprobs: Count = setting(
        131_072, "log-probabilities of an answer that is no stream: n x max_tokens x (1 + alternatives)"
    )


class StoreSettings(Section):
    """The data on disk, and how long it is kept."""

    data_dir: str = setting("", "folder of database and adapters; empty: STATE_DIRECTORY or XDG data home")
    new_base: Literal["refuse", "shelve", "learn"] = setting(
        "refuse",
        "where another base model was taught in this folder: refuse to start; shelve what was learned until"
        " that one is served again; shelve it and learn its pairs anew",
    )
    keep_completions: Count = setting(100_000, "completions kept; feedback's own stay")
    keep_samples: Count = setting(20_000, "iteration samples kept")
    keep_days: float = setting(90.0, "days until completions, samples and old versions' records go; 0: never", ge=0.0)
    keep_feedback_days: float = setting(0.0, "days until signals and pairs that are done with go; 0: never", ge=0.0)
    max_database_mb: int = setting(4096, "size / 2^20 at which oldest completions without feedback go; 0: any", ge=0)
    keep_versions: Count = setting(5, "adapter versions kept on disk per user, beside the newest that passed its test")
    save_every_s: Positive = setting(5.0, "shortest time between two saves of one adapter")


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "debug has a line for every request; info only for those that failed or were slow"
    )
    format: Literal["auto", "human", "json"] = setting("auto", "auto: JSON lines under systemd, else plain")
    slow_ttft_s: Positive = setting(10.0, "a request whose first token took longer is a warning")


class MetricsSettings(Section):
    """The contents of `GET /metrics`."""

    adapters: int = setting(20, "adapters shown by name, the latest active; the rest is summed as other", ge=0)


class Settings(Section):
    """All settings of one daemon."""

    model: ModelSettings = ModelSettings()
    serving: ServingSettings = ServingSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    fairness: FairnessSettings = FairnessSettings()
    reading: ReadingSettings = ReadingSettings()
    align: AlignSettings = AlignSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    guard: GuardSettings = GuardSettings()
    starts: StartSettings = StartSettings()
    federated: FederatedSettings = FederatedSettings()
    jobs: JobSettings = JobSettings()
    governor: GovernorSettings = GovernorSettings()
    api: ApiSettings = ApiSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    store: StoreSettings = StoreSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    fleet: FleetSettings = FleetSettings()


def load_settings(
    path: str | Path | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    policies: Collection[str] = (),
) -> Settings:
    """Read settings from a TOML file, then `EDGED_SECTION__KEY` variables, then dotted `overrides`.

    `scheduler.policy` must be one of `policies`, where they are given: this package does not know them.
    Raises ConfigError that names the file, the key and the nearest valid name.
    """
    values: dict[str, Any] = {}
    source = "settings"
    if path is not None:
        source = str(path)
        try:
            values = tomllib.loads(Path(path).read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigError(f'config file "{path}" does not exist: `edged config init` writes one') from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f'config file "{path}" cannot be read: {error}') from None
    for section, known in values.items():
        if isinstance(known, dict):
            values[section] = {_name_now(f"{section}.{key}").split(".", 1)[1]: value for key, value in known.items()}
    given: dict[str, Any] = {
        name.removeprefix("EDGED_").lower().replace("__", ".", 1): value
        for name, value in sorted((os.environ if environ is None else environ).items())
        if name.startswith("EDGED_") and "__" in name
    }
    given |= {dotted: value for dotted, value in (overrides or {}).items() if value is not None}
    for dotted, value in given.items():
        dotted = _name_now(dotted)
        section, key = dotted.split(".", 1)
        known = values.setdefault(section, {})
        if not isinstance(known, dict):
            shown = "" if _is_secret(section) else f" = {known!r}"
            raise ConfigError(f'{source}: "{section}"{shown} is not a section: write [{section}] above its settings')
        known[key] = value
    try:
        return Settings.model_validate(values, context={"policies": policies})
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _name_now(dotted: str) -> str:
    """Return a setting's name of now, with a line in the log where `dotted` is a former one."""
    if dotted in RENAMED:
        log.warning('setting "%s" is called "%s" now', dotted, RENAMED[dotted])
    return RENAMED.get(dotted, dotted)


def _explain(item: Any) -> str:
    """Return one validation error as a sentence: the dotted name, the value, the way out."""
    where = [str(part) for part in item["loc"]]
    dotted = ".".join(where)
    if item["type"] == "extra_forbidden":
        return f'unknown setting "{dotted}": {nearest(where[-1], _fields_at(where[:-1]))}'
    if item["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f'setting "{dotted}" = {item["input"]!r}: {nearest(str(item["input"]), choices)}'
    # A value that was meant to be a token stays hidden.
    shown = "" if item["type"] == "edged" or _is_secret(dotted) else f" = {item['input']!r}"
    return f'setting "{dotted}"{shown}: {demand(item)}'


def _is_secret(dotted: str) -> bool:
    """Whether a secret is in this setting's value, or may be: it lies under the name, or the name under it."""
    return any(f"{dotted}.".startswith(f"{name}.") or f"{name}.".startswith(f"{dotted}.") for name in SECRET_SETTINGS)


def _fields_at(where: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a section, or of a table in one of its lists."""
    model: Any = Settings
    for part in where:
        if not part.isdigit():
            model = model.model_fields[part].annotation
            model = get_args(model)[0] if get_args(model) else model
    return dict(model.model_fields)
