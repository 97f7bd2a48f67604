"""Token-level co-serving (FlexLLM 6.2): whatever an iteration's latency target leaves is filled with fine-tuning.

Kept of FlexLLM: prompts in chunks beside all decodes, entering only if all their pages fit; then as many fine-tune
tokens s as keep f(c, s) within the target, in the forward and in the backward, whose windows are cut to what is left
(Algorithm 2). Left out: fine-tuning in a second stream, and dependent parallelization, which is for several GPUs.
"""

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.planning.slo import SloTargets
from edged.scheduler.policies.base import Fill, FinetuneShare, Policy, Row
from edged.scheduler.policies.hybrid import SMALLEST_CHUNK
from edged.scheduler.policies.options import SloOptions
from edged.scheduler.policies.phased import runnable_steps
from edged.scheduler.task import IterationResult, Plan, Resources, ServiceClass, ServingTask
from edged.settings.load import SchedulerSettings

_LATEST = 0.05
"""Share of the latest iteration in the time outside forwards and units."""


class SloBudget(FinetuneShare):
    """Iterations as long as `slo_ms`, or the least TBT target of those who are served, less the predictions' error.

    Fine-tuning has no share of its own: where serving leaves nothing it starves. What an iteration takes outside its
    forward and units, as the latest ones did, is a part of its latency.
    """

    def __init__(self) -> None:
        self._begun_s = self._overhead_s = 0.0

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the target, and those of the classes."""
        super().configure(settings, cost)
        self._targets = SloTargets(settings, cost)
        self._slo_s = SloOptions.of(settings).slo_ms / 1e3

    def begun(self, plan: Plan, now: float) -> None:
        """Note when the iteration begins."""
        self._begun_s = now

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Learn the iteration's time outside its forward and units."""
        outside_s = now - self._begun_s - result.forward_s - sum([seconds for _, seconds in result.units])
        self._overhead_s += _LATEST * (max(0.0, outside_s) - self._overhead_s)

    def limit_s(self, builder: BinBuilder, now: float) -> float:
        """Return the longest latency of the iteration, prompts included; asked when it has its decodes alone."""
        if not (slo_s := self._slo_s):
            served = {grant.task.service for grant in builder.decodes} | {task.service for task in builder.prompts}
            alone_s = self.cost.priced_s(builder.load if builder.load.decodes else Load(decodes=1))
            slo_s = min(self._targets.tbt_s(service, alone_s) for service in served or ServiceClass)
        return slo_s * (1.0 - self.cost.headroom) - self._overhead_s


class CoServing(Fill):
    """Every decode, prompts first come first served in chunks, then a step, within `FinetuneShare.limit_s`.

    The first prompt gets SMALLEST_CHUNK in any case, and so does the step with nobody to serve. Fine-tuning begins
    nothing on pages that a prompt waits for.
    """

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the next bin within `resources`; empty only if no task can run."""
        builder, cost = BinBuilder(queues, now, resources, policy.victims.ranked), policy.cost
        builder.prompts = queues.started + queues.first(1)
        plan = builder.plan
        plan.budget_s = policy.finetune_share.limit_s(builder, now)
        all_enter = self._add_prompts(builder, queues, cost)
        step = next(iter(runnable_steps(queues, resources)), None)
        if step is not None and step not in builder.preempted:
            asks = 0 if step.context else builder.pages(step, step.num_tokens)
            if asks and all_enter and asks <= builder.open_pages:
                builder.enter(step)
                asks = 0
            if not asks:
                room, max_units = self.room(builder, cost), policy.finetune_share.max_units
                grant_finetune(builder, step, cost, *room, max_units, policy.cuts_windows)
        builder.rescue()
        plan.predicted_forward_s = cost.forward_s(builder.load)
        return plan

    def room(self, builder: BinBuilder, cost: CostModel) -> tuple[float, int]:
        """Return the seconds that the iteration may take with its step, and the tokens that the step gets anyway."""
        served = builder.load.decodes or builder.load.prefill_tokens
        return builder.plan.budget_s, 0 if served else SMALLEST_CHUNK

    def _add_prompts(self, builder: BinBuilder, queues: TaskQueues, cost: CostModel) -> bool:
        """Grant prompts their chunks; returns whether none waits for more than a sequence to end."""
        for task in builder.started:
            if num_tokens := self._chunk(builder, task, cost):
                builder.grant(task, num_tokens)
        for task in queues.first(max(0, builder.sequences_left)):
            num_tokens = self._chunk(builder, task, cost)
            if not num_tokens or builder.pages(task, task.num_tokens) > builder.open_pages:
                return False
            builder.sequences_left -= 1
            builder.enter(task)
            builder.grant(task, num_tokens)
        return True

    def _chunk(self, builder: BinBuilder, task: ServingTask, cost: CostModel) -> int:
        """Return the tokens of a prompt that keep the iteration within its latency."""
        most, load = builder.room(task), builder.load_beside(task)
        num_tokens = cost.chunk(load, task.context, most, builder.plan.budget_s, finetune=False) if most > 0 else 0
        return num_tokens if load.prefill_tokens else max(num_tokens, min(most, SMALLEST_CHUNK))


FLEXLLM = Row(
    "flexllm",
    "FlexLLM 6.2: fine-tune tokens in forward and backward as far as the latency target allows",
    fill=CoServing,
    finetune_share=SloBudget,
    cuts_windows=True,
    fills_ahead=True,
    options=SloOptions,
)
