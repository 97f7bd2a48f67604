"""All governors together: one reading in, one set of limits out, one log line for each step.

`use` and `limit` are functions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edged.governors.limits import EngineLimits, Use
from edged.governors.memory import STEPS, MemoryGovernor
from edged.governors.power import PowerGovernor
from edged.runtime import logs
from edged.settings.load import GovernorSettings
from edged.telemetry.energy import EnergyMeter
from edged.telemetry.reading import Reading

log = logging.getLogger("edged.governors")
_DRIFTED = 1.1
"""Iterations that take so many times as long as usual, while clocks are held down, are the throttling's."""


class Governors:
    """Hears of every reading on the sampler's thread; `report` may be called from any."""

    def __init__(
        self,
        settings: GovernorSettings,
        use: Callable[[], Use],
        limit: Callable[[EngineLimits], None],
        minute: Callable[[], int] | None = None,
    ) -> None:
        """`limit` is told of limits that changed; `minute` is the minute of the local day, the clock's where None."""
        self._settings, self._use, self._limit = settings, use, limit
        self._minute = minute or _local_minute
        self._memory, self._power, self._energy = MemoryGovernor(settings), PowerGovernor(settings), EnergyMeter()
        self._limits = EngineLimits()
        self._throttled = False
        self._report: dict[str, Any] = {"enabled": settings.enabled}

    def configure(self, settings: GovernorSettings) -> None:
        """Govern by other settings from the next reading on; to be called on any thread."""
        self._settings = settings
        self._memory.configure(settings)
        self._power.configure(settings)

    def hear(self, reading: Reading) -> None:
        """Govern by a reading."""
        use = self._use()
        self._energy.add(
            reading.at_s, reading.power_w, use.serving_s, use.finetune_s, use.output_tokens, use.pairs_trained
        )
        if not self._settings.enabled:
            self._let_go()
            self._report = self._reported(reading, use, self._limits)
            return
        step, share = self._memory.step, self._power.share
        by_memory = self._memory.update(reading, use, reading.at_s)
        self._power.update(reading, reading.at_s, self._minute())
        limits = replace(by_memory, finetune_share=min(by_memory.finetune_share, self._power.share))
        self._report = self._reported(reading, use, limits)
        if limits != self._limits:
            self._limits = limits
            self._limit(limits)
        self._tell(step, share, use)

    def _let_go(self) -> None:
        """Hold nothing, and remember nothing of what was held: who is switched on again begins anew."""
        self._memory, self._power = MemoryGovernor(self._settings), PowerGovernor(self._settings)
        self._throttled = False
        if self._limits != EngineLimits():
            self._limits = EngineLimits()
            self._limit(self._limits)

    def _tell(self, step: int, share: float, use: Use) -> None:
        """One line for each step up or down."""
        memory, power = self._memory, self._power
        if memory.step != step:
            held = "nothing" if not memory.step else ", ".join(STEPS[1 : memory.step + 1])
            logs.event(
                log,
                logging.INFO,
                "memory_governor",
                f"memory governor: step {memory.step} of 4, was {step}; it holds {held}: {memory.reason}",
                step=memory.step,
                before=step,
                holds=list(STEPS[1 : memory.step + 1]),
            )
        if power.share != share:
            why = "; ".join(power.reasons) or "nothing holds it back any more"
            logs.event(
                log,
                logging.INFO,
                "power_governor",
                f"power governor: fine-tuning gets {100 * power.share:.0f} % of the time, had {100 * share:.0f} %: "
                f"{why}",
                finetune_share=power.share,
                before=share,
            )
        self._tell_throttling(power.throttled, use)

    def _tell_throttling(self, why: Sequence[str], use: Use) -> None:
        throttled = bool(why)
        if throttled != self._throttled:
            self._throttled = throttled
            if throttled:
                message = (
                    f"the device is throttled ({', '.join(why)}): "
                    f"iterations take {use.drift:.2f} times as long as usual"
                )
                logs.event(log, logging.WARNING, "throttled", message, reasons=list(why), drift=use.drift)
            else:
                logs.event(log, logging.INFO, "throttled", "the device is not throttled any more", reasons=[])

    def _reported(self, reading: Reading, use: Use, limits: EngineLimits) -> dict[str, Any]:
        memory, power = self._memory, self._power
        return {
            "enabled": self._settings.enabled,
            "memory": {
                "step": memory.step,
                "holds": list(STEPS[1 : memory.step + 1]),
                "reason": memory.reason,
                "reserve_bytes": memory.reserve_bytes(reading.memory_total_bytes),
                "kv_budget_bytes": (use.pages if limits.pages is None else limits.pages) * use.page_bytes,
                "kv_resident_bytes": use.resident_pages * use.page_bytes,
                "max_sequences": use.max_sequences if limits.sequences is None else limits.sequences,
            },
            "power": {
                "finetune_share": power.share,
                "reasons": power.reasons,
                "throttled": list(power.throttled),
                "drift_by_throttling": use.drift if power.throttled and use.drift >= _DRIFTED else None,
            },
            "energy": self._energy.report(),
        }

    def report(self) -> dict[str, Any]:
        """What each governor holds and why, and the energy account, for the status."""
        return self._report


def _local_minute() -> int:
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min
