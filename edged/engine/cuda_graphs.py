"""CUDA graphs of decode iterations: captured by batch size at start, replayed instead of launched kernel by kernel.

A small model's iteration is hundreds of kernels that each take less time than their launch; a graph is one launch.

A batch of n sequences runs in the next larger captured size. The rows beyond n are padding: they write to page 0,
which no sequence owns, attend to nothing else, lie in no LoRA tile, and leave their states in a slot of their own. The
forward is one graph with adapters and one without, and so is each of the two plain ways of drawing; rows with penalties
or truncated distributions are drawn without one.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from edged.engine.attention.packed_batch import PackedBatch, Segment, packed_rows, page_tables
from edged.engine.attention.paged import attention_over, attention_pass
from edged.engine.attention.selection import Backends
from edged.engine.kv.state import ZEROS
from edged.engine.kv.store import PagedKv
from edged.engine.lora import triton as triton_lora
from edged.engine.lora.runs import LoraTiles
from edged.engine.model.mixers import parts_of_decodes
from edged.engine.model.served_model import ServedModel
from edged.engine.sampling.params import SamplingRow
from edged.engine.sampling.sampler import SampledRows, choose, choose_greedy, is_plain, plain_parameters, sample
from edged.runtime import logs
from edged.tensors.device_copy import upload
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_TOLERANCE = 0.02
"""Largest difference of a replay's logits from those of the launches it replaces, as a share of the largest logit."""
Replay = Callable[[], None]


class OutOfGraphMemory(RuntimeError):
    """A capture did not fit into the memory that is available or allowed."""


class CudaGraphRecorder:
    """Records launches over fixed tensors as CUDA graphs that share one memory pool: one may run at a time."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device, self._max_bytes = device, max_bytes
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace for every stream that it has seen.
        self._aside = torch.cuda.Stream(device)
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)
        self.memory_bytes = 0
        """Bytes of GPU memory that the recordings hold."""

    def record(self, run: Replay) -> Replay:
        """Run `run`, and return a function that replays it. Raises OutOfGraphMemory, or what allocators raise.

        A capture is given up if it adds memory and all recordings would hold more than the limit.
        """
        # This also frees what a capture that was given up before held.
        torch.cuda.empty_cache()
        held = self._held()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # Compilation, tuning and allocation at the first run must not be part of the capture.
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            run()
            # A wait for the device would break the capture, and a broken one torch's allocator for good.
            with _no_waits():
                run()
        current.wait_stream(self._aside)
        # A capture that fails may leave its stream in place.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"),
        ):
            run()
        # Memory that the first run left in the allocator's cache does not belong to the capture.
        torch.cuda.empty_cache()
        self.memory_bytes = self._held()
        if is_too_much(self.memory_bytes, self.memory_bytes - held, self._max_bytes):
            raise OutOfGraphMemory(
                f"{self.memory_bytes >> 20} MiB would be more than model.graph_memory_mb = {self._max_bytes >> 20}"
            )
        return graph.replay

    def _held(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)


@contextmanager
def _no_waits() -> Iterator[None]:
    """Make calls that wait for the GPU raise RuntimeError, in any thread: other threads start later."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def is_too_much(held: int, added: int, most: int) -> bool:
    """Whether to give up a capture that added `added` bytes to the `held` ones, of which `most` are allowed.

    The pool keeps the memory of captures that were given up: later captures that fit into it cost nothing.
    """
    return held > most and added > 0


class _Fixed:
    """The tensors that captures read and write, for the largest size; smaller sizes use the first rows."""

    def __init__(self, rows: int, width: int, vocab: int, device: torch.device, padding: int) -> None:
        """`padding` is the slot that takes the states of rows that are padding, where layers keep any."""
        self.ints = torch.zeros(4, rows, dtype=torch.int64, device=device)
        """Token id, position (and context), page and offset in it, by row."""
        self.tables = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._padding = padding
        self.states = torch.tensor([[ZEROS], [padding]], device=device).repeat(1, rows)
        """Slots of the layers' states before and after, by row."""
        self.tiles = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self.parameters = torch.zeros(3, rows, dtype=torch.float64, device=device)
        """`plain_parameters` of the rows."""
        self.order = torch.arange(rows, device=device)
        self.logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.broken = torch.zeros(rows, dtype=torch.bool, device=device)

    def fill(self, rows: int, segments: Sequence[Segment], parameters: np.ndarray | None, page_size: int) -> bool:
        """Copy an iteration in; `segments` are single tokens, other rows padding. True if any has an adapter."""
        values, runs = packed_rows(segments, page_size)
        tables = page_tables(segments, page_size)
        ints, tiles = np.zeros((4, rows), np.int64), np.zeros((rows, 3), np.int64)
        padded = np.zeros((rows, tables.shape[1]), np.int64)
        ints[:, : len(segments)], padded[: len(segments)] = values, tables
        states = np.full((2, rows), [[ZEROS], [self._padding]], np.int64)
        states[:, : len(segments)] = np.transpose([segment.states for segment in segments])
        if runs:
            used = triton_lora.tiles_of(runs, triton_lora.FEW_ROWS)
            tiles[: len(used)] = used
        # Doubles are viewed as integers, so that one transfer takes all.
        drawn = [] if parameters is None else [parameters.reshape(-1).view(np.int64)]
        parts = [ints.reshape(-1), tiles.reshape(-1), padded.reshape(-1), states.reshape(-1), *drawn]
        moved = upload(parts, self.ints.device)
        self.ints[:, :rows].copy_(moved[0].view(4, rows))
        self.tiles[:rows].copy_(moved[1].view(rows, 3))
        self.tables[:rows, : padded.shape[1]].copy_(moved[2].view(padded.shape))
        self.states[:, :rows].copy_(moved[3].view(2, rows))
        if drawn:
            self.parameters[:, : len(segments)].copy_(moved[4].view(torch.float64).view(3, -1))
        return bool(runs)


