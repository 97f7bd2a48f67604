"""The cost model: how long a candidate bin will take, learned from the iterations that ran.

Owns the features of a bin, their prices in seconds and the error of its own predictions. Must not know torch, policies
or clocks: it is told what ran and how long it took. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edged.scheduler.task import Kind, Result, Unit

FORGETTING = 0.99
"""Weight of an observation against the next one: about the last hundred iterations count."""
RIDGE = 0.005
"""Pull of a price towards what it was, in observations that it alone explains."""
PATIENCE = 8
"""First observations of a fit, all believed: the start values are guesses."""
LARGEST_SURPRISE = 0.3
"""Most that one observation counts as a change of speed, in log ratios: a stall is not a throttled device."""
UNKNOWN_ERROR = 0.25
"""Relative error assumed before anything was measured."""


@dataclass(slots=True)
class Load:
    """What one packed forward computes: the features that its latency is predicted from."""

    prefill_tokens: int = 0
    decodes: int = 0
    finetune_tokens: int = 0
    context: int = 0
    """Keys that the decodes read, summed over them."""
    pairs: float = 0.0
    """Query-key pairs of the chunks: a chunk of n tokens after c others has n * (c + n / 2)."""

    def add_chunk(self, tokens: int, context: int, finetune: bool) -> None:
        """Count a chunk of a prompt, or of a preference pair's forward."""
        if finetune:
            self.finetune_tokens += tokens
        else:
            self.prefill_tokens += tokens
        self.pairs += tokens * (context + 0.5 * tokens)


