"""A bin's promises are those that its tasks ask for."""

from __future__ import annotations

import random

from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Order
from edged.scheduler.task import FinetuneTask, Kind, Resources, ServingTask, Task, Unit

PAGE_SIZE = 16


def a_task(number: int, kind: Kind, chance: random.Random) -> Task:
    """Make a task in any state: of some pages, with work in forwards or in units."""
    context = chance.choice((0, chance.randint(1, 200)))
    pages = -(-context // PAGE_SIZE)
    room = {"held_pages": pages, "capacity": pages * PAGE_SIZE}
    if kind is Kind.FINETUNE:
        units = tuple(Unit("layer", 64) for _ in range(chance.randint(0, 3)))
        return FinetuneTask(number, chance.random(), chance.randint(0, 300), context, units=units, **room)
    tokens = 1 if kind is Kind.DECODE else chance.randint(1, 300)
    return ServingTask(number, kind, chance.random(), tokens, context, deadline_s=chance.random(), **room)


def test_promised_are_the_pages_of_those_who_have_begun_and_keep_theirs() -> None:
    preempted = 0
    for seed in range(300):
        chance, queues = random.Random(seed), TaskQueues(Order())
        for number in range(24):
            kind = chance.choice([*Kind])
            queues.file(a_task(number, kind, chance), started=kind is Kind.PREFILL)
        resources = Resources(chance.choice((0, 2, 500)), 4096, PAGE_SIZE, 1024, 128)
        builder = BinBuilder(queues, 1.0, resources, lambda tasks: tasks[::-1])
        kept = [task for task in (*queues.started, *queues.finetunes) if task not in builder.preempted]
        assert builder.promised_pages == sum(
            task.pages_for(task.num_tokens, PAGE_SIZE) for task in kept if task.context
        )
        assert builder.started == [task for task in queues.started if task in kept]
        preempted += len(builder.preempted)
    assert preempted > 50
