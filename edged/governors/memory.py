"""The memory governor: it gives up resources step by step when another program needs memory, and takes them back.

The governor is pure: readings, the engine's use and the clock go in, limits come out.

The sum of the K/V's memory and the free memory does not change when the engine takes or gives a page. So the pages that
may take memory are the resident ones, and as many more as leave the reserve free: this limit moves only when another
program takes or frees memory.
"""

import math

from edged.governors.limits import EngineLimits, Use
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.telemetry.reading import Reading

STEPS = ("none", "caches", "pruning", "fine-tuning", "admission")
"""Names of the resources that are held back at each step, together with those of all steps before it."""
CACHES, PRUNING, FINETUNING, ADMISSION = range(1, 5)
_PATIENCE_S, _ACUTE_PATIENCE_S = 3.0, 1.0
"""Wait between a step and the next: ordinarily, and with less than half the reserve left."""
_CALM_S, _LONGEST_CALM_S = 10.0, 160.0
"""How long memory must suffice before a step is taken back; it doubles each time that this came too early."""
_FORGIVEN_S = 600.0
"""Time without a step after which the calm is as short as at first."""
_MARGIN_SHARE, _MIN_MARGIN, _MAX_MARGIN = 0.125, 16 << 20, 256 << 20
_PRESSURE_PERCENT = 10.0
"""Share of the time that tasks wait for memory (PSI) from which it counts as short."""
_PRESSURE_SHARE = 0.05
"""Share of all pages that one reading under pressure takes, though the reserve is free."""
_MIN_RESERVE, _MAX_RESERVE, _RESERVE_SHARE = 256 << 20, 2048 << 20, 0.05


class MemoryGovernor:
    """The governor of memory, which goes step by step from caches to admission and back."""

    def __init__(self, settings: Live[Settings]) -> None:
        self._settings = settings
        self.step = 0
        """Index in STEPS."""
        self.reason = ""
        self._pages: int | None = None
        self._sequences: int | None = None
        self._changed_s = -math.inf
        self._eased_s = -math.inf
        self._calm_since_s: float | None = None
        self._calm_s = _CALM_S

    @property
    def holds(self) -> list[str]:
        """Names of the resources that are held back now."""
        return list(STEPS[1 : self.step + 1])

    def reserve_bytes(self, total_bytes: int) -> int:
        """Bytes of memory that are kept free for other programs."""
        configured = self._settings.current.governor.memory_reserve_mb << 20
        return configured or int(min(_MAX_RESERVE, max(_MIN_RESERVE, _RESERVE_SHARE * total_bytes)))

    def update(self, reading: Reading, use: Use, now: float) -> EngineLimits:
        """Return the engine's limits after a reading."""
        reserve = self.reserve_bytes(reading.memory_total_bytes)
        margin = int(min(_MAX_MARGIN, max(_MIN_MARGIN, _MARGIN_SHARE * reserve)))
        spare = reading.memory_available_bytes - reserve
        pressed = self._pressed(reading, spare < reserve)
        self.reason = _reason(reading, reserve, pressed)
        if spare < 0 or pressed:
            self._calm_since_s = None
            patience_s = _ACUTE_PATIENCE_S if 2 * reading.memory_available_bytes < reserve else _PATIENCE_S
            cached_bytes = max(0, use.resident_pages - use.live_pages) * use.page_bytes
            caches_do = self.step == CACHES and not pressed and cached_bytes >= -spare
            if not self.step or (now - self._changed_s >= patience_s and not caches_do):
                self._harder(use, now)
        elif spare < (2 * margin if self.step == CACHES else 3 * margin // 4):
            # Caches are kept so small that the margin is just free: they grow again only with more than that.
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now
        elif now - max(self._calm_since_s, self._changed_s) >= self._calm_s:
            self._ease(use, now)
        self._pages = self._budget(spare, margin, pressed, use)
        return EngineLimits(
            pages=self._pages,
            prune=self.step >= PRUNING and use.prunes,
            finetune_share=0.0 if self.step >= FINETUNING else 1.0,
            release=self.step >= FINETUNING,
            sequences=self._sequences,
        )

    def _pressed(self, reading: Reading, little: bool) -> bool:
        """Whether tasks wait for memory: tasks of the own control group, or of the box where it has `little` left.

        With plenty left, tasks of the box wait at a limit of their own: memory given up would not reach them.
        """
        least = _PRESSURE_PERCENT
        own, box = reading.cgroup_pressure_some_percent, reading.memory_pressure_some_percent
        return (own is not None and own >= least) or (little and box is not None and box >= least)

    def _harder(self, use: Use, now: float) -> None:
        """Take the next step; at the last one, halve the number of sequences."""
        if now - self._eased_s < 2.0 * self._calm_s:
            self._calm_s = min(_LONGEST_CALM_S, 2.0 * self._calm_s)
            self._eased_s = -math.inf
        elif now - self._changed_s > _FORGIVEN_S:
            self._calm_s = _CALM_S
        self.step = next((step for step in _steps(use) if step > self.step), self.step)
        if self.step == ADMISSION:
            most = min(use.running, self._sequences or use.max_sequences)
            self._sequences = max(1, most // 2)
        self._changed_s = now

    def _ease(self, use: Use, now: float) -> None:
        """Go one step back; from the last one, double the number of sequences until all are allowed."""
        if not self.step:
            return
        if self._sequences is not None:
            self._sequences = 2 * self._sequences if 2 * self._sequences < use.max_sequences else None
        if self._sequences is None:
            self.step = max(step for step in (0, *_steps(use)) if step < self.step)
        self._changed_s = self._eased_s = now

    def _budget(self, spare: int, margin: int, pressed: bool, use: Use) -> int | None:
        """Pages that may take memory (None: all); from the first step on never more than before."""
        if not use.gives_back:
            return None
        pages = use.resident_pages
        if spare < 0:
            pages -= -((spare - margin) // use.page_bytes)
        elif spare > margin:
            pages += (spare - margin) // use.page_bytes
        if pressed:
            pages = min(pages, use.resident_pages - math.ceil(_PRESSURE_SHARE * use.pages))
        if self.step and self._pages is not None:
            pages = min(pages, self._pages)
        pages = max(0, pages)
        return None if pages >= use.pages else pages


def _steps(use: Use) -> tuple[int, ...]:
    """The steps that help on this box, in order: memory that cannot be given back to the box helps no other program."""
    if not use.gives_back:
        return (FINETUNING, ADMISSION)
    return (CACHES, PRUNING, FINETUNING, ADMISSION) if use.prunes else (CACHES, FINETUNING, ADMISSION)


def _reason(reading: Reading, reserve: int, pressed: bool) -> str:
    """The reason for the present step, in one phrase."""
    available, wanted = reading.memory_available_bytes >> 20, reserve >> 20
    text = f"{available} MiB are available, {wanted} MiB are to be"
    if pressed:
        waits = max(reading.cgroup_pressure_some_percent or 0.0, reading.memory_pressure_some_percent or 0.0)
        text += f", tasks wait for memory {waits:.0f} % of the time"
    return text
