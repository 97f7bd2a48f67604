"""Response bodies as pydantic models, from which the OpenAPI document is generated.

Handlers build them. Completions, whose log-probabilities may be thousands of objects, and the reports of other parts
are plain dicts: `tests/api/test_openapi.py` checks them against their models.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON object that edged answers; it may have more fields than its model, never fewer."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Answer):
    """An error: a sentence, its kind, the field at fault, a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """The answer of every status from 400 on."""

    error: ErrorDetail


class PromptTokenDetails(Answer):
    """How many of the prompt's tokens were found in the KV cache."""

    cached_tokens: int


class CompletionTokenDetails(Answer):
    """How many of the answers' tokens were reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens over all choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenDetails
    completion_tokens_details: CompletionTokenDetails


class TokenAlternative(Answer):
    """A token with its log-probability (natural logarithm) and its bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprobs(TokenAlternative):
    """A sampled token, with the likeliest ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprobs]
    refusal: None


class AnsweredFunction(Answer):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    """A tool that the answer calls."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AssistantMessage(Answer):
    """The answer's text, null where there are calls alone.

    `tool_calls` and `reasoning_content` are there where the answer has them.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] = []
    reasoning_content: str = ""


class ChatChoice(Answer):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class _Completion(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "flex"]
    usage: Usage


class ChatCompletion(_Completion):
    """OpenAI's chat completion. `system_fingerprint` names the weights: ADAPTER@VERSION, or base."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(Answer):
    """Four parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class TextChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(_Completion):
    """OpenAI's text completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(Answer):
    """The base model, or the same with a user's adapter; `max_model_len` is the context in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None
    adapter: str | None


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class FeedbackTaken(Answer):
    """Feedback that is on disk, and the pairs that follow from it."""

    id: str
    object: Literal["feedback"]
    pair_ids: list[int]
    reason: str | None
    duplicate: bool


class PairProgress(Answer):
    """The outcome of a pair: the version that learned it and after how many seconds, or what the pair waits for."""

    pair_id: int
    adapter: str
    state: Literal["queued", "trained", "learnt", "held_out", "quarantined", "skipped"]
    version: int | None
    seconds: float | None
    waits_for: str | None
    text: str


class FeedbackProgress(Answer):
    """The outcome of a feedback. `settled`: every pair has its outcome; `blocked`: none comes by itself."""

    id: str
    object: Literal["feedback.progress"]
    user: str
    reason: str | None
    settled: bool
    blocked: bool
    pairs: list[PairProgress]


class Adapter(Answer):
    """An adapter with its means over pairs, which are None where there are no pairs."""

    adapter: str
    version: int
    pairs_seen: int
    pairs_trained: int
    pairs_queued: int
    pairs_held_out: int
    pairs_quarantined: int
    ratings_queued: int
    held: str
    win_rate: float | None
    clpd: float | None
    reward_accuracy: float | None
    reward_margin: float | None
    loss: float | None
    reward_accuracy_recent_interval: list[float] | None
    win_rate_recent_interval: list[float] | None
    liked: dict[str, dict[str, Any] | None]
    verdict: str
    clpd_per_token_recent: float | None
    chosen_logratio_per_token_recent: float | None
    held_out_kl_nats: float | None
    neutral_nll_change: float | None
    answer_tokens_recent: float | None
    answer_repetition_recent: float | None


class AdapterList(Answer):
    """Every adapter, with `disk_bytes` and `last_used_at`."""

    adapters: list[Adapter]


class AdapterVersion(Answer):
    """One published version; `step_s` is the wall time of the step that made it, in seconds."""

    version: int
    created_at: str
    parent: int
    reason: str
    restored: int | None
    pairs: int
    loss: float | None
    grad_norm: float | None
    step_s: float
    path: str | None
    on_disk: bool
    held_out_reward_accuracy: float | None
    held_out_pairs: int
    kl_nats: float | None
    own_kl_nats: float | None
    neutral_nll_change: float | None
    tested_at: str | None
    problem: str | None
    answer: str | None


class TasteBelief(Answer):
    """A belief of a taste model: `agree` of the `of` signals that tell agree; `key` strikes it."""

    key: str
    text: str
    likes: bool
    agree: int
    of: int


class AdapterDetail(Adapter):
    """One adapter with its versions, newest first, and a row for each of its latest pairs, oldest first.

    `beliefs` and `struck` are for callers that may teach the user; None for others.
    """

    beliefs: list[TasteBelief] | None
    struck: list[str] | None
    versions: list[AdapterVersion]
    series: list[dict[str, Any]]


class StoryEvent(Answer):
    """Something that happened to an adapter, as a sentence; `held_out` is the newest test of these versions, if any."""

    at: str
    kind: Literal["learned", "restored", "made", "skipped", "decided"]
    text: str
    first_version: int | None
    version: int | None
    pairs: int
    sources: dict[str, int]
    held_out: dict[str, Any] | None


class Wait(Answer):
    """Feedback that waits: why, and the one step that settles it."""

    kind: Literal["queued", "held", "unpaired"]
    pairs: int
    text: str
    step: str


class VersionAnswer(Answer):
    """A version's answer to the adapter's first prompt, None where it was not asked; version 0 is the untrained one."""

    version: int
    answer: str | None
    on_disk: bool


class Story(Answer):
    """An adapter's events, oldest first, the feedback that waits, and answers of versions to `prompt`."""

    adapter: str
    version: int
    verdict: str
    events: list[StoryEvent]
    waits: list[Wait]
    prompt: str | None
    answers: list[VersionAnswer]


