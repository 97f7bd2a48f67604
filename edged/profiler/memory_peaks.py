"""What the largest pieces of work take of memory, measured beside what the memory model says.

Drives the same prober as the times.
"""

from __future__ import annotations

from collections.abc import Callable

from edged.engine.engine import Engine
from edged.engine.model.memory_model import iteration_bytes, lone_step_bytes
from edged.engine.model.memory_plan import shape_of
from edged.profiler.measure import Prober, Shape, StepShape
from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes
from edged.scheduler.cost.profile import MemoryPeak


def measure_peaks(parts: Engine) -> dict[str, MemoryPeak]:
    """By piece: the largest forward, and a step of full windows with and without its graph.

    Pages, weights and adapters are there before. RuntimeError where memory cannot be read, OSError where its peak
    cannot be reset.
    """
    prober, shape, settings, dtype = Prober(parts), shape_of(parts.model), parts.settings, parts.model.dtype
    kv_bytes = (parts.runner.pages.pool.pages - 1) * parts.model.page_bytes(settings.cache.page_size)
    forward = _largest_forward(parts)
    peaks = {
        "forward": MemoryPeak(
            modelled_bytes=iteration_bytes(shape, settings, dtype, kv_bytes),
            measured_bytes=_peak_of(parts, lambda: prober.run_forward(forward)),
        )
    }
    if parts.model.trainable_error:
        return peaks
    window, longest = settings.align.window_tokens, settings.align.max_pair_tokens
    pairs = 2 if 2 * window > longest else 1
    steps = {"step": StepShape(max(2 * window, longest) // pairs, pairs, keep_graph=False)}
    if settings.align.keep_graph:
        steps["kept graph"] = StepShape(min(window, longest), 1, keep_graph=True)
    for name, step in steps.items():
        peaks[name] = MemoryPeak(
            modelled_bytes=lone_step_bytes(shape, settings, dtype, step.keep_graph),
            measured_bytes=_peak_of(parts, lambda step=step: prober.run_step(step)),  # type: ignore[misc]
        )
    return peaks


def _largest_forward(parts: Engine) -> Shape:
    """As many tokens as an iteration may have: a few decodes, and one chunk that ends at the longest context."""
    serving, page = parts.settings.serving, parts.runner.pages.pool.page_size
    decodes = min(serving.max_sequences, serving.max_batch_tokens // 2, (parts.runner.pages.pool.pages - 1) // 4) - 1
    room = ((parts.runner.pages.pool.pages - 1) - decodes - 1) * page
    tokens = min(serving.max_batch_tokens - decodes, parts.max_context_tokens, room)
    return Shape(decodes, page - 1, ((tokens, min(parts.max_context_tokens, room) - tokens),))


def _peak_of(parts: Engine, work: Callable[[], None]) -> int:
    """Bytes above what is there before; once before, so that pages and workspaces are there."""
    device = parts.model.device
    work()
    before = used_bytes(device)
    start_peak(device)
    work()
    return max(0, peak_bytes(device) - before)