class DecodeGraphs:
    """Captured decode iterations of one model, by batch size; one thread at a time may use it."""

    def __init__(
        self, model: ServedModel, kv: PagedKv, paths: Backends, recorder: CudaGraphRecorder, max_rows: int, width: int
    ) -> None:
        """Captures batches of up to `max_rows` sequences of at most `width` pages, the largest size first: the smaller
        ones then find its memory. A size that does not fit is left out."""
        self._model, self._kv, self._paths, self._recorder = model, kv, paths, recorder
        self._replays: dict[int, dict[str, Replay]] = {}
        padding = ZEROS if kv.states is None else kv.states.padding
        self.replayed = 0
        sizes = [rows for rows in _SIZES if rows < max_rows]
        sizes.append(next((rows for rows in _SIZES if rows >= max_rows), max_rows))
        started = time.monotonic()
        fixed: _Fixed | None = None
        for rows in reversed(sizes):
            try:
                # The tensors have the largest size that finds memory: smaller batches use the first rows.
                fixed = self._fixed = fixed or _Fixed(rows, width, model.shape.vocab_size, model.device, padding)
                self._replays[rows] = self._capture(rows)
            except Exception as error:
                reason = logs.first_line(error)
                if not (isinstance(error, OutOfGraphMemory) or out_of_memory(error)):
                    # Earlier captures were compared with their launches: they stay in use.
                    log.warning("no more decode iterations are captured: %s", reason)
                    break
                log.warning("decode iterations of %d sequences are not captured: %s", rows, reason)
        if self._replays:
            seconds, megabytes = time.monotonic() - started, recorder.memory_bytes >> 20
            captured = ", ".join(map(str, sorted(self._replays)))
            log.info("decode iterations of %s sequences captured: %.1f s, %d MiB", captured, seconds, megabytes)

    @torch.inference_mode()
    def _capture(self, rows: int) -> dict[str, Replay]:
        """Capture the forward with adapters and without, and both plain ways of drawing, for `rows` rows."""
        replays = {}
        for name, adapted in (("adapted", True), ("base", False)):
            replays[name] = self._recorder.record(partial(self._forward, rows, adapted))
            # These logits are of the runs before the capture, which itself computes nothing.
            wanted = self._fixed.logits[:rows].clone()
            self._fixed.logits.zero_()
            replays[name]()
            if not bool((self._fixed.logits[:rows] - wanted).abs().max() <= _TOLERANCE * wanted.abs().max()):
                raise RuntimeError("a replay gives other numbers than the launches that were captured")
        for name, greedily in (("greedy", True), ("draw", False)):
            replays[name] = self._recorder.record(partial(self._draw, rows, greedily))
        return replays

    def _forward(self, rows: int, adapted: bool) -> None:
        fixed = self._fixed
        ids, positions, pages, offsets = fixed.ints[:, :rows]
        batch = PackedBatch(
            input_ids=ids[None],
            position_ids=positions[None],
            pages=pages,
            offsets=offsets,
            logit_rows=fixed.order[:rows],
            decode_rows=fixed.order[:rows],
            decode_tables=fixed.tables[:rows],
            decode_context=positions,
        )
        tiles = LoraTiles(fixed.tiles[:rows], triton_lora.FEW_ROWS) if adapted else None
        attention = attention_over(batch, self._kv, self._paths.decode)
        attention.parts = parts_of_decodes(*fixed.states[:, :rows])
        with attention_pass(attention), self._model.lora.packed([], tiles):
            logits = self._model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
        fixed.logits[:rows].copy_(logits)

    def _draw(self, rows: int, greedily: bool) -> None:
        fixed = self._fixed
        logits = fixed.logits[:rows]
        token_ids, broken = choose_greedy(logits) if greedily else choose(logits, fixed.parameters[:, :rows])
        fixed.token_ids[:rows].copy_(token_ids)
        fixed.broken[:rows].copy_(broken)

    def fits(self, sequences: int) -> bool:
        """Whether a batch of so many sequences was captured."""
        return sequences <= max(self._replays, default=0)

    def run(self, segments: Sequence[Segment], rows: Sequence[SamplingRow]) -> SampledRows:
        """Sample the next token of each of `segments`: single tokens, as many as fit, sorted by adapter."""
        n, fixed = len(segments), self._fixed
        size = min(size for size in self._replays if size >= n)
        replays = self._replays[size]
        plain = all(map(is_plain, rows))
        greedy = plain and all(row.sampling.temperature == 0 for row in rows)
        parameters = plain_parameters(rows) if plain and not greedy else None
        adapted = fixed.fill(size, segments, parameters, self._kv.page_size)
        replays["adapted" if adapted else "base"]()
        self.replayed += 1
        if not plain:
            return sample(fixed.logits[:n], rows)
        replays["greedy" if greedy else "draw"]()
        return SampledRows(fixed.token_ids[:n], fixed.broken[:n], rows, fixed.logits[:n])

    def watch(self, through: Callable[[Replay], Replay]) -> None:
        """Wrap every forward's replay in `through`, from now on."""
        for replays in self._replays.values():
            replays |= {name: through(replays[name]) for name in ("adapted", "base")}

    def report(self) -> dict[str, object]:
        """Return the captured batch sizes, their memory and how often they were replayed."""
        return {
            "sizes": sorted(self._replays),
            "memory_mb": self._recorder.memory_bytes / 2**20,
            "replayed": self.replayed,
        }
