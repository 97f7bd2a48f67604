"""A node of a fleet as it is known: its own report of its load, and what was sent to it since."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load, Prices

BLOCK_BYTES = 256
"""Bytes of a prompt's text that are remembered under one hash."""
_TOKEN_BYTES = 4.0
"""Bytes of text a token, before any answer has told."""
_LATEST = 0.1
"""Share of the latest observation in a running mean."""
_REPORT_S = 0.2
"""Seconds between two reports of a node."""
_CALIBRATED = (0.2, 5.0)
"""Least and most that forecasts are multiplied by."""
_MIN_CHUNK = 16


class NodeLoad(BaseModel):
    """A daemon's report of its load: the event `load` of `GET /v1/events`. Units: tokens, pages, seconds."""

    model_config = ConfigDict(frozen=True)

    version: str
    """The daemon's version of edged."""
    model: str
    fingerprint: str
    """Of base weights and LoRA's shape: adapters of equal fingerprints may move."""
    dtype: str
    node: str = ""
    """The daemon's name, `api.node`; "" for none."""
    phase: str
    """"ready", "drained" where no new requests of the fleet are wanted, or "draining" from SIGTERM on."""
    backlog_tokens: int
    """Tokens of prompts that are still to be computed."""
    waiting: int
    """Requests without a token of an answer yet."""
    decodes: int
    context: int
    """Keys that the decodes read."""
    free_pages: int
    pages: int
    page_tokens: int
    free_sequences: int
    chunk_tokens: int
    """Most tokens of an iteration."""
    unit_s: float
    """Seconds of the fine-tune unit that is next; 0 where none is."""
    pairs_queued: int
    pairs_by_adapter: dict[str, int] = {}
    """Pairs queued of the adapters that have most, these first."""
    trains: bool = True
    """Whether fine-tune steps are opened."""
    busy_share: float
    """Share of the latest second in which iterations ran."""
    slowness: float
    forward_prices: tuple[float, ...]
    """Seconds of FORWARD_PRICES."""
    knee_tokens: int


class PrefixMemory:
    """The beginnings of prompts that were sent to a node, by hashes of blocks; the latest used are kept."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, blocks: tuple[int, ...]) -> int:
        """Return how many of a prompt's first blocks the node was sent before."""
        known = self._blocks
        return next((number for number, block in enumerate(blocks) if block not in known), len(blocks))

    def add(self, blocks: tuple[int, ...], most: int) -> None:
        """Remember a prompt's blocks, and of all blocks the latest `most`."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)


def blocks_of(owner: str, text: bytes) -> tuple[int, ...]:
    """Return a hash for each whole block of a prompt's text, which depends on all text before it and on `owner`."""
    chained, blocks = hash(owner), []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chained = hash((chained, text[start : start + BLOCK_BYTES]))
        blocks.append(chained)
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that is to be placed: bytes of its prompt, hashes of its blocks, its user."""

    num_bytes: int
    blocks: tuple[int, ...] = ()
    user: str | None = None
    ways: Mapping[str, float] = field(default_factory=dict)
    """Seconds until a node has the user's adapter, where that is on its way first."""


