"""When a request's next token is due: TTFT and TBT targets by service class.

Owns that arithmetic over priced latencies. Must not know queues or policies.
"""

from __future__ import annotations

from dataclasses import dataclass

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel, Load
from edged.scheduler.task import ServiceClass


@dataclass(frozen=True, slots=True)
class _Class:
    """A target is `factor` times a priced latency, but at least `floor_s`."""

    ttft_factor: float
    ttft_floor_s: float
    tbt_factor: float
    tbt_floor_s: float


class Targets:
    """Targets in seconds; they follow the prices as these are learned, and no slowness of the moment."""

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._classes = {
            ServiceClass.INTERACTIVE: _Class(
                settings.ttft_factor, settings.ttft_floor_ms / 1e3, settings.tbt_factor, settings.tbt_floor_ms / 1e3
            ),
            ServiceClass.BATCH: _Class(
                settings.batch_ttft_factor,
                settings.batch_ttft_floor_ms / 1e3,
                settings.batch_tbt_factor,
                settings.batch_tbt_floor_ms / 1e3,
            ),
        }

    def ttft_s(self, service: ServiceClass, tokens: int, context: int = 0) -> float:
        """Of a prompt with `tokens` to compute after `context` others: a multiple of its own forward (MACE 6.3)."""
        own = self._classes[service]
        return max(own.ttft_floor_s, own.ttft_factor * self._cost.prompt_s(tokens, context))

    def tbt_s(self, service: ServiceClass, alone_s: float) -> float:
        """Of a decode: a multiple of a forward of the decodes that are there alone, which takes `alone_s`."""
        own = self._classes[service]
        return max(own.tbt_floor_s, own.tbt_factor * alone_s)

    def impossible(self) -> list[str]:
        """A sentence for every target that this device cannot meet even for a request alone on it."""
        alone_s = self._cost.priced_s(Load(decodes=1))
        problems = []
        for service, own in self._classes.items():
            prefix = "" if service is ServiceClass.INTERACTIVE else "batch_"
            for name, factor, floor_s in (
                ("tbt", own.tbt_factor, own.tbt_floor_s),
                ("ttft", own.ttft_factor, own.ttft_floor_s),
            ):
                # A prompt may be as long as to be late whatever the floor.
                if factor < 1.0 and (name == "ttft" or floor_s < alone_s):
                    problems.append(
                        f"the {name.upper()} target of {service.value} requests is {factor:g} times the latency of a "
                        f"forward, or {floor_s * 1e3:.3g} ms, but one token takes {alone_s * 1e3:.3g} ms here: it is "
                        f"missed as little as can be; raise scheduler.{prefix}{name}_factor to 1 or more, or "
                        f"scheduler.{prefix}{name}_floor_ms"
                    )
        return problems
