"""How long a late prompt waits before it goes first: bounded by time, and not by its own length."""

from collections import deque

from edged.scheduler.task import IterationResult, Kind, ServingTask, Task

PATIENCE = 3.0
"""How much longer than the latest prompts would have waited, first come, first served, one waits before it goes first.

Simulated on an Orin, 1 has the share in time and within a half the 99th percentile of first come, first served; 3 has
up to 4 points less than prompts that wait for 8 of their own targets, whose percentile is up to 1.5 times as long.
"""
TARGETS = 2.0
"""Multiple of its own target that a prompt waits at the least."""
LATEST = 100
"""Number of the latest prompts whose longest wait counts."""
_PACE = 0.05
"""Weight of an iteration in the mean of the seconds that a prompt token takes."""


class Patience:
    """The moment from which on each prompt goes first.

    Under first come, first served, a prompt waits for what the prompts before it have left, at the pace at which such
    tokens are computed. It is known without that order: the work is the same.
    """

    def __init__(self) -> None:
        # By task id, under which plans made ahead know copies of tasks.
        self.overdue_s: dict[int, float] = {}
        """The moment of each task."""
        self._left: dict[int, int] = {}
        """Prompt tokens that are not computed yet."""
        self._backlog = 0
        """The sum of these."""
        self._token_s: float | None = None
        """Mean seconds of serving for a prompt token; None: as priced."""
        self._waits_s: deque[float] = deque(maxlen=LATEST)

    def arrived(self, task: ServingTask, token_s: float) -> None:
        """Take a prompt in; `token_s` is the price of a token."""
        if task.task_id in self.overdue_s:
            # Orders that change hear of live tasks again.
            return
        if not task.candidate:
            self._waits_s.append(self._backlog * (self._token_s or token_s))
            self._left[task.task_id] = task.num_tokens
            self._backlog += task.num_tokens
        wait_s = max(TARGETS * (task.deadline_s - task.arrival_s), PATIENCE * max(self._waits_s, default=0.0))
        self.overdue_s[task.task_id] = task.arrival_s + wait_s

    def due_s(self, task: ServingTask) -> float:
        """Return the moment of a task; of one that did not come as a prompt it follows from its own target."""
        known_s = self.overdue_s.get(task.task_id)
        return task.arrival_s + TARGETS * (task.deadline_s - task.arrival_s) if known_s is None else known_s

    def left(self, task: Task) -> None:
        """Forget a task."""
        self._backlog -= self._left.pop(task.task_id, 0)
        self.overdue_s.pop(task.task_id, None)

    def completed(self, result: IterationResult, finetune_s: float) -> None:
        """Learn what prompt tokens take."""
        tokens = 0
        for outcome in result.outcomes:
            if outcome.task.kind is Kind.PREFILL and (left := self._left.get(outcome.task.task_id)):
                done = min(left, outcome.num_tokens)
                tokens += done
                # What the cache had of a prompt is known when it is computed.
                gone = done if outcome.next_kind is Kind.PREFILL else left
                self._left[outcome.task.task_id] = left - gone
                self._backlog -= gone
        if tokens:
            taken_s = (result.forward_s + sum([seconds for _, seconds in result.units]) - finetune_s) / tokens
            known_s = taken_s if self._token_s is None else self._token_s
            self._token_s = known_s + _PACE * (taken_s - known_s)