class RolledBack(Answer):
    """`version` is served now, with the weights of `restored`."""

    adapter: str
    version: int
    restored: int


class Examined(Answer):
    """`version` is tested now; GET /v1/adapters/{name} tells what came of it."""

    adapter: str
    version: int


class Forgotten(Answer):
    """The numbers of deleted rows, by table."""

    adapter: str
    forgotten: Literal[True]
    rows_deleted: dict[str, int]


class Imported(Answer):
    """A user's newest version came from elsewhere."""

    adapter: str
    version: int
    reason: Literal["imported", "rebuilt"]


class StartList(Answer):
    """The starts that users may begin with, at most `max`; `shelved` are those of another base model, or form."""

    starts: list[dict[str, Any]]
    shelved: list[str]
    max: int


class StartAdded(Answer):
    """A start; its `scale` is null until its language is measured, and 0 where it breaks it."""

    name: str
    added_at: str
    scale: float | None


class StartRemoved(Answer):
    """A start is gone; users who began with it keep what they have."""

    name: str
    removed: Literal[True]


class StartScores(Answer):
    """The scores of each start by a user's `pairs`, and the one with which the adapter began ("": with none).

    `own_right` is on how many of these pairs the user's own adapter was right.
    """

    adapter: str
    start: str
    pairs: int
    own_right: float
    scores: list[dict[str, Any]]


class Federation(Answer):
    """The federation of this box: its `terms`, whether noise gives a guarantee, and the text that people agree to.

    Of each consent `counts` says whether it is to that text; `rounds` is how often the user took part.
    """

    enabled: bool
    model: str
    rank: int
    guarantee: bool
    terms: dict[str, Any]
    text: str
    text_sha256: str
    consents: list[dict[str, Any]]


class ConsentGiven(Answer):
    """A user agreed to take part in rounds."""

    user: str
    agreed_at: str
    text_sha256: str


class ConsentRevoked(Answer):
    """A user takes part in no further round; `revoked`: there was a consent."""

    user: str
    revoked: bool


class FederationLedger(Answer):
    """The records that have left this box, oldest first."""

    ledger: list[dict[str, Any]]


class RoundOffer(Answer):
    """The offer of this box to rounds: classes of memory, speed and participants are powers of two.

    `idle`: a round would begin now; `busy` is the one under way; `terms` are the least strict that it takes.
    """

    model: str
    rank: int
    memory_mb: int
    tokens_per_s: int
    participants: int
    idle: bool
    busy: str | None
    terms: dict[str, Any]


class RoundBegun(Answer):
    """A round has begun."""

    id: str


class RoundState(Answer):
    """How far a round is, from 0 to 1, and why it failed."""

    id: str
    state: Literal["training", "done", "failed"]
    reason: str
    progress: float


class RoundDropped(Answer):
    """A round is dropped; a record of it that has left stays in the ledger."""

    id: str
    dropped: Literal[True]


