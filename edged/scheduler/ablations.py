"""MACE with one of its parts taken away (MACE 6.3 and Table 1); `mace_bin.py` has the one that is a policy of its own.

Owns what each lacks. Everything else is `edged.scheduler.mace`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edged.scheduler.admission import Admission
from edged.scheduler.draft import Draft
from edged.scheduler.mace import Mace
from edged.scheduler.packing import Item
from edged.scheduler.queues import Queues, by_arrival
from edged.scheduler.task import Task


class MacePrefix(Mace):
    """Without prefix sharing (4.3): each prompt is computed whole, as "MACE/Prefix"."""

    name = "mace-prefix"
    shares_prefixes = False


class MacePrune(Mace):
    """Without K/V pruning (4.3): all K/V is kept while a request decodes, as "MACE/Prune"."""

    name = "mace-prune"
    prunes = False


class _ByArrival(Admission):
    """All in the order of their arrival."""

    def _ranked(self, queues: Queues, draft: Draft, now: float) -> list[Task]:
        return sorted(super()._ranked(queues, draft, now), key=lambda task: (not task.begun, by_arrival(task)))

    def _outranks_serving(self, queues: Queues, prompts: Sequence[Task], first: Task, now: float) -> bool:
        serving = [grant.task for grant in queues.decodes[:1]] + list(prompts)
        return bool(serving) and by_arrival(first) < min(by_arrival(task) for task in serving)

    def _asking(self, draft: Draft, tuning: list[Task], waiting: list[Task], due: bool, now: float) -> Iterator[Item]:
        own = super()._asking(draft, tuning, [], due, now)
        # Nobody is too late to be overtaken: deadlines count for nothing.
        prompts = (replace(item, patient=True) for item in super()._asking(draft, [], waiting, due, now))
        return heapq.merge(own, prompts, key=lambda item: by_arrival(item.task))


class MacePriority(Mace):
    """Without priorities (4.1; "PA" of Table 1): no base, no growth with the wait, no reward for a loss.

    Prompts and steps come in the order of their arrival; deadlines order nobody, and a step comes before serving only
    when it is older than every request. Packing, chunks and the latency budget stay, and so does what fine-tuning is
    owed when it comes first. As in MACE, work moves a step's arrival towards now.
    """

    name = "mace-priority"
    order = staticmethod(by_arrival)
    admission = _ByArrival