class Fit:
    """Non-negative prices of features, fitted online to relative errors.

    Each observation `(features, seconds)` enters exponentially forgotten normal equations, divided by its seconds so
    that a short iteration counts as much as a long one and a stall counts little. Coordinate descent keeps every price
    at or above zero. Prices that the latest data do not determine stay as they were; at first, near their start values
    times the mean ratio of measured to guessed time. A device that throttles slows everything at once: the drift of the
    latest ratios scales all prices until the equations have caught up.
    """

    __slots__ = ("_drift", "_gram", "_log_level", "_moment", "_scale", "_seen", "_start", "prices")

    def __init__(self, start: Sequence[float]) -> None:
        """`start`: guessed seconds per unit of each feature, all above zero."""
        size = len(start)
        self._start = list(start)
        self._scale = [1.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._log_level = 0.0
        self._drift = 0.0
        self._seen = 0
        self.prices = list(start)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; `seconds` must be above zero."""
        start, scale, gram, moment = self._start, self._scale, self._gram, self._moment
        row = [price * feature / seconds for price, feature in zip(start, features, strict=True)]
        guessed = sum(row)
        if guessed <= 0.0:
            return
        self._seen += 1
        predicted = sum(map(float.__mul__, scale, row))
        if self._seen <= PATIENCE:
            weight, sweeps = 1.0, 8
            self._log_level -= (math.log(guessed) + self._log_level) / self._seen
            centre = [math.exp(self._log_level)] * len(row)
        else:
            weight, sweeps = 0.5 / max(0.5, abs(predicted - 1.0)), 2
            surprise = -math.log(max(predicted, 1e-9)) - self._drift
            self._drift += 0.1 * min(LARGEST_SURPRISE, max(-LARGEST_SURPRISE, surprise))
            centre = scale.copy()
        for i, value in enumerate(row):
            line, share = gram[i], weight * value
            gram[i] = [FORGETTING * old + share * other for old, other in zip(line, row, strict=True)]
            moment[i] = FORGETTING * moment[i] + share
        for _ in range(sweeps):
            for i, line in enumerate(gram):
                own = scale[i]
                rest = moment[i] + RIDGE * centre[i] + line[i] * own - sum(map(float.__mul__, line, scale))
                scale[i] = rest / (line[i] + RIDGE) if rest > 0.0 else 0.0
        speed = math.exp(self._drift)
        self.prices = [price * factor * speed for price, factor in zip(start, scale, strict=True)]


class CostModel:
    """Latency of a packed forward and of each kind of fine-tune unit.

    A forward costs a constant, a price per token below the knee of the roofline (where reading the weights dominates
    and tokens are nearly free) and another above it, and extras per decode, per key that a decode reads, per pair
    of a chunk's attention and per fine-tune token. A unit costs a constant and a price per token, by kind.
    """

    __slots__ = ("_error", "_forward", "_knee", "_measured", "_unit_start", "_units")

    def __init__(self, forward: Sequence[float], unit: dict[str, tuple[float, float]], knee_tokens: int) -> None:
        """Start values, all above zero.

        `forward`: seconds per (pass, token up to `knee_tokens`, token beyond, decode, key read, pair, fine-tune token).
        `unit`: (seconds, seconds per token) by `Unit.kind`; an unknown kind starts like "layer".
        """
        self._forward = Fit(forward)
        self._unit_start = unit
        self._units = {kind: Fit(start) for kind, start in unit.items()}
        self._knee = knee_tokens
        self._error = UNKNOWN_ERROR
        self._measured = 0

    @classmethod
    def guess(
        cls,
        parameters: int,
        flops_per_s: float,
        bytes_per_s: float,
        layers: int = 24,
        bytes_per_parameter: int = 2,
    ) -> CostModel:
        """A roofline for a decoder of `parameters` on a device of that speed; measurements soon replace it."""
        read_s = parameters * bytes_per_parameter / bytes_per_s
        token_s = 2.0 * parameters / flops_per_s
        width = math.sqrt(parameters / layers / 12.0)
        key_s = 2.0 * layers * width * bytes_per_parameter / bytes_per_s
        pair_s = 4.0 * layers * width / flops_per_s
        launch_s = 2e-5
        return cls(
            forward=(read_s + layers * launch_s, 0.1 * token_s, token_s, launch_s, key_s, pair_s, 0.1 * token_s),
            unit={
                "head": (4 * launch_s, 0.5 * token_s),
                "layer": (10 * launch_s + 3.0 * read_s / layers, 4.0 * token_s / layers),
                "graph": (5 * launch_s + read_s / layers, token_s / layers),
                "grad": (5 * launch_s + 2.0 * read_s / layers, 2.0 * token_s / layers),
                "step": (10 * launch_s, 0.1 * read_s),
            },
            knee_tokens=max(1, round(read_s / token_s)),
        )

    @property
    def mape(self) -> float:
        """Mean relative error of the recent iterations' predictions, 0 to 1."""
        return self._error

    @property
    def headroom(self) -> float:
        """Share of a latency budget to leave unplanned, because predictions err by that much."""
        return min(self._error, 0.5)

    @property
    def token_s(self) -> float:
        """Seconds per prompt token where prompts fill the forward, above zero."""
        return max(self._forward.prices[2], 1e-9)

    def forward_s(self, load: Load) -> float:
        """Predicted seconds of one packed forward with sampling; 0 when there is nothing in it."""
        tokens = load.prefill_tokens + load.decodes + load.finetune_tokens
        if not tokens:
            return 0.0
        once, low, high, decode, key, pair, finetune = self._forward.prices
        knee = self._knee
        return (
            once
            + (low * tokens if tokens <= knee else low * knee + high * (tokens - knee))
            + decode * load.decodes
            + key * load.context
            + pair * load.pairs
            + finetune * load.finetune_tokens
        )

    def prompt_s(self, tokens: int, context: int = 0) -> float:
        """Predicted seconds of a prompt's `tokens` alone in a forward, after `context` others."""
        return self.forward_s(Load(prefill_tokens=tokens, pairs=tokens * (context + 0.5 * tokens)))

    def chunk(self, load: Load, context: int, most: int, limit_s: float, finetune: bool) -> int:
        """The longest chunk, up to `most` tokens after `context` others, with which `load` still takes `limit_s`."""
        once, low, high, decode, key, pair, extra = self._forward.prices
        knee = self._knee
        base = load.prefill_tokens + load.decodes + load.finetune_tokens
        fixed = once + decode * load.decodes + key * load.context + pair * load.pairs + extra * load.finetune_tokens
        left_s = limit_s - fixed
        slope = pair * context + (extra if finetune else 0.0)
        curve = 0.5 * pair

        def fits(count: int) -> bool:
            tokens = base + count
            packed = low * tokens if tokens <= knee else low * knee + high * (tokens - knee)
            return packed + count * (slope + curve * count) <= left_s

        if fits(most):
            return most
        shortest, longest = 0, most
        while longest - shortest > 1:
            middle = (shortest + longest) >> 1
            if fits(middle):
                shortest = middle
            else:
                longest = middle
        return shortest

    def unit_s(self, unit: Unit) -> float:
        """Predicted seconds of one fine-tune unit."""
        fit = self._units.get(unit.kind)
        once, token = fit.prices if fit is not None else self._unit_start["layer"]
        return once + token * unit.tokens

    def observe(self, result: Result) -> float:
        """Learn from a measured iteration; call it before its tasks advance, for it reads their contexts.

        Returns the seconds of it that were fine-tuning: the units', and the part of the forward that its fine-tune
        tokens are predicted to have added.
        """
        predicted_s = measured_s = finetune_s = 0.0
        if result.forward_s > 0.0:
            load = load_of(result)
            forward_s = self.forward_s(load)
            if load.finetune_tokens and forward_s > 0.0:
                without_s = self.forward_s(Load(load.prefill_tokens, load.decodes, 0, load.context, load.pairs))
                finetune_s = result.forward_s * (1.0 - without_s / forward_s)
            predicted_s, measured_s = forward_s, result.forward_s
            self._forward.observe(self._features(load), result.forward_s)
        for unit, seconds in result.units:
            finetune_s += seconds
            if seconds > 0.0:
                predicted_s += self.unit_s(unit)
                measured_s += seconds
                self._unit_fit(unit.kind).observe((1.0, float(unit.tokens)), seconds)
        if measured_s > 0.0:
            self._measured += 1
            error = min(1.0, abs(predicted_s / measured_s - 1.0))
            self._error += (error - self._error) * max(0.05, 1.0 / (self._measured + 1))
        return finetune_s

    def _features(self, load: Load) -> tuple[float, ...]:
        tokens = load.prefill_tokens + load.decodes + load.finetune_tokens
        low = min(tokens, self._knee)
        return (
            1.0,
            float(low),
            float(tokens - low),
            float(load.decodes),
            float(load.context),
            load.pairs,
            float(load.finetune_tokens),
        )

    def _unit_fit(self, kind: str) -> Fit:
        fit = self._units.get(kind)
        if fit is None:
            fit = self._units[kind] = Fit(self._unit_start["layer"])
        return fit


def load_of(result: Result) -> Load:
    """The forward that `result` reports, with the contexts that its tasks have before they advance."""
    load = Load()
    for outcome in result.outcomes:
        task, tokens = outcome.task, outcome.tokens
        if task.kind is Kind.DECODE:
            load.decodes += 1
            load.context += task.context
        elif tokens:
            load.add_chunk(tokens, task.context, task.kind is Kind.FINETUNE)
    return load
