"""Typed settings of edged: what can be set, section by section (`[access]` and `[limits]` are in
`edged.settings.access`, `[fairness]` in `edged.settings.fairness`), and how it is read: a TOML file, the environment
and flags, in rising order of precedence.
"""

import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

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
from edged.settings.former import MEANINGS, REMOVED, RENAMED
from edged.settings.jobs import JobSettings as JobSettings
from edged.settings.starts import StartSettings as StartSettings
from edged.settings.wrong import demand, nearest

log = logging.getLogger("edged.settings")

SECRET_SETTINGS = ("api.token", "access.tokens")
"""Settings whose values are in no message, no log and no backup."""
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
Arguments = Annotated[dict[str, str | int | float | bool], BeforeValidator(from_the_environment)]


class ModelSettings(Section):
    """Which model is served."""

    path: str = setting("demo", 'directory of save_pretrained, hub name, or "demo" (embedded)')
    revision: str = setting("", "branch, tag or commit of a hub name; a commit never changes; empty: main")
    name: str = setting("", "name in the API; empty: the directory's name")
    device: str = setting("auto", '"auto", "cpu", "cuda" or "cuda:N"')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "auto: bfloat16 on CUDA, float32 on CPU")
    quantize: Literal["", "nf4", "llm-int8", "int8", "int4"] = setting(
        "", "quantize plain weights, FP8, MXFP4, NVFP4 on load: nf4, llm-int8 (bitsandbytes), int8, int4 (torchao)"
    )
    threads: int = setting(0, "CPU threads of an operation; 0: 1 for small models, else cores that others leave", ge=0)
    kernels: Literal["auto", "torch"] = setting(
        "auto", "auto: edged's own kernels and packed weights, where they pass their tests; torch: PyTorch's alone"
    )
    graph_memory_mb: int = setting(512, "CUDA: most memory of captured decode graphs / 2^20; 0: none is captured", ge=0)
    max_context_tokens: int = setting(0, "longest prompt plus answer; 0: what fits model and cache", ge=0)
    trust_remote_code: bool = setting(
        False, "run Python code that came with the model, with all of edged's rights; off: it is refused"
    )
    chat_template_kwargs: Arguments = setting(
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
        "hot", 'a new version reaches running answers and long talks ("hot"), or only later ones, computed anew ("pin")'
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
    share_across: Literal["all", "user", "none"] = setting(
        "all",
        "whose equal prefixes are computed once; user: one's own, so that nobody can time another's; none: no one's",
    )
    offload: Literal["auto", "off", "host", "disk"] = setting(
        "auto", "where evicted prefixes go; auto: to pinned memory from a discrete GPU, else nowhere"
    )
    offload_mb: Count = setting(2048, "most memory or disk of offloaded prefixes / 2^20")
    pruning: Literal["off", "auto", "on"] = setting(
        "auto", "of long answers' old K/V: auto only where memory is short, as it costs accuracy"
    )


class SchedulerSettings(Section):
    """MACE's priorities and packing; most follow from `finetune_max_wait_s`."""

    policy: str = setting("mace", "mace, a baseline or an ablation: see docs/policies.md; fcfs never fine-tunes")
    profile: str = setting("", "the device's measured prices, by edged profile; empty: the data folder's own")
    finetune_max_wait_s: Positive = setting(30.0, "longest time that serving may starve fine-tuning")
    finetune_min_share: Share = setting(0.05, "share of time that fine-tuning keeps under overload")
    ttft_factor: Positive = setting(5.0, "TTFT target over the prompt's own forward latency")
    ttft_floor_ms: Positive = setting(200.0, "TTFT targets are never tighter than this")
    refuse_ttft_factor: float = setting(
        0.0, "requests are refused whose TTFT is predicted to be more than this many targets; 0: none are", ge=0.0
    )
    tbt_factor: Positive = setting(2.0, "TBT target over the decode latency of the batch without fine-tuning")
    tbt_floor_ms: Positive = setting(50.0, "TBT targets are never tighter than this")
    tbt_slowdown: float = setting(
        1.05,
        "mean time between tokens beside fine-tuning, over that of serving alone, before its min share",
        ge=1.0,
        le=100.0,
    )
    options: Arguments = setting({}, "options of the policy, such as { gamma = 0.2 }; those of others are not read")

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("policies")
        if known and policy not in known:
            raise PydanticCustomError("literal_error", "it must be {expected}", {"expected": str(list(known))})
        return policy


class ReadingSettings(Section):
    """The readers of answers that are streamed, where a request says nothing of its own."""

    words_per_s: WordsPerS = setting(6.0, "words that a reader takes in a second")
    users: ByUser[WordsPerS] = setting({}, 'words a second of users, such as { ann = 4.0, "camera*" = 10.0 }')
    learn: bool = setting(True, "learn other users' words a second from their dwell signals")


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


class FeedbackWeights(Section):
    """How much each kind of feedback counts, from 0, not learned from, to 1."""

    pair: Share = setting(1.0, "of explicit pairs, times what each came with; 0: not learned from")
    chosen: Share = setting(1.0, "of a choice between candidates")
    edit: Share = setting(1.0, "of an edited answer over the original")
    regenerate: Share = setting(1.0, "of an answer that was regenerated, and of the one accepted then")
    thumbs: Share = setting(1.0, "of up, down and rejected")
    rephrase: Share = setting(0.5, "of what the next turn shows: a rephrasing or correction")
    dwell: Share = setting(0.5, "of reading time")
    skip: Share = setting(0.5, "of a skipped answer")


class FeedbackSettings(Section):
    """How much each kind of feedback counts, and what of it is held back."""

    weights: Annotated[FeedbackWeights, BeforeValidator(from_the_environment)] = setting(
        FeedbackWeights(), "of each kind, such as { skip = 0.0 }; those left out keep their defaults"
    )
    pairs_per_hour: int = setting(1000, "a user's pairs that are trained on per hour, others wait; 0: no limit", ge=0)
    quarantine: bool = setting(True, "keep pairs that look poisoned out of training until somebody decides")


class GuardSettings(Section):
    """Tests of versions, and the bounds beyond which one is taken back."""

    held_out_share: Share = setting(0.1, "share of pairs kept out of training as a test")
    max_kl_nats: Positive = setting(0.5, "KL to the base per held-out answer token, in nats")
    max_nll_change: Positive = setting(0.1, "NLL of neutral text over the base's: 0.1 is 10 % more")


class GovernorSettings(Section):
    """The governors: memory, work and power that edged gives up for others."""

    enabled: bool = setting(True, "follow the box's memory, temperature and power; off: they are only shown")
    memory_reserve_mb: int = setting(0, "memory to leave free for others / 2^20; 0: a twentieth, 256 to 2048", ge=0)
    temperature_limit_c: float = setting(
        0.0, "temperature that is not to be reached; 0: where the sensors say that parts slow down", ge=0.0
    )
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


class StoreSettings(Section):
    """The data on disk, and how long it is kept."""

    data_dir: str = setting("", "folder of database and adapters; empty: STATE_DIRECTORY or XDG data home")
    new_base: Literal["refuse", "shelve", "learn"] = setting(
        "refuse",
        "where another base model was taught in this folder: refuse to start; shelve what was learned until"
        " that one is served again; shelve it and learn its pairs anew",
    )
    keep_completions: Count = setting(100_000, "completions kept; feedback's own stay")
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


class HasOptions(Protocol):
    """A policy: its options are a model of what it reads of `scheduler.options`."""

    @property
    def options(self) -> type[Section]:
        """The model."""


def load_settings(
    path: str | Path | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    policies: Mapping[str, HasOptions] | None = None,
) -> Settings:
    """Read settings from a TOML file, then `EDGED_SECTION__KEY` variables, then dotted `overrides`.

    `policies` are those that `scheduler.policy` may name: this package does not know them.
    Raises ConfigError that names the file, the key and the nearest valid name.
    """
    values: dict[str, Any] = {}
    source = "settings"
    if path is not None:
        source = str(path)
        tables = _read(path)
        values |= {name: value for name, value in tables.items() if not isinstance(value, dict)}
        named = {f"{name}.{key}": tables[name][key] for name in tables if name not in values for key in tables[name]}
        _put_all(values, named, source)
    given: dict[str, Any] = {
        name.removeprefix("EDGED_").lower().replace("__", "."): value
        for name, value in sorted((os.environ if environ is None else environ).items())
        if name.startswith("EDGED_") and "__" in name
    }
    given |= {dotted: value for dotted, value in (overrides or {}).items() if value is not None}
    _put_all(values, given, source)
    wrong: list[str] = []
    try:
        settings = Settings.model_validate(values, context={"policies": policies})
        wrong = _wrong_options(settings.scheduler, policies or {})
    except ValidationError as error:
        wrong = [_explain(item) for item in error.errors()]
    if wrong:
        raise ConfigError(f"{source}: " + "; ".join(wrong))
    return settings


def _read(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f'config file "{path}" does not exist: `edged config init` writes one') from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f'config file "{path}" cannot be read: {error}') from None


