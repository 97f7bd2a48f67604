"""A policy is a row of parts, each of which decides one thing and keeps its own state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.planning.slo import SloTargets
from edged.scheduler.policies.options import MaceOptions, Options
from edged.scheduler.task import FinetuneTask, IterationResult, Plan, Resources, ServiceClass, ServingTask, Task
from edged.settings.load import SchedulerSettings


class Part:
    """A decision with its state. The hooks tell what happens to real tasks, once each; a plan made ahead calls none.

    What decides must be deterministic and change neither tasks, queues nor state. All times are seconds of the injected
    clock.
    """

    settings: SchedulerSettings
    cost: CostModel

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Decide by these settings from now on; called first of all, and at each reload, which keeps the state."""
        self.settings, self.cost = settings, cost

    def arrived(self, task: Task, now: float) -> None:
        """Hear that a task has come; it is filed next."""

    def left(self, task: Task, now: float) -> None:
        """Hear that a task has ended or was cancelled; one that was preempted or parked has not left."""

    def before(self, queues: TaskQueues, now: float) -> None:
        """Hear that an iteration is about to be planned."""

    def begun(self, plan: Plan, now: float) -> None:
        """Hear that this plan will run."""

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Hear that `plan` has run, `finetune_s` of it for fine-tuning; its tasks are still as they were before it."""


class Order(Part):
    """The order in which prompts are served: flow by flow, and by a key inside each flow; here all are one flow."""

    key: Callable[[ServingTask], tuple[float, int]] = staticmethod(by_arrival)
    """Place of a task in its flow, the same for as long as it waits."""
    strict = False
    """Whether no prompt may enter before one that is ahead of it, even where it would fit better."""
    entry_only = False
    """Whether flows matter for who enters only: those that have entered are ordered by their keys."""

    def flow(self, task: ServingTask) -> Hashable:
        """Return the flow that a task belongs to, the same for as long as it waits."""
        return None

    def flow_key(self, flow: Hashable) -> float:
        """Return the place of a flow among flows: the least goes first. Read whenever a plan is made."""
        return 0.0

    def place(self, task: ServingTask) -> tuple[float, ...]:
        """Return a task's place among those of all flows at this moment."""
        at_s, number = self.key(task)
        return self.flow_key(self.flow(task)), at_s, number

    def first(self, flows: Mapping[Hashable, list[ServingTask]], most: int) -> list[ServingTask]:
        """Return the next prompts of several `flows`, at most so many; here flow by flow."""
        ordered = sorted(flows, key=lambda flow: (self.flow_key(flow), self.key(flows[flow][0])))
        return list(islice(chain.from_iterable(flows[flow] for flow in ordered), most))

    def next_steps(self, adapters: Collection[str], most: int) -> list[str]:
        """Return the adapters, of those that are ready, whose fine-tune steps are next, at most so many."""
        return list(islice(adapters, most))

    def rank(self, prompts: list[ServingTask], now: float) -> tuple[list[ServingTask], list[ServingTask]]:
        """Return prompts in the order in which they go in an iteration that begins `now`, and those of them whose
        deadlines it heeds; here both are all of them by their places."""
        ranked = sorted(prompts, key=self.place)
        return ranked, ranked


@dataclass(slots=True)
class Entry:
    """The tasks that work in an iteration."""

    runnable: list[ServingTask]
    """Prompts that may get chunks."""
    paused: Set[ServingTask] = frozenset()
    """Decodes that stand still in this iteration and keep their pages."""
    step: FinetuneTask | None = None
    """The fine-tune task that may run."""
    due: bool = False
    """Whether fine-tuning outranks serving."""
    in_the_way: bool = False
    """Whether the step holds pages without which a prompt cannot enter: the sooner it ends, the better."""


class FinetuneShare(Part):
    """The share of fine-tuning in a hybrid iteration; nothing, unless a subclass says otherwise."""

    max_units = math.inf
    """Most fine-tune units of an iteration, however short."""
    lent_s = 0.0
    """Seconds of fine-tuning so far in time that readers had no need of."""

    def waited_s(self, now: float) -> float:
        """Return how long fine-tuning has waited."""
        return 0.0

    def owed_s(self, builder: BinBuilder, entry: Entry, now: float) -> float:
        """Return the seconds owed to a step that is due or in the way, whatever the budget; asked before chunks."""
        return 0.0

    def limit_s(self, builder: BinBuilder, now: float) -> float:
        """Return the latency budget of the iteration; asked when prompts have their chunks."""
        return 0.0


class Admission(Part):
    """The choice of the tasks that work in a hybrid iteration, and of those that enter memory for it."""

    def choose(self, builder: BinBuilder, queues: TaskQueues, finetune_share: FinetuneShare, now: float) -> Entry:
        """Choose the tasks; those that enter are promised their pages in `builder`, which has the decodes already."""
        raise NotImplementedError


