"""Teacher forcing: decoding along given tokens, through the executor and the pages that serve requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from edged.engine.engine import Engine
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.engine.sequence import Sequence as Running
from edged.engine.sequence import SequenceStatus
from edged.scheduler.task import Grant, Kind, Plan, ServingTask
from edged.settings.load import Settings


class ForcedDecoding:
    """Decoding of sequences whose next tokens are given, not sampled."""

    def __init__(self, model: Path, settings: Settings) -> None:
        """Build the parts. `settings.model.graph_memory_mb` must be 0 on CUDA: captured iterations would hide their
        logits."""
        self.parts = Engine(settings, model)
        self._runner = self.parts.runner
        self._forward = self.parts.model.forward
        self._logits = torch.empty(0)
        setattr(self.parts.model, "forward", self._kept_forward)  # noqa: B010 - a method of one object is watched

    def _kept_forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self._logits = self._forward(ids, positions, rows)
        return self._logits

    def begin(self, tokens: Sequence[int], room: int) -> Running:
        """Return a sequence whose `tokens` are computed, with room for `room` more. Raises OutOfPages."""
        task = ServingTask(next(self.parts.stats.task_ids), Kind.PREFILL, 0.0, num_tokens=len(tokens))
        request = Request(str(task.task_id), tuple(tokens), Sampling(temperature=0.0, max_tokens=room))
        pages = -(-(len(tokens) + room) // self._runner.kv.page_size)
        sequence = Running(
            request, task, 0, 0.0, list(tokens), np.zeros(pages, np.int64), status=SequenceStatus.PREFILL
        )
        chunk = self.parts.settings.serving.max_batch_tokens
        while sequence.computed < len(tokens):
            self._run([sequence], chunk)
        sequence.status = SequenceStatus.DECODE
        return sequence

    def step(self, sequences: Sequence[Running], tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each sequence and compute it; return the next logits, [sequences, vocab] on the device.

        Sequences are pruned before, as the engine prunes them.
        """
        if self._runner.pruner is not None:
            for sequence in self._runner.pruner.due(sequences):
                self._runner.pruner.prune(sequence)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
        return self._run(sequences, 1)

    def end(self, sequence: Running) -> None:
        """Free a sequence's pages."""
        self._runner.pages.free(sequence)

    def _run(self, sequences: Sequence[Running], tokens: int) -> torch.Tensor:
        plan = Plan(grants=[Grant(sequence.task, tokens) for sequence in sequences])
        by_task = {sequence.task.task_id: sequence for sequence in sequences}
        work = self._runner.run(plan, by_task, {}, lambda: False, lambda: None)
        if len(work.prefilled) < len(sequences):
            raise RuntimeError("the cache has too few pages: set cache.memory_mb higher, or decode fewer at once")
        return self._logits
