"""Builds an engine's parts from settings and a model directory, with the sizes that follow from free memory."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from edged.align.adapters.adapter import AdapterFiles, LoraSpec
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.adapters.loader import AdapterLoader
from edged.align.adapters.writer import AdapterWriter
from edged.align.feedback.pair import Record
from edged.align.trainer import Trainer
from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import PrefixTrie, TrieStats
from edged.engine.attention.selection import Backends, pick_lora_kernel, pick_paths
from edged.engine.command_queue import CommandQueue
from edged.engine.finetuning import FinetuneJobs
from edged.engine.initial_prices import first_cost_model, subject_of
from edged.engine.kv.offload import KvOffload, pick_spill
from edged.engine.kv.store import KvStore
from edged.engine.kv_pages import KvPages
from edged.engine.loop import EngineLoop, IterationSampler
from edged.engine.lora.slots import SlotTable
from edged.engine.model.cpu_layers import shorten_layers
from edged.engine.model.memory_model import STATE_BYTES, adapter_weights, bounded, page_count
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import ModelRunner
from edged.engine.oom_recovery import OomRecovery
from edged.engine.pruner import Pruner
from edged.engine.recovery import Recovery
from edged.engine.request import Event
from edged.engine.resource_limits import ResourceLimits
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters, percentile
from edged.scheduler.cost.profile import Subject
from edged.scheduler.policies.base import Row
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from edged.tensors.cpu_threads import CpuThreads, apart, beside

if TYPE_CHECKING:
    from edged.engine.cuda_graphs import DecodeGraphs

log = logging.getLogger("edged.engine")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine's parts, put together; no part knows this record."""

    settings: Settings
    live: Live[Settings]
    """The settings in force; the engine thread alone replaces them."""
    name: str
    path: str
    model: ServedModel
    runner: ModelRunner
    scheduler: Scheduler
    subject: Subject
    """What a profile must be of to be used here."""
    slots: SlotTable
    trainer: Trainer
    sequences: SequenceTable
    finetuning: FinetuneJobs
    limits: ResourceLimits
    commands: CommandQueue
    loop: EngineLoop
    stats: Counters
    max_context_tokens: int
    task_ids: itertools.count[int]
    temporary: tempfile.TemporaryDirectory[str] | None
    """Holds the adapters of an engine without a data folder; it goes with the engine."""

    def report(self) -> dict[str, Any]:
        """Model, pages, prefixes, cost model and scheduler, as the status shows them."""
        model, pages, pool = self.model, self.runner.pages, self.runner.pages.pool
        return {
            "model": {
                "name": self.name,
                "path": self.path,
                "architecture": model.shape.architecture,
                "parameters": model.shape.parameters,
                "weight_bytes": model.shape.weight_bytes,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "max_context_tokens": self.max_context_tokens,
                "vocab_size": model.shape.vocab_size,
                "fingerprint": self.trainer.adapter_cache.spec.fingerprint,
                "trust_remote_code": self.settings.model.trust_remote_code,
            },
            "cost_model": self.scheduler.cost.report(),
            "scheduler": {
                "policy": self.settings.scheduler.policy,
                "decision_ms_p50": percentile(list(self.stats.decision_ms), 0.5),
            },
            "pages": {
                "total": pool.pages - 1,
                "free": pool.free_pages,
                "cached": pages.evictable,
                "retired": pool.pages - pool.capacity,
                "page_size": pool.page_size,
                "bytes_per_page": model.page_bytes(pool.page_size),
            },
            "memory": self._memory(),
            "pruning": {"mode": "off"} if self.runner.pruner is None else self.runner.pruner.report(),
            "paths": self.runner.report(),
            "decode_graphs": None if self.runner.graphs is None else self.runner.graphs.report(),
            "prefix": _prefix_report(pages.trie, pages.offload),
        }

    def _memory(self) -> dict[str, int]:
        """What the parts hold, in bytes: of adapters their slots, and the states in memory."""
        adapter_cache = self.trainer.adapter_cache
        state = STATE_BYTES * adapter_weights(tuple(adapter_cache.spec.shapes.values()), adapter_cache.spec.rank)
        return {
            "weights_bytes": self.model.shape.weight_bytes,
            "kv_bytes": (self.runner.pages.pool.pages - 1) * self.model.page_bytes(self.runner.pages.page_size),
            "adapters_bytes": self.model.lora.size_bytes + adapter_cache.count * state,
        }


