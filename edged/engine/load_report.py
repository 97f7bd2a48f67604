"""The load of an engine, as a fleet places requests by it."""

from edged.cache.page_pool import PagePool
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters
from edged.placement.node import NodeLoad
from edged.scheduler.scheduler import Scheduler
from edged.settings.load import ServingSettings

_BUSY_ITERATIONS = 256
"""Latest iterations that may count as the last second's."""


def load_of_parts(
    table: SequenceTable,
    scheduler: Scheduler,
    pool: PagePool,
    stats: Counters,
    serving: ServingSettings,
    now: float,
    **known: str | int,
) -> NodeLoad:
    """Report a load from the parts of an engine at `now`; `known` are the fields that they do not tell.

    Any thread may ask: it copies what the engine's thread changes.
    """
    sequences, cost = list(table.by_task.values()), scheduler.cost
    decodes, prices = [sequence for sequence in sequences if sequence.decoding], cost.prices
    tasks = list(scheduler.queues.finetunes)
    units = [task.units[task.next_unit] for task in tasks if task.next_unit < len(task.units)]
    recent, counts = stats.latest(_BUSY_ITERATIONS), table.queue_report()
    return NodeLoad.model_validate(
        {
            **known,
            "phase": "ready",
            "backlog_tokens": sum(sequence.task.num_tokens for sequence in sequences if not sequence.decoding),
            "waiting": counts["waiting"] + counts["prefill"],
            "decodes": len(decodes),
            "context": sum(sequence.rows for sequence in decodes),
            "free_pages": pool.free_pages + pool.evictable_pages,
            "pages": pool.pages - 1,
            "page_tokens": pool.page_size,
            "free_sequences": max(0, serving.max_sequences - len(sequences)),
            "chunk_tokens": serving.max_batch_tokens,
            "unit_s": cost.unit_s(units[0]) if units else 0.0,
            "busy_share": min(1.0, sum(record.elapsed_s for record in recent if record.started_s > now - 1.0)),
            "slowness": cost.slowness,
            "forward_prices": prices.forward,
            "knee_tokens": prices.knee_tokens,
        }
    )