class Preference(Answer):
    """A user's words on the answers that are wanted; `note` says whether prompts have them, and why not.

    `distilled`, from 0 to 1, says how far answers without it are as those with it.
    """

    adapter: str
    text: str | None
    created_at: str | None
    distilled: float
    in_prompt: bool
    note: str


class Struck(Answer):
    """All that the taste model of an adapter must not believe."""

    adapter: str
    struck: list[str]


class Quarantine(Answer):
    """Pairs that wait for a decision; `count` of them in all."""

    pairs: list[dict[str, Any]]
    count: int


class ApplicationList(Answer):
    """Types of applications by user, with medians over their latest runs."""

    applications: list[dict[str, Any]]


class RunList(Answer):
    """The latest runs of a type of application; costs are KV token-iterations."""

    application: str
    runs: list[dict[str, Any]]


class ApplicationsForgotten(Answer):
    """How many ended runs of a type were forgotten."""

    application: str
    runs: int


class Decided(Answer):
    """The decision about a pair; `left` of its user still wait."""

    pair_id: int
    adapter: str
    decision: Literal["released", "dropped"]
    left: int


class AllDecided(Answer):
    """The decision about all pairs of a user that waited; `left` came meanwhile."""

    user: str
    decision: Literal["released", "dropped"]
    pair_ids: list[int]
    left: int


class StoreReport(Answer):
    """The database's sizes in bytes, and what it holds."""

    path: str
    database_bytes: int
    used_bytes: int
    log_bytes: int
    max_bytes: int
    rows: dict[str, int]
    deleted: dict[str, int]


class Pruned(Answer):
    """Rows that were deleted, by table, and the database after that."""

    deleted: dict[str, int]
    store: StoreReport


class Vacuumed(Answer):
    """The database's size before and after."""

    bytes_before: int
    bytes_after: int


class SettingsInUse(Answer):
    """All settings by section, tokens left out; `store.data_dir` is the folder in use."""


class Reloaded(Answer):
    """Settings that hold now, and those that need a restart: each with `setting`, `old` and `new`."""

    applied: list[dict[str, Any]]
    needs_restart: list[dict[str, Any]]


class Trace(Answer):
    """A document in Chrome's trace event format."""

    displayTimeUnit: str
    otherData: dict[str, Any]
    traceEvents: list[dict[str, Any]]


class KnownCaller(Answer):
    """The caller of this request. `users`: names, beginnings of names with "*", or "*" for all it may speak for."""

    name: str
    roles: list[Literal["use", "train", "metrics", "admin"]]
    users: list[str]


class Status(Answer):
    """The state of the daemon; `degraded` has a sentence for everything that is not as it should be."""

    version: str
    verdict: str
    phase: Literal["loading", "ready", "draining"]
    uptime_s: float
    caller: KnownCaller
    degraded: list[str]
    open_requests: int
    queue: dict[str, int]
    rates: dict[str, float]
    latency: dict[str, Any]
    totals: dict[str, float]
    model: dict[str, Any]
    paths: dict[str, Any]
    pages: dict[str, int]
    states: dict[str, int] | None
    prefix: dict[str, Any]
    finetune: dict[str, Any]
    fairness: dict[str, Any]
    readers: dict[str, Any]
    device: dict[str, Any]
    governors: dict[str, Any]
    quarantine: dict[str, int | None]
    store: dict[str, Any]


class Leases(Answer):
    """Every adapter that this node knows: its version here, its writer, and whether that lacks pairs of this node."""

    leases: list[dict[str, Any]]


class LeaseTaken(Answer):
    """The writer of an adapter is known, and this node has the version on its disk; 0: none."""

    adapter: str
    node: str
    epoch: int
    version: int


class CopiedPairs(Answer):
    """Pairs of an adapter that its writer may lack: rows of tables."""

    signals: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]


class PairsTaken(Answer):
    """The number of pairs that were not known yet; all are on disk."""

    adapter: str
    pairs: int


class Drained(Answer):
    """Whether a fleet is to send no new requests to this daemon."""

    drained: bool


class Health(Answer):
    """The process should be left alone."""

    status: Literal["ok"]
    phase: Literal["loading", "ready", "draining"]


class Ready(Answer):
    """Completions are served."""

    status: Literal["ready"]
    degraded: list[str]


class Document(Answer):
    """The OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