def _put_all(values: dict[str, Any], named: dict[str, Any], source: str) -> None:
    """Put values into their tables. A former name of one that was there beside it comes last."""
    for dotted in sorted(named, key=MEANINGS.__contains__):
        _put(values, dotted, named[dotted], source)


def _put(values: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Put a value into its tables under its name now, with a line in the log where `dotted` is a former one.

    Raises ConfigError where something else stands in a table's place.
    """
    if dotted in REMOVED:
        log.warning('setting "%s" is no more and was not read: %s', dotted, REMOVED[dotted])
        return
    if dotted in RENAMED:
        log.warning('setting "%s" is called "%s" now', dotted, RENAMED[dotted])
        value = MEANINGS[dotted].get(str(value).lower()) if dotted in MEANINGS else value
        if value is None:
            return
    *tables, key = RENAMED.get(dotted, dotted).split(".")
    for depth, name in enumerate(tables, start=1):
        known = values.setdefault(name, {})
        if isinstance(known, str) and depth > 1:
            # A table from the environment.
            known = values[name] = from_the_environment(known)
        if not isinstance(known, dict):
            section = ".".join(tables[:depth])
            shown = "" if _is_secret(section) else f" = {known!r}"
            raise ConfigError(f'{source}: "{section}"{shown} is not a section: write [{section}] above its settings')
        values = known
    former = values.get(key)
    values[key] = {**former, **value} if isinstance(former, dict) and isinstance(value, dict) else value


def _wrong_options(scheduler: SchedulerSettings, policies: Mapping[str, HasOptions]) -> list[str]:
    """Return what is wrong with the options of the policy: those of other policies may stand beside them."""
    if not policies:
        return []
    own, prefix = policies[scheduler.policy].options, "scheduler.options."
    strange = scheduler.options.keys() - own.model_fields.keys()
    # Former settings are known: no other policy is imported for them.
    strange = {name for name in strange if prefix + name not in RENAMED.values()}
    known = [name for row in policies.values() for name in row.options.model_fields] if strange else []
    wrong = [
        f'unknown setting "{prefix}{name}": {nearest(name, dict.fromkeys(known))}'
        for name in sorted(strange.difference(known))
    ]
    try:
        own.model_validate({name: value for name, value in scheduler.options.items() if name in own.model_fields})
    except ValidationError as error:
        wrong += [_explain({**item, "loc": ("scheduler", "options", *item["loc"])}) for item in error.errors()]
    return wrong


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
