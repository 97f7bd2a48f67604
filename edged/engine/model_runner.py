"""The model runner runs one plan: a packed forward over serving and fine-tune tokens, sampling, then units."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edged.align.dpo.layout import Piece
from edged.align.dpo.micro_batch import MicroBatch, PairForward
from edged.align.pair_queues import FinetuneStep
from edged.cache.page_pool import OutOfPages
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import attention_over, attention_pass
from edged.engine.attention.selection import Backends
from edged.engine.kv.state import ZEROS, SlotPair, slots_of
from edged.engine.kv.store import PagedKv
from edged.engine.kv_pages import KvPages
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.layer_access import CapturePlan, LayerTap, PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.engine.sampling.params import SamplingRow
from edged.engine.sampling.sampler import Drawn, SampledRows, sample
from edged.engine.sequence import Sequence
from edged.runtime.process import give_back_memory
from edged.scheduler.task import FinetuneTask, Grant, Kind, Plan, Task, TaskOutcome, Unit
from edged.tensors.cpu_threads import CpuThreads
from edged.tensors.device_copy import upload
from edged.tensors.oom import out_of_memory

if TYPE_CHECKING:
    from edged.engine.cuda_graphs import DecodeGraphs  # brings Triton, which is slow to import
    from edged.engine.pruner import Pruner

log = logging.getLogger("edged.engine")
_SCORED_TOKENS = 64
"""The most tokens of a prompt whose log-probabilities are computed in one iteration."""


@dataclass(slots=True)
class OpenStep:
    """An open fine-tune step as a task of the scheduler, with the LoRA slots of its adapters' policy streams."""

    step: FinetuneStep
    task: FinetuneTask
    slots: dict[str, int]
    opened_s: float
    practice: bool = False
    """Whether it learns of practice, and of no pairs that people gave."""
    states: SlotPair = (ZEROS, ZEROS)
    """Slots of the layers' states for the pair whose forward is under way, where layers keep any."""


Pieces = list[tuple[PairForward, Piece]]
PackedPieces = list[tuple[OpenStep, Pieces, list[Segment]]]
"""Pieces of steps in a forward, with their open steps and segments."""


@dataclass(slots=True)
class RunnerOutput:
    """The results of a plan. `sampled` sequences are in the order of `drawn`, once for each row that they sampled."""

    prefilled: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences whose K/V advanced, with the number of tokens."""
    segments: list[Segment] = field(default_factory=list)
    """Segments of `prefilled`, in the same order."""
    broken: set[int] = field(default_factory=set)
    """Task ids of sequences with numbers that were not finite: their K/V are unusable."""
    sampled: list[Sequence] = field(default_factory=list)
    drawn: Drawn | None = None
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with tokens of their prompts that were scored, and the number of those, in the order of `scores`."""
    scores: Drawn | None = None
    finetuned: dict[int, int] = field(default_factory=dict)
    """Number of tokens by which open steps' forwards advanced, by task id."""
    units_run: dict[int, int] = field(default_factory=dict)
    """Number of units that ran, by task id."""
    units: list[tuple[Unit, float]] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)
    """Errors of open steps whose unit raised, by task id."""
    forward_s: float = 0.0

    def finetune_outcomes(self, plan: Plan, open_steps: Mapping[int, Any]) -> list[TaskOutcome]:
        """Return the outcomes of the plan's grants to `open_steps`, which are by task id."""
        outcomes = []
        for task in (grant.task for grant in plan.grants if grant.task.task_id in open_steps):
            num_tokens, units = self.finetuned.get(task.task_id, 0), self.units_run.get(task.task_id, 0)
            ended = open_steps[task.task_id].step.finished or task.task_id in self.failed
            outcomes.append(TaskOutcome(task, num_tokens, units, None if ended else Kind.FINETUNE))
        return outcomes