def _prefix_report(trie: PrefixTrie | None, spill: KvOffload | None) -> dict[str, Any]:
    """What sharing prefixes saved; `hit_tokens` were not computed again, `restored_tokens` of them were spilled."""
    stats = trie.stats if trie is not None else TrieStats()
    return {
        "prompt_tokens": stats.prompt_tokens,
        "hit_tokens": stats.hit_tokens,
        "hit_share": stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        "restored_tokens": stats.restored_tokens,
        "evicted_pages": stats.evicted_pages,
        "spilled_pages": stats.spilled_pages,
        "spill": {
            "kind": spill.kind if spill is not None else "off",
            "pages": trie.spilled_pages if trie is not None else 0,
            "capacity": spill.capacity if spill is not None else 0,
        },
    }


Deliver = Callable[[list[Event]], None]
Journal = Callable[[list[Record]], "Future[None] | None"]


def build_parts_apart(
    settings: Settings,
    model_dir: Path,
    data_dir: Path | None,
    deliver: Deliver = lambda _events: None,
    journal: Journal = lambda _records: None,
) -> EngineParts:
    """As `build_parts`, for an engine's thread to compute with all cores: the calling thread works alone from now on
    (see `threads.beside`)."""
    beside()
    return apart(lambda: build_parts(settings, model_dir, data_dir, deliver, journal))


def build_parts(
    settings: Settings,
    model_dir: Path,
    data_dir: Path | None,
    deliver: Deliver = lambda _events: None,
    journal: Journal = lambda _records: None,
) -> EngineParts:
    """Load the model and make the parts; see `Engine.build`. Raises ModelRefused with the reason."""
    model = ServedModel.load(model_dir, settings.model)
    if model.device.type == "cuda":
        # Triton launches on the thread's current device, whatever its tensors say.
        torch.cuda.set_device(model.device)
    threads = CpuThreads(settings.model.threads, model.shape.parameters) if model.device.type == "cpu" else None
    if model.trainable_error:
        log.warning("%s", model.trainable_error)
    settings = bounded(settings, model)
    live = Live(settings)
    model.attach_lora(settings.align, settings.align.max_active_adapters)
    native = settings.model.short_layers
    if settings.model.pack_weights and (reason := model.pack_weights(native, settings.model.narrow_weights)):
        log.info("weights are not packed: %s", reason)
    if native and (reason := shorten_layers(model)):
        log.info("layers are computed as the model has them: %s", reason)
    pages = page_count(model, settings)
    kv = model.new_kv(pages, settings.cache.page_size)
    usable = pages - 1
    temporary = None if data_dir else tempfile.TemporaryDirectory(prefix="edged-")
    folder = Path(temporary.name) if temporary else Path(data_dir or "")
    longest = min(settings.model.max_context_tokens or model.shape.max_positions, model.shape.max_positions)
    max_context = min(longest, usable * settings.cache.page_size)
    name = settings.model.name or Path(model_dir).name
    shapes = {linear: (wrapped.in_features, wrapped.out_features) for linear, wrapped in model.lora.linears.items()}
    spec = lora_spec(shapes, name, model.fingerprint, settings.align)
    files = AdapterFiles(folder / "adapters" / spec.fingerprint, spec, settings.store.keep_versions)
    subject = subject_of(model, name, settings.model, threads)
    scheduler = Scheduler(settings.scheduler, first_cost_model(model, subject, settings.scheduler.profile, data_dir))
    runner = _build_runner(model, kv, pages, settings, folder, max_context, threads)
    adapter_cache, slots = AdapterCache(spec, live, model.device, files), SlotTable(model.lora)
    stats, task_ids, commands = Counters(), itertools.count(1), CommandQueue()
    writer = AdapterWriter(adapter_cache, live, commands.offer, journal)

    def on_read(adapter: str, error: str) -> None:
        sequences.on_fetched(adapter, error, time.monotonic())

    loader = AdapterLoader(adapter_cache, lambda name, state: trainer.take_in(name, state), on_read, commands.offer)
    sequences = SequenceTable(
        settings.serving,
        scheduler,
        runner.pages,
        runner.pruner,
        slots,
        adapter_cache,
        loader.fetch,
        stats,
        task_ids,
        max_context,
        model.end_ids(),
    )
    trainer = Trainer(
        adapter_cache,
        live,
        runner.decoder,
        runner.pages.release,
        usable * kv.page_size,
        sequences.on_publish,
        writer.bring,
    )
    finetuning = FinetuneJobs(
        live, model, scheduler, trainer, runner.pages, slots, loader, writer, stats, task_ids, journal
    )
    limits = ResourceLimits(settings.serving, runner, scheduler, sequences, finetuning, stats, max_context)
    memory = OomRecovery(settings.serving, sequences, finetuning, runner.return_memory)
    recovery = Recovery(scheduler, sequences, finetuning, memory, runner.check_device, time.monotonic)
    sampler = IterationSampler(scheduler, journal)
    loop = EngineLoop(
        commands,
        limits,
        scheduler,
        runner,
        sequences,
        finetuning,
        recovery,
        stats,
        settings.scheduler,
        deliver,
        sampler.observe,
    )
    return EngineParts(
        settings=settings,
        live=live,
        name=name,
        path=str(model_dir),
        model=model,
        runner=runner,
        scheduler=scheduler,
        subject=subject,
        slots=slots,
        trainer=trainer,
        sequences=sequences,
        finetuning=finetuning,
        limits=limits,
        commands=commands,
        loop=loop,
        stats=stats,
        max_context_tokens=max_context,
        task_ids=task_ids,
        temporary=temporary,
    )


