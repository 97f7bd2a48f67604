"""All governors together: they take a reading, set the engine's limits, and log each step."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edged.governors.limits import EngineLimits, Use
from edged.governors.memory import MemoryGovernor
from edged.governors.power import PowerGovernor
from edged.runtime import logs
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.telemetry.energy import EnergyMeter
from edged.telemetry.reading import Reading

log = logging.getLogger("edged.governors")
_DRIFTED = 1.1
"""Slowdown of iterations from which on it is reported as caused by throttling, while clocks are held down."""


def local_minute() -> int:
    """The minute of the local day."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


class Governors:
    """All governors; `hear` runs on the sampler's thread, any thread may read `report`."""

    def __init__(
        self,
        settings: Live[Settings],
        use: Callable[[], Use],
        limit: Callable[[EngineLimits], None],
        minute: Callable[[], int] = local_minute,
    ) -> None:
        """`use` returns what the engine holds now; `limit` is called with new limits when they change."""
        self._settings, self._use, self._limit, self._minute = settings, use, limit, minute
        self._memory, self._power, self._energy = MemoryGovernor(settings), PowerGovernor(settings), EnergyMeter()
        self._limits = EngineLimits()
        self.report: dict[str, Any] = {"enabled": settings.current.governor.enabled}
        """What each governor holds and why, and the energy account, as the status shows them."""

    def hear(self, reading: Reading) -> None:
        """Update all governors by a reading, and pass on the limits if they changed."""
        use = self._use()
        work = (use.serving_s, use.finetune_s, use.output_tokens, use.pairs_trained)
        self._energy.add(reading.at_s, reading.power_w, *work)
        enabled = self._settings.current.governor.enabled
        before, limits = (self._memory.step, self._power.share, self._power.throttled), EngineLimits()
        if enabled:
            by_memory = self._memory.update(reading, use, reading.at_s)
            self._power.update(reading, reading.at_s, self._minute())
            limits = replace(by_memory, finetune_share=min(by_memory.finetune_share, self._power.share))
        else:
            # Nothing is held, and no state is kept: governors that are switched on again begin anew.
            self._memory, self._power = MemoryGovernor(self._settings), PowerGovernor(self._settings)
        self.report = self._reported(reading, use, limits, enabled)
        if limits != self._limits:
            self._limits = limits
            self._limit(limits)
        if enabled:
            self._log_changes(*before, use)

    def _log_changes(self, step: int, share: float, throttled: tuple[str, ...], use: Use) -> None:
        """Log one line for each step up or down, and for throttling that begins or ends.

        `step`, `share` and `throttled` are the governors' values before the reading.
        """
        memory, power = self._memory, self._power
        if memory.step != step:
            held = ", ".join(memory.holds) or "nothing"
            message = f"memory governor: step {memory.step} of 4, was {step}; it holds {held}: {memory.reason}"
            facts: dict[str, Any] = {"step": memory.step, "before": step, "holds": memory.holds}
            logs.event(log, logging.INFO, "memory_governor", message, **facts)
        if power.share != share:
            why = "; ".join(power.reasons) or "nothing holds it back any more"
            shares = f"fine-tuning gets {100 * power.share:.0f} % of the time, had {100 * share:.0f} %"
            message = f"power governor: {shares}: {why}"
            logs.event(log, logging.INFO, "power_governor", message, finetune_share=power.share, before=share)
        if power.throttled and not throttled:
            slower = f"iterations take {use.drift:.2f} times as long as usual"
            message = f"the device is throttled ({', '.join(power.throttled)}): {slower}"
            logs.event(log, logging.WARNING, "throttled", message, reasons=list(power.throttled), drift=use.drift)
        elif throttled and not power.throttled:
            logs.event(log, logging.INFO, "throttled", "the device is not throttled any more", reasons=[])

    def _reported(self, reading: Reading, use: Use, limits: EngineLimits, enabled: bool) -> dict[str, Any]:
        memory, power = self._memory, self._power
        return {
            "enabled": enabled,
            "memory": {
                "step": memory.step,
                "holds": memory.holds,
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