class ModelRunner:
    """Runs plans on the model; the engine thread alone calls it."""

    def __init__(
        self,
        model: ServedModel,
        kv: PagedKv,
        pages: KvPages,
        backends: Backends,
        max_context_tokens: int,
        threads: CpuThreads | None,
        graphs: DecodeGraphs | None,
        pruner: Pruner | None,
        why_not: Mapping[str, str],
    ) -> None:
        """`graphs` replay iterations that consist of decodes; `why_not` has the reasons for which "decode", "prefill",
        "lora", "layers" or "graphs" are computed the slower way."""
        self.model, self.kv, self.pages, self.graphs, self.pruner = model, kv, pages, graphs, pruner
        self.max_context_tokens, self.end_ids, self.threads = max_context_tokens, model.end_ids(), threads
        self._backends, self._why_not = backends, why_not
        self.decoder = PagedDecoder(model, kv)
        self._lora = model.lora
        self._tap = LayerTap(model)
        self._unit_ended_s = 0.0
        self._scores: SampledRows | None = None
        """Log-probabilities of prompts that the device computes."""
        # A state that took in a token of a draft that was not right could not go back.
        self.overlaps, self.drafts = model.device.type == "cuda", kv.states is None

    @property
    def last_sign_s(self) -> float:
        """The time at which a layer last began or a unit ended (monotonic clock): an iteration may take longer than a
        watchdog waits."""
        return max(self._tap.reached_s, self._unit_ended_s)

    def report(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the status' parts on pages, on pruning of `sequences`, and on the kernels in use and why."""
        return {
            **self.pages.report(self.model.page_bytes(self.pages.page_size)),
            "pruning": {"mode": "off"} if self.pruner is None else self.pruner.report(sequences),
            "states": None if self.kv.states is None else {**self.kv.states.report(), "copies": self.pages.trie.states},
            "paths": {
                "decode": self._backends.decode,
                "prefill": "triton" if self._backends.tile_tokens else "gathered",
                "lora": self._lora.runs.kernel,
                "why_not": self._why_not,
            },
            "decode_graphs": None if self.graphs is None else self.graphs.report(),
        }

    def begin_thread(self) -> None:
        """Prepare the calling thread to run plans, on the model's device or the cores that other programs leave."""
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        if self.threads is not None:
            self.threads.begin()

    def begin_iteration(self, now: float) -> None:
        """Follow the number of cores that other programs leave now."""
        if self.threads is not None:
            self.threads.follow(now)

    def check_device(self) -> None:
        """Raise the error of a device that does nothing more."""
        self.model.check_device()

    def return_memory(self) -> None:
        """Return memory of freed tensors to the system."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        give_back_memory()

    def run(
        self,
        plan: Plan,
        sequences: dict[int, Sequence],
        open_steps: dict[int, OpenStep],
        interrupted: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> RunnerOutput:
        """Run a plan. `interrupted` is asked between units whether to stop, since a command has arrived.

        `while_waiting` is called after the forward is queued on the device and before its tokens are waited for.
        """
        work = RunnerOutput()
        if self.pruner is not None:
            self.pruner.begin_iteration()
        segments: list[Segment] = []
        takes: PackedPieces = []
        for grant in plan.grants:
            if not grant.num_tokens:
                continue
            try:
                if grant.task.task_id in sequences:
                    segments.append(self._sequence_segment(sequences[grant.task.task_id], grant.num_tokens, work))
                else:
                    open_step = open_steps[grant.task.task_id]
                    pieces = open_step.step.packing.next_pieces(grant.num_tokens)
                    about = self.kv.page_size, self.pages.allocate, open_step.states
                    parts = segments_of(pieces, open_step.slots, *about)
                    takes.append((open_step, pieces, parts))
                    segments += parts
            except OutOfPages:
                # This is rare, since the plan was made from the same counts: the task waits an iteration.
                continue
        for (sequence, _), segment in zip(work.prefilled, work.segments, strict=True):
            segments += self._draft_segments(sequence, segment, work)
        if segments:
            started = time.perf_counter()
            self._forward(segments, takes, work, while_waiting)
            work.forward_s = time.perf_counter() - started
        for grant in plan.grants:
            if grant.units:
                self._run_units(open_steps[grant.task.task_id], grant, interrupted, work)
        return work

    def _sequence_segment(self, sequence: Sequence, num_tokens: int, work: RunnerOutput) -> Segment:
        first, rows = sequence.computed, sequence.rows
        if sequence.unscored(first, num_tokens):
            # Logits of a whole chunk would take hundreds of MiB.
            num_tokens = min(num_tokens, _SCORED_TOKENS)
        num_tokens = self.pages.grow(sequence, self.pages.up_to_border(sequence, num_tokens))
        work.prefilled.append((sequence, num_tokens))
        done = first + num_tokens == len(sequence.token_ids)
        if done:
            work.sampled.append(sequence)
        unscored = sequence.unscored(first, num_tokens)
        if unscored:
            work.scored.append((sequence, len(unscored)))
        segment = Segment(
            token_ids=sequence.token_ids[first : first + num_tokens],
            context=rows,
            pages=sequence.table,
            slot=sequence.slot,
            position=first,
            samples=done,
            scores=range(unscored.start - first, unscored.stop - first),
            compacted=sequence.compacted,
            watch=self.pruner.observer(sequence) if self.pruner is not None and sequence.decoding else None,
            states=(sequence.state if first else ZEROS, sequence.state),
        )
        work.segments.append(segment)
        return segment

    def _draft_segments(self, sequence: Sequence, last: Segment, work: RunnerOutput) -> list[Segment]:
        """Return further decodes of a sequence, each a token of its draft; those without a page are left out."""
        if sequence.draft is None or not (sequence.decoding and last.is_plain_decode):
            sequence.draft = None
            return []
        del sequence.draft.tokens[self.pages.reach(sequence, len(sequence.draft.tokens)) :]
        work.sampled += [sequence] * len(sequence.draft.tokens)
        return [
            Segment([token], last.context + at, sequence.table, sequence.slot, last.position + at, samples=True)
            for at, token in enumerate(sequence.draft.tokens, 1)
        ]

    def _forward(
        self, segments: list[Segment], takes: PackedPieces, work: RunnerOutput, while_waiting: Callable[[], None]
    ) -> None:
        if self.pages.offload is not None:
            self.pages.offload.join()
        with torch.inference_mode():
            alone = not takes and all(segment.is_plain_decode and segment.samples for segment in segments)
            # Captured forwards know no factors (IA3, DoRA).
            alone = alone and self._lora.factor_slots.isdisjoint(segment.slot for segment in segments)
            if self.graphs is not None and alone and self.graphs.fits(len(segments)):
                rows: SampledRows | None = self._replay(self.graphs, segments, work)
            else:
                rows = self._launch(segments, takes, work)
            while_waiting()
            if self._scores is not None:
                work.scores, self._scores = self._scores.read(), None
            if rows is not None:
                work.drawn = rows.read()
            elif self._tap.broken is None:
                # Nothing is read, but the cost model must see the forward's time, not that of its launches.
                self._wait()
        self._find_broken(work)
        for sequence, num_tokens in work.prefilled:
            sequence.computed += num_tokens
        for open_step, pieces, _ in takes:
            num_tokens = sum(piece.stop - piece.start for _, piece in pieces)
            open_step.step.packing.advance(num_tokens)
            work.finetuned[open_step.task.task_id] = num_tokens

    def _find_broken(self, work: RunnerOutput) -> None:
        """Find prompts whose chunk had numbers that were not finite: their last token alone would not show it."""
        rows = work.drawn.beside if work.drawn is not None else None
        if work.drawn is None and self._tap.broken is not None:
            rows = self._tap.broken.cpu().numpy()
        self._tap.broken = None
        if rows is not None and rows.any():
            for (sequence, _), segment in zip(work.prefilled, work.segments, strict=True):
                if rows[segment.rows].any():
                    work.broken.add(sequence.task.task_id)

    def _replay(self, graphs: DecodeGraphs, segments: list[Segment], work: RunnerOutput) -> SampledRows:
        """Replay a captured iteration over decodes, in the order of their adapters' slots."""
        order = sorted(range(len(segments)), key=lambda index: segments[index].slot)
        work.sampled = [work.sampled[index] for index in order]
        return graphs.run([segments[index] for index in order], self._sampling_rows(work))

    def _launch(self, segments: list[Segment], takes: PackedPieces, work: RunnerOutput) -> SampledRows | None:
        """Launch a packed forward kernel by kernel, and sample the next tokens of `work.sampled`."""
        self._scores = None
        lora = self._lora.runs.kernel == "triton"
        batch = pack(segments, self.kv, self.model.device, self._backends.tile_tokens, lora)
        kept: list[CapturePlan] = [
            capture_plan_of(open_step.step.packing, pieces, parts, self.model.device)
            for open_step, pieces, parts in takes
        ]
        self._tap.arm(kept, checks=any(len(segment.token_ids) > 1 for segment in work.segments))
        try:
            attention = attention_pass(attention_over(batch, self.kv, self._backends.decode))
            with attention, self._lora.packed(batch.runs, batch.lora_tiles):
                logits = self.model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
        finally:
            self._tap.disarm()
        logits = self._without_scored(logits, segments, work) if work.scored else logits
        return sample(logits, self._sampling_rows(work), self._tap.broken) if work.sampled else None

    def _without_scored(self, logits: torch.Tensor, segments: list[Segment], work: RunnerOutput) -> torch.Tensor:
        """Queue the log-probabilities of the prompts' tokens; return the logits of the rows that are sampled."""
        sampled, scored, done = list[int](), list[int](), 0
        for segment in segments:
            scored += range(done, done + len(segment.scores))
            done += len(segment.logit_rows)
            sampled += [done - 1] if segment.samples else []
        following = [
            token
            for sequence, count in work.scored
            for token in sequence.token_ids[len(sequence.scored) + 1 : len(sequence.scored) + 1 + count]
        ]
        parts = [np.array(part, np.int64) for part in (sampled, scored, following)]
        kept, rows, token_ids = upload(parts, logits.device)
        asked = [SamplingRow(sequence.request.sampling, 0, 0) for sequence, count in work.scored for _ in range(count)]
        self._scores = SampledRows(
            token_ids, torch.zeros_like(token_ids, dtype=torch.bool), asked, logits[rows].float()
        )
        return logits[kept]

    def _sampling_rows(self, work: RunnerOutput) -> list[SamplingRow]:
        rows: list[SamplingRow] = []
        ahead = Counter[int]()
        for sequence in work.sampled:
            rows.append(sequence.row(self.end_ids, ahead[sequence.task.task_id]))
            ahead[sequence.task.task_id] += 1
        return rows

    def _run_units(
        self, open_step: OpenStep, grant: Grant[Task], interrupted: Callable[[], bool], work: RunnerOutput
    ) -> None:
        ran, started = 0, time.perf_counter()
        while ran < grant.units:
            # At least one unit or forward of fine-tuning runs: a stream of arrivals must not starve a granted step.
            begun = work.units or work.finetuned
            if open_step.step.finished or open_step.step.micro_batch.tokens_left or (begun and interrupted()):
                break
            try:
                unit = Unit(*open_step.step.run_unit(grant.window if ran + 1 == grant.units else 0))
            except Exception as error:
                if not out_of_memory(error):
                    # A device that has failed raises here, too: then the step is not to blame.
                    self.model.check_device()
                    log.exception("a fine-tune unit failed")
                # The traceback's frames hold the step's tensors, which would stay until cycles are collected.
                work.failed[open_step.task.task_id] = error.with_traceback(None)
                break
            # A device that had all units queued could not be interrupted.
            self._wait()
            ended = time.perf_counter()
            self._unit_ended_s = time.monotonic()
            work.units.append((unit, ended - started))
            ran, started = ran + 1, ended
        work.units_run[open_step.task.task_id] = ran

    def _wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.overlaps:
            torch.cuda.current_stream(self.model.device).synchronize()

    def close(self) -> None:
        """Close the offload store; no plan follows."""
        if self.pages.offload is not None:
            self.pages.offload.close()


def segments_of(
    pieces: Pieces,
    slots: Mapping[str, int],
    page_size: int,
    allocate: Callable[[int], list[int] | np.ndarray],
    states: SlotPair = (ZEROS, ZEROS),
) -> list[Segment]:
    """Make the segments of taken pieces, in the same order, each with the LoRA slot of its pair's adapter.

    The streams' pages are extended to hold them. `states` are the slots of the step's layers' states.
    """
    segments = []
    for pair_forward, piece in pieces:
        needed = -(-piece.stop // page_size) - len(pair_forward.pages)
        if needed > 0:
            pair_forward.pages = np.concatenate((pair_forward.pages, allocate(needed)))
        segments.append(
            Segment(
                token_ids=pair_forward.layout.ids[piece.start : piece.stop],
                context=piece.start,
                pages=pair_forward.pages,
                slot=NO_SLOT if pair_forward.reference else slots[pair_forward.pair.adapter],
                position=piece.position,
                hidden=piece.hidden,
                states=slots_of(piece, pair_forward.layout.prompt, states),
            )
        )
    return segments


def capture_plan_of(
    micro_batch: MicroBatch, pieces: Pieces, segments: list[Segment], device: torch.device
) -> CapturePlan:
    """Return what the layer tap is to keep of a packed batch that holds `segments`."""
    rows: list[np.ndarray] = []
    last: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    kept_start = -1
    for (pair_forward, piece), segment in zip(pieces, segments, strict=True):
        rows.append(np.arange(segment.start, segment.start + piece.stop - piece.start))
        last.append(np.arange(pair_forward.row + piece.start, pair_forward.row + piece.stop))
        if pair_forward.kept >= 0:
            kept_start = kept_start if kept else pair_forward.kept + piece.start
            kept.append(rows[-1])
    moved = upload([np.concatenate(part) for part in (rows, last, kept) if part], device)
    inputs, kept_rows = (micro_batch.inputs, moved[2]) if kept else (None, None)
    return CapturePlan(micro_batch.last, moved[0], moved[1], inputs, kept_rows, kept_start)
