"""The time that readers lend to fine-tuning: nobody runs out of text, and answers do not take much longer."""

import math

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.finetune_budget import SlowdownBudget
from edged.scheduler.policies.mace.finetune_share import MaceFinetuneShare
from edged.scheduler.task import FINETUNE, Plan
from edged.settings.load import SchedulerSettings

READ_SLOWDOWN = 3.0
"""How many times longer answers that are read along may take for what their readers lend.

Simulated on a CPU near its capacity, 2 and 3 kept about as many first tokens in time as serving alone, and with no
bound there were a twentieth fewer; with 2 large GPUs learned up to a sixth less.
"""


class ReaderFinetuneShare(MaceFinetuneShare):
    """The latency budget that readers leave: time in which nobody runs out of text is lent to fine-tuning.

    Where all who are served are readers, an iteration may take until the first of them is due (`ReaderDue`), as long as
    answers take no more than READ_SLOWDOWN times as long: they hold slots and pages meanwhile, which those who come in
    the next burst find taken. Anybody else brings in the slow-down that `MaceFinetuneShare` allows. The load is what
    serving really uses: a lone answer keeps a device busy that is bound by reading the weights, and leaves nearly all
    of its capacity.
    """

    _lending = False
    """Whether the iteration under way lends: all whom it serves are readers, and the loan was not used up."""

    def __init__(self) -> None:
        super().__init__()
        self._loan = SlowdownBudget()

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the settings; no more than a quantum is saved up to be lent."""
        super().configure(settings, cost)
        self._loan.configure(READ_SLOWDOWN, self._quantum_s)

    def settle(self, serving_s: float, finetune_s: float, now: float) -> None:
        """Account for what was lent, or taken, beside serving; the price of one pass is no load."""
        lent_s = finetune_s if self._lending else 0.0
        used_s = max(0.0, serving_s - self.cost.pass_s)
        self._budget.settle(serving_s, used_s, finetune_s - lent_s, now)
        self._loan.settle(serving_s, used_s, lent_s, now)
        self.lent_s += lent_s

    def begun(self, plan: Plan, now: float) -> None:
        """Note whether the plan lends."""
        self._lending = self._loan.left_s > 0.0 and _all_read(plan)

    def _max_s(self, plan: Plan) -> float:
        """Return the most seconds of fine-tuning: where all are readers their slack, as free slots and pages allow."""
        if not _all_read(plan):
            return super()._max_s(plan)
        # Units are long: one may begin on what is left of the loan, however little. The loan has the usual slow-down in
        # it: where it is used up there is no other allowance.
        return math.inf if self._loan.left_s > 0.0 else 0.0


def _all_read(plan: Plan) -> bool:
    """Whether a plan serves anybody, and readers alone; candidates are dropped before anybody waits for them."""
    read = False
    for grant in plan.grants:
        if (task := grant.task).kind is FINETUNE or task.candidate:
            continue
        if task.reader is None:
            return False
        read = True
    return read
