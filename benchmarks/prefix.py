"""Shared prefixes: edged's engine with and without `cache.prefix_sharing` on the same requests, closed-loop.

Owns the two sides and the job they do: a fixed number of requests is open at any time; when one ends, the next one that
continues none of the open conversations follows, as nobody goes on before the answer is there. Each side runs in a
process of its own (see `benchmarks.support.interleave`).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.prefix_bounds import conversation_of
from benchmarks.support.interleave import Conversation
from edged.bench.recorder import ReplayRecorder, percentiles_ms
from edged.bench.traces import Arrival, TraceRow, scale_rows
from edged.engine.engine import Engine
from edged.engine.request import Event, FinishEvent, Request, Sampling
from edged.settings.load import Settings

SHARING, ALONE = "edged with prefix sharing", "edged without"
SIDES = (SHARING, ALONE)
_LONGEST_WAIT_S = 600.0
_FIRST_ID = 3
"""Tokens below are left to those that mean something."""


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides are told at their start. `workloads`: a JSON file of lists of rows, by name."""

    model: str
    device: str
    dtype: str
    vocab: int
    workloads: str
    trace_block_tokens: int
    block_tokens: int
    context_tokens: int
    concurrency: int
    memory_mb: int


class _ClosedLoop:
    """An engine that is kept at `concurrency` open requests."""

    def __init__(self, job: Job, shares: bool) -> None:
        self._recorder = ReplayRecorder()
        self._concurrency = job.concurrency
        self._open: dict[str, int | None] = {}
        """Conversations by the request that is open."""
        self._changed = threading.Condition()
        settings = Settings.model_validate(
            {
                "model": {"device": job.device, "dtype": job.dtype},
                "cache": {"prefix_sharing": shares, "memory_mb": job.memory_mb},
            }
        )
        self._engine = Engine.build(settings, Path(job.model), self._deliver, lambda _records: None, None)
        self._engine.start()

    def _deliver(self, events: list[Event]) -> None:
        self._recorder.deliver(events)
        with self._changed:
            for event in events:
                if isinstance(event, FinishEvent):
                    del self._open[event.request_id]
            self._changed.notify_all()

    def run(self, rows: Sequence[TraceRow], load: Sequence[Arrival]) -> dict[str, Any]:
        """Send the load, which `rows` became, as fast as it is answered; its figures."""
        self._recorder = recorder = ReplayRecorder()
        waiting = [(str(number), conversation_of(row)) for number, row in enumerate(rows)]
        started = time.monotonic()
        while waiting:
            name, conversation = waiting.pop(self._next(waiting))
            self._open[name] = conversation
            arrival = load[int(name)]
            recorder.expect(name, time.monotonic(), len(arrival.prompt_ids))
            sampling = Sampling(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
            self._engine.submit(Request(name, arrival.prompt_ids, sampling))
        answers = recorder.whole_answers(lambda: self._engine.error, _LONGEST_WAIT_S)
        seconds = time.monotonic() - started
        ends = [answer.finish for answer in answers if answer.finish is not None]
        prompt_tokens = sum(end.prompt_tokens for end in ends)
        return {
            "seconds": seconds,
            "requests_per_s": len(load) / seconds,
            "prompt_tokens_per_s": prompt_tokens / seconds,
            "ttft_ms": percentiles_ms([answer.ttft_s for answer in answers if answer.ttft_s is not None]),
            "hit_share": sum(end.cached_tokens for end in ends) / prompt_tokens,
        }

    def _next(self, waiting: Sequence[tuple[str, int | None]]) -> int:
        """The index of the first request that may go now; waits until there is one."""

        def first() -> int | None:
            if len(self._open) >= self._concurrency:
                return None
            going_on = set(self._open.values()) - {None}
            return next((index for index, (_, talk) in enumerate(waiting) if talk not in going_on), None)

        with self._changed:
            if not self._changed.wait_for(lambda: first() is not None or self._engine.error, _LONGEST_WAIT_S):
                raise RuntimeError("edged's engine: no answer in time")
            found = first()
        if found is None:
            raise RuntimeError(f"edged's engine: {self._engine.error}")
        return found


def side_arguments(name: str, job: Job) -> list[str]:
    """Command-line arguments of this module that make a process the side `name`."""
    return [name, json.dumps(asdict(job))]


def main(arguments: list[str]) -> None:
    """Be one side: each question `{"workload": NAME, "seed": N}` is a round, with tokens that no other round has."""
    job = Job(**json.loads(arguments[1]))
    workloads = {
        name: [TraceRow(at_s, prompt, output, tuple(blocks)) for at_s, prompt, output, blocks in rows]
        for name, rows in json.loads(Path(job.workloads).read_text()).items()
    }
    loop = _ClosedLoop(job, arguments[0] == SHARING)
    conversation = Conversation()
    while True:
        question = conversation.question()
        rows = workloads[question["workload"]]
        load = scale_rows(
            rows,
            scale=job.block_tokens / job.trace_block_tokens,
            block_tokens=job.trace_block_tokens,
            context_tokens=job.context_tokens,
            token_ids=range(_FIRST_ID, job.vocab),
            seed=question["seed"],
        )
        conversation.answer(loop.run(rows, load))


if __name__ == "__main__":
    main(sys.argv[1:])