def _build_runner(
    model: ServedModel,
    kv: KvStore,
    pages: int,
    settings: Settings,
    folder: Path,
    max_context: int,
    threads: CpuThreads | None,
) -> ModelRunner:
    """The runner over `pages` of KV cache, as settings, policy and device have it; `folder` is for evicted prefixes."""
    policy = ROWS[settings.scheduler.policy]
    pool = PagePool(pages, settings.cache.page_size)
    # Page tables are padded with page 0: no sequence may own it.
    pool.allocate(1)
    shares = settings.cache.prefix_sharing and policy.shares_prefixes
    offload = pick_spill(kv, settings.cache, folder) if shares else None
    kv_pages = KvPages(pool, PrefixTrie(pool, offload) if shares else None, offload)
    why_not_lora = pick_lora_kernel(model.lora, settings.model)
    backends = pick_paths(kv, settings.model, model.shape.heads // model.shape.kv_heads)
    why_not_graphs = _why_not_graphs(model, backends, settings)
    if why_not_graphs and model.device.type == "cuda":
        log.info("decode iterations are not captured: %s", why_not_graphs)
    reasons = {**backends.why_not, "lora": why_not_lora, "graphs": why_not_graphs}
    return ModelRunner(
        model,
        kv,
        kv_pages,
        backends,
        end_ids=model.end_ids(),
        threads=threads,
        graphs=None if why_not_graphs else _graphs(model, kv, backends, settings),
        pruner=_pruner(model, kv, kv_pages, policy, settings, max_context),
        why_not={part: reason for part, reason in reasons.items() if reason},
    )


def _why_not_graphs(model: ServedModel, paths: Backends, settings: Settings) -> str:
    """Why decode iterations are not captured; "" where they are."""
    if model.device.type != "cuda":
        return f"there are no graphs on {model.device.type}"
    if not settings.model.graph_memory_mb:
        return "model.graph_memory_mb = 0"
    torchs_own = [
        part for part, used in (("decode", paths.decode), ("lora", model.lora.runs.kernel)) if used != "triton"
    ]
    return f"{' and '.join(torchs_own)} must be computed by triton" if torchs_own else ""


def _graphs(model: ServedModel, kv: KvStore, paths: Backends, settings: Settings) -> DecodeGraphs:
    """Captured decode iterations, of a GPU's kernels."""
    from edged.engine.cuda_graphs import CudaGraphRecorder, DecodeGraphs

    recorder = CudaGraphRecorder(model.device, settings.model.graph_memory_mb << 20)
    longest = settings.model.max_context_tokens or model.shape.max_positions
    width = -(-min(longest, model.shape.max_positions) // kv.page_size)
    return DecodeGraphs(model, kv, paths, recorder, settings.serving.max_sequences, width)


def _pruner(
    model: ServedModel, kv: KvStore, pages: KvPages, policy: Row, settings: Settings, max_context: int
) -> Pruner | None:
    """The pruner of KV rows, where the settings, the policy and the model allow one."""
    if settings.cache.pruning == "off" or not policy.prunes:
        return None
    window = model.shape.window
    if window is not None and window < max_context:
        log.info(
            "K/V is not pruned: layers attend to the latest %d tokens, contexts have up to %d", window, max_context
        )
        return None
    return Pruner(settings.cache, kv, pages)


def lora_spec(shapes: dict[str, tuple[int, int]], base_model: str, fingerprint: str, align: AlignSettings) -> LoraSpec:
    """What the adapters of a base model with these target linears look like."""
    all_linear = align.target_modules == "all-linear"
    return LoraSpec(
        shapes=shapes,
        rank=align.rank,
        alpha=align.alpha,
        base_model=base_model,
        fingerprint=fingerprint,
        peft_targets=tuple(sorted({key.rsplit(".", 1)[-1] for key in shapes} if all_linear else shapes)),
    )
