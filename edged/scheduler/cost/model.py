"""The cost model: how long a candidate bin will take, learned from the iterations that ran.

All times are seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edged.scheduler.cost.drift import Drift
from edged.scheduler.cost.error import PredictionError
from edged.scheduler.cost.prices import WINDOW_STEP, Load, Prices, unit_features
from edged.scheduler.cost.profile import Profile
from edged.scheduler.cost.regression import OnlineRegression
from edged.scheduler.task import CUTTABLE_UNITS, IterationResult, Kind, Unit


class CostModel:
    """Predicts the latency of a packed forward and of each kind of fine-tune unit.

    A forward costs a constant, a price per token below the knee of the roofline (where reading the weights dominates
    and tokens are nearly free) and another above it, and extras per decode, per key that a decode reads, per pair
    of a chunk's attention, per fine-tune token and per distinct adapter, and once for decodes beside chunks and for
    more tokens than the knee (few may go another way through the model). A unit costs a constant and a price per token,
    by kind. When the device turns slower or faster, all of these do at once: what is predicted of the next iteration
    is its price times the slowness of the last few; what is due later is priced alone.
    """

    __slots__ = (
        *("_drift", "_fit", "_high", "_knee", "_low", "_past", "_prices", "_unit_knee", "_units"),
        *("accuracy", "source", "token_s"),
    )

    def __init__(self, guess: Prices) -> None:
        """Start from the prices of `guess`, all above zero; a unit of another kind starts like "layer"."""
        self._fit = OnlineRegression(guess.forward)
        self._units: defaultdict[str, OnlineRegression] = defaultdict(lambda: OnlineRegression(guess.units["layer"]))
        self._units.update({kind: OnlineRegression(start) for kind, start in guess.units.items()})
        self._knee = guess.knee_tokens
        self._unit_knee = guess.unit_knee
        self._drift = Drift()
        self.accuracy = PredictionError()
        self.source = "guess"
        """Origin of its first prices: "guess", or the profile's file."""
        self._take_prices(guess.forward)

    @classmethod
    def from_profile(cls, profile: Profile, guess: Prices, source: str = "profile") -> CostModel:
        """Build it from prices measured on this device; `guess` has those of unit kinds that were not measured.

        `source` says where the profile was found.
        """
        cost, prices = cls(guess), profile.prices
        rows = [forward.features(prices.knee_tokens) for forward in profile.forwards]
        seconds = [forward.seconds for forward in profile.forwards]
        cost._fit = OnlineRegression.known(prices.forward, rows, seconds, guess.forward)
        cost._knee = prices.knee_tokens
        cost._take_prices(cost._fit.prices)
        cost._unit_knee = prices.unit_knee
        for kind, known in prices.units.items():
            seen = [unit for unit in profile.units if unit.kind == kind]
            rows = [unit_features(kind, unit.tokens, prices.unit_knee) for unit in seen]
            guessed = guess.units.get(kind, guess.units["layer"])
            cost._units[kind] = OnlineRegression.known(known, rows, [unit.seconds for unit in seen], guessed)
        cost.source = source
        return cost

    @property
    def mape(self) -> float:
        """Mean relative error of the recent iterations' predictions, 0 to 1."""
        return self.accuracy.recent

    @property
    def headroom(self) -> float:
        """Share of a latency budget to leave unplanned: the mean error of predictions, at most a half."""
        return min(self.accuracy.recent, 0.5)

    @property
    def pass_s(self) -> float:
        """Price of a forward whatever is in it: on most devices the reading of the weights."""
        return self._prices[0]

    def _take_prices(self, prices: Sequence[float]) -> None:
        self._prices = tuple(prices)
        _, self._low, self._high, *_, past = self._prices
        self._past = past + self._low * self._knee
        self.token_s = max(self._prices[2], 1e-9)
        """Price of a prompt's token beyond the knee, above zero: for plans of many iterations ahead."""

    @property
    def prices(self) -> Prices:
        """The present prices."""
        units = {kind: (fit.prices[0], fit.prices[1]) for kind, fit in self._units.items()}
        return Prices(self._prices, self._knee, units, self._unit_knee)

    @property
    def slowness(self) -> float:
        """How many times longer work takes at the moment than it is priced at."""
        return self._drift.slowness

    @property
    def drift(self) -> float:
        """How many times longer work takes now than usual, that is in the profile and the last hours of work."""
        return self._drift.now

    def report(self) -> dict[str, Any]:
        """Return errors in percent, origin of the first prices, iterations learned from, drift and slowness."""
        return {
            **self.accuracy.report(),
            "source": self.source,
            "iterations": self.accuracy.iterations,
            "drift": self._drift.now,
            "slowness": self._drift.slowness,
        }

    def forward_s(self, load: Load) -> float:
        """Return the predicted seconds of the next packed forward with sampling; 0 when there is nothing in it."""
        return self.priced_s(load) * self._drift.slowness

    def priced_s(self, load: Load) -> float:
        """Return the forward's seconds at prices, the mean of some hundred iterations, without the slowness of now."""
        num_tokens = load.prefill_tokens + load.decodes + load.finetune_tokens
        if not num_tokens:
            return 0.0
        once, _, _, decode, key, pair, finetune, adapter, beside, _ = self._prices
        return (
            once
            + self._packed_s(num_tokens)
            + decode * load.decodes
            + key * load.context
            + pair * load.pairs
            + finetune * load.finetune_tokens
            + adapter * load.adapters
            + (beside if 0 < load.decodes < num_tokens else 0.0)
        )

    def prompt_s(self, num_tokens: int, context: int = 0) -> float:
        """Return the priced seconds of a prompt's `num_tokens` alone in a forward, after `context` others."""
        once, pair = self._prices[0], self._prices[5]
        return (
            once + self._packed_s(num_tokens) + pair * (num_tokens * (context + 0.5 * num_tokens))
            if num_tokens
            else 0.0
        )

    def _packed_s(self, num_tokens: int) -> float:
        """Return what a forward's `num_tokens` cost, whatever they are: less up to the knee than beyond it."""
        knee = self._knee
        return self._low * num_tokens if num_tokens <= knee else self._past + self._high * (num_tokens - knee)

    def chunk(self, load: Load, context: int, most: int, limit_s: float, finetune: bool) -> int:
        """Return the longest chunk, up to `most` tokens after `context` others, that keeps `load` within `limit_s`."""
        once, _, _, decode, key, pair, extra, adapter, beside, _ = self._prices
        base = load.prefill_tokens + load.decodes + load.finetune_tokens
        fixed = once + decode * load.decodes + key * load.context + pair * load.pairs + adapter * load.adapters
        fixed += extra * load.finetune_tokens + (beside if load.decodes else 0.0)
        left_s = limit_s / self._drift.slowness - fixed
        slope, curve = (extra, 0.0) if finetune else (pair * context, 0.5 * pair)

        low, high, past, knee = self._low, self._high, self._past, self._knee
        # Bisection by hand: with a call for each of its steps it would take twice as long.
        fits, beyond, count = 0, most + 1, most
        while beyond - fits > 1:
            num_tokens = base + count
            packed_s = low * num_tokens if num_tokens <= knee else past + high * (num_tokens - knee)
            if packed_s + count * (slope + curve * count) <= left_s:
                fits = count
            else:
                beyond = count
            count = (fits + beyond) // 2
        return fits

    def free_tokens(self, load: Load) -> int:
        """Return the tokens up to the knee: they add little to a forward, which reads the weights anyway."""
        return max(0, self._knee - load.num_tokens) if load.num_tokens else 0

    def unit_s(self, unit: Unit) -> float:
        """Return the predicted seconds of the next fine-tune unit."""
        return self._unit_price_s(unit) * self._drift.slowness

    def rows(self, unit: Unit, limit_s: float, least: bool) -> int:
        """Return the rows of a unit, some WINDOW_STEPs, that take no longer than `limit_s`; 0 where it cannot be cut
        so.

        Both parts have the knee's rows, or reading the weights once more would be lost; but where it is to be the
        `least` that an iteration does, the rest may have fewer.
        """
        once, row = self._units[unit.kind].prices
        knee = max(self._unit_knee, WINDOW_STEP)
        most = unit.num_tokens - knee
        if least and most < knee:
            most = unit.num_tokens - 1
        if row:
            most = min(most, int((limit_s / self._drift.slowness - once) / row))
        return most - most % WINDOW_STEP if unit.kind in CUTTABLE_UNITS and most >= knee else 0

    def price_cut_units(self) -> None:
        """Price units of fewer rows than the forward's knee like those of as many, before anything was observed.

        Reading the weights takes as long as computing the knee's tokens. Unless a profile has measured it, that time
        was a part of what a unit of any size costs once.
        """
        if not self._unit_knee:
            self._unit_knee = self._knee
            for kind in self._units.keys() - {"step"}:
                once, row = self._units[kind].prices
                self._units[kind] = OnlineRegression((max(0.1 * once, once - row * self._knee), row))

    def _unit_price_s(self, unit: Unit) -> float:
        once, token = self._units[unit.kind].prices
        amount, num_tokens = unit_features(unit.kind, unit.num_tokens, self._unit_knee)
        return once * amount + token * num_tokens

    def observe(self, result: IterationResult) -> float:
        """Learn from a measured iteration; call it before its tasks advance, for it reads their contexts.

        Returns the seconds of it that were fine-tuning: the units', and the part of the forward that its fine-tune
        tokens are predicted to have added.
        """
        parts: dict[str, tuple[float, float, float]] = {}
        # Observations: (regression, features, priced seconds, usual seconds, measured seconds).
        learned: list[tuple[OnlineRegression, tuple[float, ...], float, float, float]] = []
        finetune_s = units_s = units_usual_s = units_measured_s = 0.0
        load = load_of(result)
        if result.forward_s > 0.0:
            forward_s = self.forward_s(load)
            if load.finetune_tokens and forward_s > 0.0:
                without_s = self.forward_s(replace(load, finetune_tokens=0))
                finetune_s = result.forward_s * (1.0 - without_s / forward_s)
            row = load.features(self._knee)
            usual_s = self._fit.usual_s(row)
            parts[load.part] = forward_s, usual_s, result.forward_s
            learned.append((self._fit, row, self.priced_s(load), usual_s, result.forward_s))
        slowness = self._drift.slowness
        known: dict[Unit, tuple[OnlineRegression, tuple[float, ...], float, float]] = {}
        for unit, seconds in result.units:
            if seconds > 0.0:
                if (priced := known.get(unit)) is None:
                    fit, row = self._units[unit.kind], unit_features(unit.kind, unit.num_tokens, self._unit_knee)
                    priced = known[unit] = fit, row, self._unit_price_s(unit), fit.usual_s(row)
                finetune_s += seconds
                units_s += priced[2] * slowness
                units_usual_s += priced[3]
                units_measured_s += seconds
                learned.append((*priced, seconds))
        if units_measured_s:
            parts["units"] = units_s, units_usual_s, units_measured_s
        if parts:
            self.accuracy.observe(parts)
        settled = [item for item in learned if item[0].settled]
        priced_s = sum([price_s for _, _, price_s, _, _ in settled])
        usual_s = sum([seconds for _, _, _, seconds, _ in settled])
        if priced_s and usual_s:
            factor = self._drift.observe(priced_s, usual_s, sum([seconds for *_, seconds in settled]))
            if factor != 1.0:
                for fit in (self._fit, *self._units.values()):
                    fit.rescale(factor, self._drift.now)
        for fit, row, _, _, seconds in learned:
            fit.observe(row, seconds, self._drift.now)
        self._take_prices(self._fit.prices)
        return finetune_s


