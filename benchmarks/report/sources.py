"""JSON files of the pruning and the scheduler benchmark, checked before anything is drawn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from edged.lab.bench.compare import CompareError, read_object

WHOLE = "off"
"""Name of the budget without pruning."""
QUEUED = "queued"
"""Name of the mix with thousands of queued prompts besides the live tasks."""


class _Middle(BaseModel):
    median: float
    low: float
    high: float


class _Latency(BaseModel):
    ms: _Middle


class _Quality(BaseModel):
    clpd_nats: float
    greedy_agreement: float


class _Pruning(BaseModel):
    """A pruning report: latencies by sequences and budget, quality by budget; a budget is tokens kept per head, or
    WHOLE."""

    model: str
    device: str
    context_tokens: int
    arguments: dict[str, str | int] = {}
    tbt: dict[str, dict[str, _Latency]] = Field(min_length=1)
    quality: dict[str, _Quality]

    @model_validator(mode="after")
    def _budgets(self) -> _Pruning:
        budgets = set(self.quality)
        if WHOLE not in budgets or not all(name.isdigit() for name in budgets - {WHOLE}):
            raise ValueError(f'quality must tell "{WHOLE}" and numbers of tokens, not {", ".join(sorted(budgets))}')
        for sequences, found in self.tbt.items():
            if missing := budgets - set(found):
                raise ValueError(f"tbt of {sequences} sequences lacks {', '.join(sorted(missing))}")
        return self


class _Mix(BaseModel):
    plan_ms_p50: float


class _Scheduler(BaseModel):
    policy: str
    tasks: int
    memory_mb: float
    queued: int = 0
    rounds: int = 0
    memory_queued_mb: float = 0.0
    mixes: dict[str, _Mix]

    @model_validator(mode="after")
    def _live(self) -> _Scheduler:
        if not set(self.mixes) - {QUEUED}:
            raise ValueError("mixes must tell one of live tasks alone")
        if QUEUED in self.mixes and not self.queued:
            raise ValueError(f'queued must tell how many prompts wait in the mix "{QUEUED}"')
        return self


def read_pruning(path: Path) -> dict[str, Any]:
    """Read the output of python -m benchmarks.pruning. Raises CompareError."""
    value = read_object(path)
    _check(_Pruning, value, path, "python -m benchmarks.pruning --output")
    return value


def read_scheduler(path: Path) -> list[dict[str, Any]]:
    """Read the output of python -m benchmarks.scheduler --json: one policy, or a list of them. Raises CompareError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CompareError(f'"{path}" cannot be read: {error}') from None
    found = value if isinstance(value, list) else [value]
    if not found:
        raise CompareError(f'"{path}" tells of no policy: give what python -m benchmarks.scheduler --json printed')
    for one in found:
        _check(_Scheduler, one, path, "python -m benchmarks.scheduler --json")
    return found


def _check(kind: type[BaseModel], value: Any, path: Path, writer: str) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CompareError(
            f'"{path}" is not what {writer} writes: {f"{where}: " if where else ""}{first["msg"]}'
        ) from None
