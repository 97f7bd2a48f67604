"""Reloading: the settings that change while the daemon runs, and how they reach its parts."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from edged.runtime import logs
from edged.settings.load import SECRET_SETTINGS, ConfigError, Settings

log = logging.getLogger("edged")


def _all_of(section: str) -> frozenset[str]:
    return frozenset(type(getattr(Settings(), section)).model_fields)


RELOADABLE: dict[str, frozenset[str]] = {
    "serving": frozenset({"max_queue", "default_max_tokens", "best_of", "drain_s", "exit_when_idle_s"}),
    # A policy decides at start what memory is for (shared prefixes, pruning), and a profile what is measured.
    "scheduler": _all_of("scheduler") - {"policy", "profile"},
    "fairness": _all_of("fairness"),
    "reading": _all_of("reading"),
    # The others size the memory of slots, steps and windows, or say what an adapter is.
    "align": frozenset(
        {
            *("enabled", "beta", "loss", "unpaired", "label_smoothing", "simpo_gamma", "sft_weight", "learning_rate"),
            *("epochs", "practice", "kl_budget"),
            *("micro_batch_pairs", "accumulate_s", "replay_share", "loss_threshold", "recompute"),
        }
    ),
    "guard": _all_of("guard"),
    "starts": _all_of("starts"),
    "federated": _all_of("federated"),
    "jobs": _all_of("jobs"),
    "governor": _all_of("governor"),
    "access": _all_of("access"),
    # The patience with slow clients is a connection's, from its beginning.
    "limits": _all_of("limits") - {"patience"},
    "metrics": _all_of("metrics"),
    "store": _all_of("store") - {"data_dir", "new_base"},
    "log": _all_of("log"),
}
"""Settings that can change at run time, by section. The part of each must read the new value: through
`Reloader.on_change`, or at each use through `services_of(request).settings`."""

_HIDDEN = "***"
Apply = Callable[[Settings], Awaitable[None] | None]
"""A function that takes over the settings that hold from now on."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting whose value in file and environment is not the one in use."""

    setting: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The changes of a reload."""

    applied: tuple[Change, ...]
    needs_restart: tuple[Change, ...]

    def report(self) -> dict[str, Any]:
        """Return the answer of `POST /v1/reload`."""
        return asdict(self)

    def sentence(self) -> str:
        """Return the line of the log."""
        applied = ", ".join(f"{change.setting} = {change.new!r}" for change in self.applied)
        waiting = ", ".join(change.setting for change in self.needs_restart)
        restart = f"; needs a restart: {waiting}" if waiting else ""
        return f"settings reloaded: {applied or 'nothing to apply'}{restart}"


def compare(old: Settings, new: Settings) -> ReloadResult:
    """Compare the settings `new` with `old`; values of tokens are not shown."""
    changes: dict[bool, list[Change]] = {True: [], False: []}
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for section, values in after.items():
        for key, value in values.items():
            if before[section][key] != value:
                name = f"{section}.{key}"
                shown = (_HIDDEN, _HIDDEN) if name in SECRET_SETTINGS else (before[section][key], value)
                changes[key in RELOADABLE.get(section, ())].append(Change(name, *shown))
    return ReloadResult(applied=tuple(changes[True]), needs_restart=tuple(changes[False]))


def adopted(current: Settings, new: Settings) -> Settings:
    """Return `current` with the settings that can change at run time taken from `new`."""
    update = {}
    for section, keys in RELOADABLE.items():
        own, other = getattr(current, section), getattr(new, section)
        update[section] = own.model_copy(update={key: getattr(other, key) for key in keys})
    return current.model_copy(update=update)


class Reloader:
    """Reads the settings again and hands them to the parts. Used on the event loop's thread."""

    def __init__(self, settings: Settings, load: Callable[[], Settings] | None) -> None:
        """Take `load`, which reads the settings as at the start or raises ConfigError; None where nothing can."""
        self.settings, self._load = settings, load
        self._parts: list[Apply] = []
        self._checks: list[Callable[[Settings], None]] = []
        self._one_at_a_time = asyncio.Lock()

    def on_change(self, apply: Apply) -> None:
        """Have a part take over changed settings; parts are called in the order in which they were added."""
        self._parts.append(apply)

    def check(self, check: Callable[[Settings], None]) -> None:
        """Have settings checked before any is applied; `check` raises ConfigError for what a part cannot take."""
        self._checks.append(check)

    async def reload(self) -> ReloadResult:
        """Apply what can change. Raises ConfigError, and nothing has changed then."""
        if self._load is None:
            raise ConfigError("this daemon was not started from a file or the environment: nothing can be read again")
        async with self._one_at_a_time:
            try:
                new = await asyncio.to_thread(self._load)
                for check in self._checks:
                    check(adopted(self.settings, new))
            except ConfigError as error:
                message = f"settings are not reloaded, the old ones hold: {error}"
                logs.event(log, logging.ERROR, "reload_refused", message)
                raise
            result = compare(self.settings, new)
            self.settings = adopted(self.settings, new)
            for apply in self._parts:
                waiting = apply(self.settings)
                if inspect.isawaitable(waiting):
                    await waiting
            logs.event(log, logging.INFO, "reload", result.sentence(), **result.report())
            return result