class Victims(Part):
    """The order of preemption; steps go before sequences, by progress made, and the oldest sequence keeps its pages."""

    def ranked(self, sequences: list[ServingTask]) -> list[ServingTask]:
        """Return sequences, which are in the order of arrival, in that of preemption: the latest goes first."""
        return sequences[::-1]


class Due(Part):
    """The deadlines of decodes: their TBT targets."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the targets of these settings."""
        self._targets = SloTargets(settings, cost)

    def due_s(self, tasks: Sequence[ServingTask], alone_s: float, now: float) -> list[float]:
        """Return a deadline for each decode that got a token `now`; the present decodes' forward takes `alone_s`."""
        due_s = {service: now + self._targets.tbt_s(service, alone_s) for service in ServiceClass}
        return [due_s[task.service] for task in tasks]


class ReaderDue(Due):
    """The deadlines of decodes that are read to: when the reader has text for `reader_reserve_s` more, or at the
    target where that is later, but no later than the reader runs dry. Of others: their targets."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the reserve, too."""
        super().configure(settings, cost)
        self._reserve_s = MaceOptions.of(settings).reader_reserve_s

    def due_s(self, tasks: Sequence[ServingTask], alone_s: float, now: float) -> list[float]:
        """Return a deadline for each decode that got a token `now`, of which its reader knows."""
        targets_s = super().due_s(tasks, alone_s, now)
        return [
            due_s if (reader := task.reader) is None else min(reader.dry_s, max(due_s, reader.dry_s - self._reserve_s))
            for task, due_s in zip(tasks, targets_s, strict=True)
        ]


class Fill(Part):
    """The content of an iteration."""

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the next bin, within `resources`; empty only if no task can run."""
        raise NotImplementedError


@dataclass(frozen=True)
class Row:
    """A policy by name, and how its parts are made; shared iterations use `admission` and `finetune_share`."""

    name: str
    summary: str
    """Traits of its paper that it keeps: docs/policies.md has the same sentence."""
    fill: Callable[[], Fill]
    order: Callable[[], Order] = Order
    admission: Callable[[], Admission] = Admission
    finetune_share: Callable[[], FinetuneShare] = FinetuneShare
    victims: Callable[[], Victims] = Victims
    due: Callable[[], Due] = Due
    cuts_windows: bool = False
    """Whether a fine-tune unit that does not fit an iteration is cut to the rows that do."""
    fills_ahead: bool = False
    """Whether the next group's forward may join forwards while units of the one before it run."""
    two_streams: bool = False
    """Whether a simulated device runs fine-tuning beside its forwards, in a stream of its own."""
    trains: bool = True
    """Whether it ever gives fine-tune tasks anything."""
    shares_prefixes: bool = True
    """Whether equal beginnings of prompts are computed once, where the settings allow it."""
    prunes: bool = False
    """Whether K/V of uninformative heads and positions may be given up, where the settings allow it."""
    options: type[Options] = Options
    """What its parts read of the table `scheduler.options`."""


class Policy:
    """The parts of a row at work."""

    def __init__(self, row: Row, settings: SchedulerSettings, cost: CostModel) -> None:
        self.name, self.trains, self.cuts_windows = row.name, row.trains, row.cuts_windows
        self.fills_ahead, self.two_streams = row.fills_ahead, row.two_streams
        self.shares_prefixes, self.prunes = row.shares_prefixes, row.prunes
        self.flow_order, self.admission, self.finetune_share = row.order(), row.admission(), row.finetune_share()
        self.victims, self.due, self.fill = row.victims(), row.due(), row.fill()
        self.cost = cost
        if self.cuts_windows:
            cost.price_cut_units()
        self.row_order = self.flow_order
        self.take_order(self.flow_order)
        for configure in self.hooks[Part.configure]:
            configure(settings, cost)

    def take_order(self, order: Order) -> None:
        """Order prompts by `order`, which may ask that of the row about those of one flow."""
        self.flow_order = order
        # Within one flow the key alone decides, and is read faster.
        single = order.entry_only or type(order).flow is Order.flow
        self.order = order.key if single else order.place
        # Those that have entered go as the row says, where a fair order is about who enters.
        self.rank = (self.row_order if order.entry_only else order).rank
        orders = (order,) if order is self.row_order else (self.row_order, order)
        parts = (*orders, self.admission, self.finetune_share, self.victims, self.due, self.fill)
        hooks = {name: hook for name, hook in vars(Part).items() if callable(hook)}
        idle = {hook for hook in hooks.values() if hook is not Part.configure}
        self.hooks: dict[Callable[..., None], list[Callable[..., None]]] = {
            hook: [getattr(part, name) for part in parts if getattr(type(part), name) not in idle]
            for name, hook in hooks.items()
        }
        """The hooks of `Part`, each with those of the parts that hear it."""
