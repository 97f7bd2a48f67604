"""Trials of starts: each start's language is measured once, then starts are scored on users' own pairs."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from edged.align.adapters.adapter import AdapterError, AdapterState
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.feedback.pair import TokenPair
from edged.align.guard import TestScore, broken_language
from edged.align.jobs import JobQueue
from edged.align.pair_queues import PairQueues, SuppliedQueue
from edged.align.starts import SCALES, Start, StartChoice, neutral_as_pairs
from edged.settings.load import GuardSettings, Settings

log = logging.getLogger("edged.align")
TRIALS = "@starts"
"""The queue of trials, and the adapter in whose slot a start is: no user's name; never served, listed or saved."""
_LANGUAGE = 0.25
"""Share of the guard's bounds on language that a start may reach."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The next trial: a start's B times `scale` scores neutral text, or a user's pairs for the user's `choice`."""

    start: Start
    scale: float
    pairs: list[TokenPair]
    user: str = ""
    choice: StartChoice | None = None


@dataclass(slots=True)
class TrialQueue(SuppliedQueue):
    """The trials of all starts. They are tests of no version: they train nothing, and leave no record of pairs."""

    catalogue: dict[str, Start] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)
    """Users whose pairs are to be scored."""
    trial: Trial | None = None
    """The latest trial."""
    state: AdapterState | None = None
    """The latest start that was read, B times a scale, and what it is."""
    read: tuple[Start, float] | None = None
    reading: bool = False
    """Whether the next start's weights are being read."""
    measured: list[Start] = field(default_factory=list)
    """Starts whose scale is to be written beside them."""
    passed: dict[str, float] = field(default_factory=dict)
    """The largest scale so far that keeps the language, of starts that are measured."""
    number: int = 0
    """Number of states that were read, by which a slot tells them apart."""

    def add(self, start: Start, queues: PairQueues) -> None:
        """Add a start, also in place of another of its name, to be measured and scored on every user's pairs."""
        self.remove(start.name, queues)
        self.catalogue[start.name] = start
        self.asked |= dict.fromkeys(queues.queues)

    def remove(self, name: str, queues: PairQueues) -> None:
        """Forget a start, and what it was measured and scored."""
        self.catalogue.pop(name, None)
        self.passed.pop(name, None)
        for queue in queues.queues.values():
            queue.choice.scores.pop(name, None)
            queue.choice.scored.discard(name)
            queue.choice.verdict = [score for score in queue.choice.verdict if score.start != name]

    def restore(self, choices: Mapping[str, StartChoice], queues: PairQueues) -> None:
        """Restore users' choices from the store, where none were taken in since the daemon started."""
        for user, choice in choices.items():
            if user in queues.queues and not queues.queues[user].choice.margins:
                queues.queues[user].choice = choice

    def next_trial(self, queues: PairQueues, settings: Settings) -> Trial | tuple[str, Start] | None:
        """Return the next trial, or a user and the start that fits this user; None where nothing is due."""
        for start in self.catalogue.values():
            if start.scale is None and queues.neutral:
                scale = next(each for each in SCALES if each > self.passed.get(start.name, 0.0))
                return Trial(start, scale, neutral_as_pairs(queues.neutral))
        starts = [start for start in self.catalogue.values() if start.scale]
        for user in list(self.asked) if settings.starts.choose != "off" else ():
            choice = self._choice(user, queues)
            if choice is not None and choice.due(starts):
                queue = queues.queues[user]
                pairs = [pair for pair in (*queue.replay, *queue.held_out.values()) if pair.pair_id in choice.margins]
                for start in starts:
                    left = [pair for pair in pairs if pair.pair_id not in choice.scores.get(start.name, ())]
                    if left:
                        return Trial(start, start.scale or 1.0, left, user, choice)
                if taken := choice.judge(starts):
                    # What the user gives before it is published does not have it published twice.
                    choice.start = taken
                    del self.asked[user]
                    return user, self.catalogue[taken]
            del self.asked[user]
        return None

    def _choice(self, user: str, queues: PairQueues) -> StartChoice | None:
        """Return a user's choice; None while a job, another node or a change of preferences decides on the adapter."""
        queue = queues.queues.get(user)
        if queue is None or isinstance(queue, JobQueue) or user in queues.followed:
            return None
        return None if queue.guard.baseline_version or queue.guard.change is not None else queue.choice

    def holds(self, trial: Trial) -> bool:
        """Whether the start of a trial is in memory."""
        return self.read == (trial.start, trial.scale)

    def take_state(self, trial: Trial, done: Future[AdapterState] | None) -> None:
        """Take in the start of a trial when its weights were read."""
        self.reading, self.number = False, self.number + 1
        try:
            self.state = done.result() if done is not None else None
            self.read = trial.start, trial.scale
        except (AdapterError, OSError) as error:
            log.warning('start "%s" could not be read and is not used: %s', trial.start.name, error)
            self.catalogue.pop(trial.start.name, None)

    def take(self, test: HeldOutEvaluation, guard: GuardSettings) -> None:
        """Take in a trial that ended."""
        trial = self.trial
        if trial is None or self.catalogue.get(trial.start.name) is not trial.start:
            return
        if trial.choice is not None:
            self._note(test)
            return
        nll = -sum(score.chosen_logp + score.rejected_logp for score in test.scores)
        base_nll = -sum(score.ref_chosen_logp + score.ref_rejected_logp for score in test.scores)
        bounds = {name: getattr(guard, name) * _LANGUAGE for name in ("max_kl_nats", "max_nll_change")}
        score = TestScore.of(0, test.scores, (nll, base_nll))
        problem = broken_language(score, guard.model_copy(update=bounds))
        if not problem:
            self.passed[trial.start.name] = trial.scale
            if trial.scale < SCALES[-1]:
                return
        self._measured(trial.start, self.passed.pop(trial.start.name, 0.0))
        self.measured.append(self.catalogue[trial.start.name])

    def _measured(self, start: Start, scale: float) -> None:
        self.catalogue[start.name] = replace(start, scale=scale)

    def _note(self, test: HeldOutEvaluation) -> None:
        """Keep the scores of the pairs that a test has come to."""
        if self.trial is not None and self.trial.choice is not None:
            known = self.trial.choice.scores.setdefault(self.trial.start.name, {})
            known.update({score.pair_id: (score.loss, score.reward_margin) for score in test.scores})

    def put_back(self, pairs: Sequence[TokenPair] | None = None) -> None:
        """Note that a trial made way: it goes on where it was."""
        if isinstance(self.step, HeldOutEvaluation):
            self._note(self.step)
        self.step = None

    def skip_test(self, version: int) -> None:
        """Give up a trial that failed: that of a user until the next pair, that of language until the daemon starts."""
        if self.trial is not None and self.trial.choice is not None:
            self.asked.pop(self.trial.user, None)
        elif self.trial is not None and self.catalogue.get(self.trial.start.name) is self.trial.start:
            log.warning('start "%s" could not be tried: it is not used', self.trial.start.name)
            self._measured(self.trial.start, 0.0)