def roofline(
    parameters: int, flops_per_s: float, bytes_per_s: float, layers: int = 24, bytes_per_parameter: int = 2
) -> Prices:
    """Guess the prices of a decoder of `parameters`: the longer of reading its weights and computing its tokens."""
    read_s = parameters * bytes_per_parameter / bytes_per_s
    token_s = 2.0 * parameters / flops_per_s
    width = math.sqrt(parameters / layers / 12.0)
    key_s = 2.0 * layers * width * bytes_per_parameter / bytes_per_s
    pair_s = 4.0 * layers * width / flops_per_s
    launch_s = 2e-5
    return Prices(
        forward=(
            read_s + layers * launch_s,
            0.1 * token_s,
            token_s,
            launch_s,
            key_s,
            pair_s,
            0.1 * token_s,
            0.03 * read_s + layers * launch_s,
            layers * launch_s,
            layers * launch_s,
        ),
        knee_tokens=max(1, round(read_s / token_s)),
        units={
            "head": (4 * launch_s, 0.5 * token_s),
            "score": (2 * launch_s, 0.2 * token_s),
            "test": (2 * launch_s, 0.2 * token_s),
            "layer": (10 * launch_s + 3.0 * read_s / layers, 4.0 * token_s / layers),
            "graph": (5 * launch_s + read_s / layers, token_s / layers),
            "grad": (5 * launch_s + 2.0 * read_s / layers, 2.0 * token_s / layers),
            "step": (10 * launch_s, 0.1 * read_s),
        },
    )


def load_of(result: IterationResult) -> Load:
    """Return the load of the forward that `result` reports; call it before its tasks advance."""
    load, adapters = Load(), set()
    for outcome in result.outcomes:
        task, num_tokens = outcome.task, outcome.num_tokens
        adapters.add(task.adapter)
        if task.kind is Kind.DECODE:
            rows = 1 + outcome.drafted
            load.decodes += rows
            load.context += rows * (task.context - task.pruned)
        elif num_tokens:
            load.add_chunk(num_tokens, task.context, task.kind is Kind.FINETUNE)
    adapters.discard(0)
    load.adapters = len(adapters)
    return load