@dataclass(slots=True)
class NodeView:
    """A node as policies see it: its latest report, and the prompts sent since, which that report cannot know."""

    name: str
    load: NodeLoad
    reported_s: float
    cost: CostModel = field(init=False)
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """Time and tokens to compute of each prompt sent since the report."""
    memory: PrefixMemory = field(default_factory=PrefixMemory)
    token_bytes: float = _TOKEN_BYTES
    answer_s: float = 1.0
    """Mean seconds from an answer's first byte to its last."""
    calibration: float = 1.0
    """Observed seconds to a first token over the forecast's, as a running geometric mean."""
    prompt_share: float = 0.0
    """Share of the node's time that the prompts sent there take, as a running mean."""
    pairs_coming: list[float] = field(default_factory=list)
    """Time of arrival of each preference pair that the report cannot know."""
    forecast_error: float | None = None
    """Running mean of |forecast - observed| / observed; None before the first answer."""

    def __post_init__(self) -> None:
        self.take(self.load, self.reported_s)

    def take(self, load: NodeLoad, now: float) -> None:
        """Take a report in; prompts sent before it came are taken to be in it."""
        since_s = now - self.reported_s
        self.load, self.reported_s = load, now
        self.cost = CostModel(Prices(load.forward_prices, load.knee_tokens, {"layer": (load.unit_s, 0.0)}))
        self.pairs_coming = [at_s for at_s in self.pairs_coming if at_s > now]
        tokens = 0
        while self.sent and self.sent[0][0] <= now:
            tokens += self.sent.popleft()[1]
        if since_s > 0:
            share = tokens * self.cost.token_s * load.slowness / since_s
            self.prompt_share += min(1.0, _LATEST * since_s / _REPORT_S) * (share - self.prompt_share)

    @property
    def requests(self) -> int:
        """Requests that wait or are answered there."""
        return self.load.waiting + self.load.decodes + len(self.sent)

    @property
    def waiting(self) -> int:
        """Requests there without a first token."""
        return self.load.waiting + len(self.sent)

    @property
    def backlog_tokens(self) -> int:
        """Tokens of prompts there that are still to be computed."""
        return self.load.backlog_tokens + sum(tokens for _, tokens in self.sent)

    @property
    def pairs(self) -> int:
        """Preference pairs that wait there."""
        return self.load.pairs_queued + len(self.pairs_coming)

    @property
    def serving_share(self) -> float:
        """Share of the node's time that its requests take, beyond the pass of the weights that any answer needs."""
        weights_s = self.cost.priced_s(Load(0, 1, adapters=1)) * self.load.slowness
        decodes = max(0.0, 1.0 - weights_s / self.pass_s(0)) if self.load.decodes else 0.0
        return min(1.0, self.prompt_share + (1.0 - self.prompt_share) * decodes)

    def hit_bytes(self, arrival: RoutedRequest) -> int:
        """Return the bytes of a prompt's beginning that were sent there before."""
        return self.memory.hit(arrival.blocks) * BLOCK_BYTES

    def tokens_to_compute(self, arrival: RoutedRequest) -> int:
        """Return the tokens of a prompt less those whose K/V the node is taken to have."""
        return max(1, math.ceil((arrival.num_bytes - self.hit_bytes(arrival)) / self.token_bytes))

    def pass_s(self, num_tokens: int) -> float:
        """Return the seconds of an iteration there with so many tokens of prompts beside its decodes."""
        load = Load(num_tokens, self.load.decodes, context=self.load.context, adapters=1)
        return self.cost.priced_s(load) * self.load.slowness

    def send(self, arrival: RoutedRequest, now: float) -> None:
        """Count a request that was sent there."""
        self.sent.append((now, self.tokens_to_compute(arrival)))
        most = int(self.load.pages * self.load.page_tokens * self.token_bytes / BLOCK_BYTES)
        self.memory.add(arrival.blocks, most)

    def observe(self, forecast_s: float, first_s: float, answer_s: float) -> None:
        """Learn from an answer: its first token's forecast and time, and the seconds from there to its end."""
        forecast_s, first_s = max(forecast_s, 1e-4), max(first_s, 1e-4)
        error = abs(forecast_s - first_s) / first_s
        known = self.forecast_error
        self.forecast_error = error if known is None else known + _LATEST * (error - known)
        least, most = _CALIBRATED
        calibrated = self.calibration * (first_s / forecast_s) ** _LATEST
        self.calibration = min(most, max(least, calibrated))
        self.answer_s += _LATEST * (answer_s - self.answer_s)

    def count_tokens(self, num_bytes: int, num_tokens: int) -> None:
        """Learn the bytes of a token from a prompt whose tokens an answer has told."""
        if num_bytes and num_tokens:
            self.token_bytes += _LATEST * (num_bytes / num_tokens - self.token_bytes)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of prompts that an iteration there takes beside its decodes."""
        return max(_MIN_CHUNK, self.load.chunk_tokens - self.load.decodes)
