"""The trainer: opens steps and tests of all adapters with the next pairs, and closes them with each pair's outcome.

It is not thread-safe: the engine thread alone uses it.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edged.align.adapters.adapter import AdapterState, UnknownAdapter
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.decoder import Decoder
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.dpo.loss import LOSSES
from edged.align.dpo.step import DpoStep
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import (
    JobStepped,
    PairRetired,
    PairScored,
    Record,
    StepSkipped,
    TokenPair,
    VersionPublished,
    VersionTested,
    is_practice,
)
from edged.align.guard import TestScore
from edged.align.jobs import JobPlan, JobQueue
from edged.align.pair_queues import FIRST_LOSS, AdapterQueue, FinetuneStep, PairQueues, StepBatch
from edged.align.rounds import ROUNDS, RoundQueue
from edged.align.starts import StartFiles
from edged.align.trials import TRIALS, Trial, TrialQueue
from edged.align.versions import Read, Versions
from edged.runtime import logs
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from edged.tensors.host_copy import HostCopies
from edged.tensors.oom import StepSize, out_of_memory

log = logging.getLogger("edged.align")
_JOB_TRIES = 12
"""Most tries of a job's step that finds no memory: with the pauses between them about five minutes."""


class Trainer:
    """The trainer of all adapters of one base model."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        settings: Live[Settings],
        decoder: Decoder,
        release: Callable[[np.ndarray], None],
        cache_tokens: int,
        read: Read,
        published: Callable[[AdapterState, int, bool], None] = lambda _state, _parent, _stepped: None,
        bring: Callable[[HostCopies], object] = HostCopies.on_host,
        start_files: StartFiles | None = None,
    ) -> None:
        """`cache_tokens` is the whole KV cache: a group's forwards, by adapter and base, must fit in half of it.

        `read` reads what takes a version's place, as `AdapterLoader.read` does. `published` gets a new version's state,
        the version that it follows, and whether a step made it of that; `bring` brings copies of weights to the host.
        """
        self.adapter_cache, self._settings = adapter_cache, settings
        self.size = StepSize(settings)
        self.pair_queues = PairQueues(adapter_cache.versions, settings)
        """Queues of pairs, which come in by `submit` and leave by steps."""
        adapter_cache.is_withdrawn = self.pair_queues.is_withdrawn
        self.versions = Versions(adapter_cache, self.pair_queues, self._announce, bring, read)
        self.trials = TrialQueue(TRIALS, catalogue=start_files.catalogue() if start_files else {})
        """Trials of the starts that users may begin with."""
        self.rounds = RoundQueue(ROUNDS)
        """The round of a federation that is under way, if any."""
        self.pair_queues.queues |= {TRIALS: self.trials, ROUNDS: self.rounds}
        self._decoder, self._release = decoder, release
        self._published = published
        self.max_tokens = cache_tokens // 4
        """Most tokens of a pair."""
        self.jobs: dict[str, JobQueue] = {}
        """Queues of the adapters that jobs train, by adapter."""
        self.records: list[Record] = []
        self.pairs_trained = self.trained_tokens = 0
        self.steps = 0

    def _announce(self, state: AdapterState, record: VersionPublished) -> None:
        self.records.append(record)
        if record.adapter in self.pair_queues.queues:
            self.pair_queues[record.adapter].choice.take_version(record.version, record.reason, record.restored)
        self._published(state, record.parent, record.stepped)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def loss(self, step: FinetuneStep) -> float:
        """Mean loss of a step's own pairs as far as their forwards are done; before that, and for tests, that of the
        latest steps of its adapters (ln 2 for an adapter without one)."""
        losses = (
            [loss for adapter_step in step.adapter_steps.values() for loss in adapter_step.losses]
            if isinstance(step, DpoStep)
            else []
        )
        losses = losses or [self.pair_queues.queues[name].loss for name in step.adapters]
        return sum(losses) / len(losses)

    def enqueue(self, adapter: str, state: AdapterState | None) -> None:
        """Take in a state that was read from disk, whose version may make a step or test due.

        None: the state could not be read, and the adapter has no work until it can be.
        """
        if state is not None:
            self.adapter_cache.adopt(state)
        if adapter in self.pair_queues.queues:
            self.pair_queues[adapter].unreadable = state is None
        if state is None:
            self.fail_job(adapter, "the adapter's newest version cannot be read: the log says why")

    def tidy(self, busy: Collection[str], most: int | None = None) -> None:
        """Drop idle states from memory beyond `most` (default `align.max_loaded_adapters`); `busy` ones are in use."""
        working = {queue.name for queue in self.pair_queues.with_step()}
        for name in self.adapter_cache.tidy(working.union(busy), most):
            if name in self.pair_queues.queues:
                self.pair_queues.queues[name].guard.last_good = None

    def forget(self, adapter: str) -> None:
        """Remove the adapter and its pairs; `files.forget` removes its files. Raises UnknownAdapter."""
        if adapter not in self.adapter_cache.versions and adapter not in self.adapter_cache.files.left:
            raise UnknownAdapter(adapter)
        self.abandon(adapter)
        self.fail_job(adapter, "the adapter was forgotten")
        self.jobs.pop(adapter, None)
        self.pair_queues.forget(adapter)
        self.pair_queues.followed.discard(adapter)
        self.adapter_cache.forget(adapter)

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def submit(self, pairs: Sequence[TokenPair]) -> None:
        """Take pairs in: new ones are queued, held out or quarantined; earlier ones are filed by their state."""
        guard = self._settings.current.guard
        for pair in pairs:
            queue, version = self.pair_queues[pair.adapter], self.adapter_cache.version(pair.adapter)
            # KTO also computes the prompt of a single rating with the answer of another one.
            most = self.max_tokens // 2 if pair.single else self.max_tokens
            if pair.num_tokens > most:
                reason = f"{pair.num_tokens} tokens do not fit: the KV cache has room for {most}"
                self.records.append(pair.retired("skipped", version, pair.epochs_done, reason))
            elif (taken := queue.enqueue(pair, guard, self.pair_queues.now)) is not None:
                state, reason = taken
                self.records.append(pair.retired(state, version, 0, reason))
                if state == "held_out":
                    reason = "newer pairs are kept as the test"
                    outgrown = queue.outgrown()
                    self.records += [old.retired("queued", version, old.epochs_done, reason) for old in outgrown]

    def practise(self, adapter: str, pairs: Sequence[TokenPair]) -> None:
        """Take in practice of an adapter, in place of what is left of the last; none where a job trains it."""
        queue = self.pair_queues[adapter]
        if not isinstance(queue, JobQueue):
            fits = (pair for pair in pairs if pair.num_tokens <= self.max_tokens)
            queue.practice.clear()
            queue.practice.extend(fits)

    def start_job(self, plan: JobPlan) -> int:
        """Begin to train an adapter by a job's plan; its state is resident. Returns the number of steps it took."""
        done = max(0, self.adapter_cache.get(plan.adapter).steps_taken - plan.other_steps)
        self.abandon(plan.adapter)
        former = self.pair_queues[plan.adapter]
        former = former.former if isinstance(former, JobQueue) else former
        queue = JobQueue(plan.adapter, plan=plan, done=done, former=former)
        self.pair_queues.exchange(queue)
        self.jobs[plan.adapter] = queue
        return queue.done

    def feed_job(self, adapter: str, step: int, examples: Sequence[TokenPair]) -> None:
        """Take in the examples of a job's step (from 0), which is that after the last one taken in; others are not."""
        queue = self.jobs.get(adapter)
        if queue is not None and step == queue.done + len(queue.batches):
            if not LOSSES[queue.plan.align.loss].has_reference:
                # No one reads the scores of examples: the base need not compute them.
                examples = [replace(pair, ref_chosen_logp=0.0, ref_rejected_logp=0.0) for pair in examples]
            queue.batches.append(list(examples))

    def end_job(self, adapter: str) -> None:
        """End an adapter's job, with its step under way; the version that it has stays: a test measures its language,
        for later ones."""
        if adapter in self.jobs:
            self.abandon(adapter)
            job = self.jobs.pop(adapter)
            stepped = job.done > 0
            self.pair_queues.exchange(job.former)
            self.pair_queues[adapter].guard.baseline_version = baseline_version = (
                self.adapter_cache.version(adapter) if stepped else 0
            )
            self.adapter_cache.files.protect(adapter, baseline_version)
            self.request_test(adapter)

    def fail_job(self, adapter: str, reason: str) -> None:
        """End the training of an adapter by its job, if it has one, for a reason that is recorded."""
        if adapter in self.jobs:
            self.jobs[adapter].failed = True
            self._skipped(self.jobs[adapter], (), reason)

    def due_jobs(self) -> list[str]:
        """Return the adapters whose job's next step can be opened."""
        return [name for name, queue in self.jobs.items() if queue.due]

    def request_test(self, adapter: str) -> None:
        """Have the adapter's current version tested before its next step."""
        self.pair_queues[adapter].guard.request_test()

    # -- work out ----------------------------------------------------------------------------------------------------

    def open(self, adapter: str, recompute: Recompute, admit: Callable[[str], bool]) -> FinetuneStep:
        """Begin the adapter's next step or test; `close` ends it. Its state should be resident.

        A step recomputes what `recompute` says. It is shared with other adapters whose pairs fit the same window
        and that `admit` accepts.
        """
        queue = self.pair_queues[adapter]
        if self.pair_queues.test_due(queue):
            return self._open_test(queue)
        if isinstance(queue, JobQueue):
            # Alone: no other's pairs are trained on by the same settings.
            batches = {adapter: queue.draw(self.size.align)}
            align = self.size.narrow(queue.step_settings)
            queue.begin(batches[adapter])
        else:
            batches, align = self.pair_queues.take_step(queue, self.size.align, admit), self._settings.current.align
        try:
            adapter_steps = [
                self._adapter_step(self.pair_queues[name], batch, align) for name, batch in batches.items()
            ]
            step = DpoStep(adapter_steps, self._decoder, align, self._release, self.max_tokens, recompute)
        except Exception as error:
            reason = logs.first_line(error, with_kind=True)
            if out_of_memory(error):
                self._starved(batches, _alone(batches), reason)
            else:
                self._failed(batches, reason)
            raise
        for name in batches:
            self.pair_queues[name].step = step
        # A caller that iterates over the ready adapters must not see these any more.
        self.pair_queues.recount()
        return step

    def open_trial(self, trial: Trial) -> HeldOutEvaluation:
        """Begin the trial of a start; `close` ends it."""
        pairs = [replace(pair, adapter=TRIALS) for pair in trial.pairs]
        about = (TRIALS, 0, pairs, self._decoder, self._settings.current.align, self._release)
        self.trials.trial, self.trials.step = trial, HeldOutEvaluation(*about, with_kl=trial.choice is None)
        return self.trials.step

    def open_round(self, recompute: Recompute) -> FinetuneStep:
        """Begin the next step, or test, of the round under way; `close` ends it."""
        queue, align = self.rounds, self._settings.current.align
        assert queue.round is not None
        if queue.round.tests:
            about = (self._decoder, align, self._release)
            queue.step = HeldOutEvaluation(ROUNDS, 0, queue.round.held_out, *about, with_kl=False)
        else:
            queue.begin(queue.draw(self.size.align))
            steps = [AdapterStep(queue.round.state, queue.taken, (), align=align)]
            queue.step = DpoStep(steps, self._decoder, align, self._release, self.max_tokens, recompute)
        return queue.step

    def _adapter_step(self, queue: AdapterQueue, batch: StepBatch, align: AlignSettings) -> AdapterStep:
        state, guard = self.adapter_cache.get(queue.name), queue.guard
        untested = 0 < state.version != guard.tested_version and self.pair_queues.testable(queue)
        scale = guard.lr_scale * guard.lr_scale_margin
        return AdapterStep(state, batch.fresh, batch.replay, queue.detector, scale, untested, align=align)

    def _open_test(self, queue: AdapterQueue) -> HeldOutEvaluation:
        settings, version = self._settings.current, self.adapter_cache.version(queue.name)
        pairs = queue.to_test(version)
        neutral = self.pair_queues.neutral if version else ()
        try:
            about = (queue.name, version, pairs, self._decoder, settings.align, self._release)
            queue.step = HeldOutEvaluation(*about, neutral)
        except Exception:
            queue.skip_test(version)
            raise
        return queue.step

    # -- steps and tests that ended ----------------------------------------------------------------------------------

    def close(self, step: FinetuneStep, seconds: float) -> None:
        """Take in a step or test that finished `seconds` after it was opened: outcomes, new versions, a judgement.

        A failure for one adapter is recorded and leaves the others their outcomes.
        """
        queues = [self.pair_queues[name] for name in step.adapters]
        for queue in queues:
            queue.end()
        for queue in queues:
            begun = len(self.records)
            try:
                if isinstance(step, HeldOutEvaluation):
                    self._close_test(queue, step)
                else:
                    self._close_step(queue, step, seconds)
            except Exception as error:
                log.exception("a step or test of %s ended, and its outcome could not be taken in", queue.name)
                if isinstance(step, DpoStep):
                    retired = {record.pair_id for record in self.records[begun:] if isinstance(record, PairRetired)}
                    rest = [pair for pair in step.adapter_steps[queue.name].fresh if pair.pair_id not in retired]
                    self._skipped(queue, rest, logs.first_line(error, with_kind=True))

    def _close_step(self, queue: AdapterQueue, step: DpoStep, seconds: float) -> None:
        settings, adapter_step, guard = self._settings.current, step.adapter_steps[queue.name], queue.guard
        if isinstance(queue, JobQueue):
            self._close_job_step(queue, adapter_step, seconds)
            return
        if queue is self.rounds:
            self._close_round_step(adapter_step)
            return
        if adapter_step.doubted:
            # The version is tested before pairs are quarantined: to a broken version every pair looks strange.
            queue.put_back(adapter_step.fresh)
            guard.request_test()
            return
        self.records += adapter_step.scores
        self._ask_starts(queue, adapter_step.scores)
        queue.loss = adapter_step.loss if math.isfinite(adapter_step.loss) else FIRST_LOSS
        if adapter_step.starved:
            queue.taken = adapter_step.fresh
            self._starved([queue.name], _alone(step.adapter_steps), adapter_step.error)
            self.size.shrink()
        elif adapter_step.burst:
            self._close_burst(queue, adapter_step)
        elif adapter_step.error:
            self._close_failed(queue, adapter_step)
        else:
            if adapter_step.turned and guard.change is None:
                self.versions.keep_before_change(queue)
                reason = "kept as a test until the preferences changed"
                self.records += [
                    pair.retired("skipped", adapter_step.version, 0, reason) for pair in queue.begin_change()
                ]
            ended = queue.finish_step(adapter_step, self.adapter_cache.get(queue.name).version, settings.align.epochs)
            self.records += ended
            for pair in adapter_step.fresh:
                self.size.forgive(pair.pair_id)
            self.pairs_trained += sum(record.version > 0 and record.state in ("trained", "learnt") for record in ended)
            if adapter_step.trained and not adapter_step.rejected_reason:
                self._close_trained(queue, adapter_step, seconds)

    def _close_trained(self, queue: AdapterQueue, adapter_step: AdapterStep, seconds: float) -> None:
        guard, change = queue.guard, queue.guard.change
        self.steps += 1
        self.size.grow()
        if is_practice(adapter_step.fresh):
            queue.practice_versions += 1
        else:
            queue.practice_versions = 0
            self.trained_tokens += sum(outcome.pair.num_tokens for outcome in adapter_step.outcomes if outcome.trained)
            guard.third_party_since_best += sum(
                -1 if outcome.pair.first_party else 1 for outcome in adapter_step.outcomes
            )
        verdict = change.verdict if change is not None else ""
        reason = "practised" if is_practice(adapter_step.fresh) else "trained"
        if change is not None and verdict == "change":
            reason = f"trained: {change.summary}"
        self.versions.publish(queue, adapter_step.version, reason, **adapter_step.figures(seconds))
        drops = [score.drop_nats for score in adapter_step.scores]
        # New pairs show at no cost that the language may be broken; the test makes sure.
        if drops and sum(drops) / len(drops) > self._settings.current.guard.max_kl_nats / 2:
            guard.request_test()
        if verdict:
            guard.change = None
        if change is not None and verdict == "confusion":
            # Every version since then was trained on some of these pairs.
            guard.withdrawn |= set(range(change.since + 1, self.adapter_cache.version(queue.name) + 1))
            guard.last_good = None
            why, pair_ids = "contradict what was learned before, and each other", change.pair_ids

            def quarantine() -> None:
                queue.drop(pair_ids)
                version, reason = self.adapter_cache.version(queue.name), f"burst: the user's own signals {why}"
                self.records += [PairRetired(n, queue.name, "quarantined", version, 0, reason) for n in pair_ids]

            self.versions.withdraw(queue.name, f"guard: {len(pair_ids)} pairs {why}", quarantine)

    def _close_job_step(self, queue: JobQueue, adapter_step: AdapterStep, seconds: float) -> None:
        """Publish the version that a job's step made; a step that found no memory is tried again, another's failure
        ends the job."""
        if adapter_step.starved:
            self._starved([queue.name], True, adapter_step.error)
            self.size.shrink()
        elif adapter_step.error or not (adapter_step.trained or queue.validates):
            self._skipped(queue, (), adapter_step.error or "no example of a step could be trained on")
        elif queue.validates:
            queue.advance()
            self.size.forgive(queue.plan.job_id)
            count = sum(outcome.count for outcome in adapter_step.outcomes)
            self._note_job(queue, adapter_step.version, loss=adapter_step.loss, seconds=seconds, validated=count)
        else:
            learning_rate = queue.step_settings.learning_rate
            queue.advance()
            self.steps += 1
            num_tokens = sum(pair.num_tokens for pair in adapter_step.fresh)
            self.trained_tokens += num_tokens
            self.size.grow()
            self.size.forgive(queue.plan.job_id)
            self.versions.publish(queue, adapter_step.version, "job", **adapter_step.figures(seconds))
            figures = {"tokens": num_tokens, "seconds": seconds, "learning_rate": learning_rate}
            self._note_job(queue, self.adapter_cache.version(queue.name), loss=adapter_step.loss, **figures)

    def _close_round_step(self, adapter_step: AdapterStep) -> None:
        """Have the round go on; a step that found no memory is tried again, another's failure ends the round."""
        if adapter_step.starved:
            self._starved([ROUNDS], True, adapter_step.error)
            self.size.shrink()
        elif adapter_step.error:
            self.rounds.fail(adapter_step.error)
        else:
            self.size.grow()
            self.size.forgive(ROUNDS)
            self.rounds.take_step(adapter_step)

    def _note_job(self, queue: JobQueue, version: int, **more: Any) -> None:
        """Record a step of a job: `more` are fields of its `JobStepped`."""
        self.records.append(JobStepped(queue.plan.job_id, queue.name, queue.done, version, queue.plan.steps, **more))

    def _close_burst(self, queue: AdapterQueue, adapter_step: AdapterStep) -> None:
        """Quarantine a burst: all new ones among the step's pairs and those that wait; the others wait again."""
        queue.put_back(adapter_step.fresh)
        held = queue.hold_burst(self.pair_queues.now)
        message = f"{len(held)} pairs of {queue.name} are quarantined ({adapter_step.burst})"
        logs.event(log, logging.WARNING, "quarantine", message, adapter=queue.name, pairs=len(held))
        self.records += [pair.retired("quarantined", adapter_step.version, 0, adapter_step.burst) for pair in held]

    def _close_failed(self, queue: AdapterQueue, adapter_step: AdapterStep) -> None:
        """Quarantine pairs whose loss is not finite and queue the others again; where all or none are so, skip all."""
        sick = {each.pair.pair_id: each.loss for each in adapter_step.outcomes if not math.isfinite(each.loss)}
        if 0 < len(sick) < len(adapter_step.fresh) and not is_practice(adapter_step.fresh):
            queue.put_back([pair for pair in adapter_step.fresh if pair.pair_id not in sick])
            for pair in (pair for pair in adapter_step.fresh if pair.pair_id in sick):
                reason = f"outlying: its loss is {sick[pair.pair_id]}"
                self.records.append(pair.retired("quarantined", adapter_step.version, pair.epochs_done, reason))
            return
        self._skipped(queue, adapter_step.fresh, adapter_step.error)
        if not math.isfinite(adapter_step.loss) and adapter_step.version > 0:
            # Weights that answer with NaN or infinity must not be served a moment longer.
            queue.guard.lr_scale /= 2
            self.versions.withdraw(queue.name, f"guard: {adapter_step.error}")

    def _close_test(self, queue: AdapterQueue, test: HeldOutEvaluation) -> None:
        guard, settings = queue.guard, self._settings.current.guard
        if queue is self.trials:
            self.trials.take(test, settings)
            return
        if queue is self.rounds:
            self.rounds.take_test(test.scores)
            return
        guard.take_test(test.version)
        self.size.forgive((queue.name, test.version))
        if test.neutral:
            self.pair_queues.neutral = test.neutral
        scores, records = queue.finish_test(test)
        self.records += records
        self._ask_starts(queue, [record for record in records if isinstance(record, PairScored)])
        if test.version and test.version == self.adapter_cache.version(queue.name):
            if len(scores) == len(queue.held_out):
                guard.fully_tested = test.version
            problem = self.versions.judge(queue, TestScore.of(test.version, scores, test.neutral_nll), settings)
            nll, base_nll = test.neutral_nll or (None, None)
            self.records.append(VersionTested(queue.name, test.version, nll, base_nll, problem))

    def _ask_starts(self, queue: AdapterQueue, scores: Sequence[PairScored]) -> None:
        """Have starts scored on a user's pairs, where its adapter has scored new ones; nothing where there are none."""
        if self.trials.catalogue and scores:
            queue.choice.take_scores(scores)
            self.trials.asked[queue.name] = None

    # -- steps that do not finish ------------------------------------------------------------------------------------

    def abandon(self, adapter: str) -> None:
        """Drop the adapter's step under way; its pairs go back to the head of the queue.

        So do those of all adapters in the step: none of them has taken its optimizer step yet, so they start again as
        if it had not begun.
        """
        queue = self.pair_queues.queues.get(adapter)
        if queue is None or queue.step is None:
            return
        queue.step.free()
        for name in queue.step.adapters:
            self.pair_queues[name].put_back()

    def starved(self, step: FinetuneStep, alone: bool, reason: str) -> None:
        """Drop a step under way that ran out of memory; `alone`: no other fine-tuning needed memory then."""
        if isinstance(step, DpoStep):
            step.free()
            self._starved(step.adapters, alone and _alone(step.adapter_steps), reason)
        elif self.size.hopeless((step.adapters[0], step.version), others_first=False):
            step.free()
            queue = self.pair_queues[step.adapters[0]]
            queue.end()
            queue.skip_test(step.version)
        else:
            self.abandon(step.adapters[0])

    def _starved(self, adapters: Collection[str], alone: bool, reason: str) -> None:
        """Queue the pairs of a starved step again; a single one (`alone`) goes last, and is skipped once hopeless."""
        for queue in [self.pair_queues[name] for name in adapters]:
            practised = is_practice(queue.taken)
            queue.put_back()
            if isinstance(queue, JobQueue):
                if self.size.hopeless(queue.plan.job_id, others_first=False, max_tries=_JOB_TRIES):
                    self._skipped(queue, (), f"out of memory: {reason}")
            elif queue is self.rounds:
                if self.size.hopeless(ROUNDS, others_first=False, max_tries=_JOB_TRIES):
                    self.rounds.fail(f"out of memory: {reason}")
            elif practised:
                queue.practice.clear()
            elif alone:
                pair = queue.queue.popleft()
                if self.size.hopeless(pair.pair_id):
                    self._skipped(queue, [pair], f"out of memory, also alone: {reason}")
                else:
                    queue.queue.append(pair)

    def skip(self, step: FinetuneStep, reason: str) -> None:
        """Drop a step or test under way because it failed."""
        step.free()
        if isinstance(step, DpoStep):
            for name, adapter_step in step.adapter_steps.items():
                # They may be at fault, and none is tried alone: they are learned already.
                self.pair_queues[name].drop({each.pair_id for each in adapter_step.replay})
            self._failed(step.adapters, reason)
        else:
            queue, pair = self.pair_queues[step.adapters[0]], step.pair_forwards[-1].pair
            queue.end()
            if pair.pair_id in queue.held_out and (step.neutral or step.scores):
                # Others were scored, so this pair is at fault: they test the version, now and later.
                queue.drop({pair.pair_id})
                self._skipped(queue, [pair], f"as a test: {reason}")
            else:
                queue.skip_test(step.version)

    def _failed(self, adapters: Collection[str], reason: str) -> None:
        """Retire a failed step's pair as skipped.

        Several adapters are first tried apart, and then the pairs of one, for one of them alone may be at fault.
        """
        for queue in [self.pair_queues[name] for name in adapters]:
            if len(adapters) > 1:
                queue.put_back()
                queue.alone = True
            elif not (queue.one_by_one or isinstance(queue, JobQueue)):
                queue.one_by_one = len(queue.taken)
                queue.put_back()
            else:
                pairs = queue.taken
                queue.end()
                if isinstance(queue, JobQueue):
                    reason += f" (in line {sorted({-1 - pair.pair_id >> 16 for pair in pairs})} of the file)"
                self._skipped(queue, pairs, reason)

    def _skipped(self, queue: AdapterQueue, pairs: Sequence[TokenPair], reason: str) -> None:
        if queue is self.rounds:
            self.rounds.fail(reason)
            return
        version = self.adapter_cache.version(queue.name)
        if isinstance(queue, JobQueue):
            left_out = queue.validates and not queue.failed
            if left_out:
                queue.advance()
                self.size.forgive(queue.plan.job_id)
            queue.failed = not left_out
            self._note_job(queue, version, error=reason, left_out=left_out)
            return
        self.records.append(
            StepSkipped(queue.name, version, tuple(pair.pair_id for pair in pairs if pair.pair_id > 0), reason)
        )
        new = [pair for pair in pairs if not pair.practice]
        self.records += [pair.retired("skipped", version, pair.epochs_done, reason) for pair in new]


def _alone(by_adapter: Mapping[str, StepBatch | AdapterStep]) -> bool:
    """Whether a step has a single pair, so that no smaller one can be made."""
    return len(by_adapter) == 1 and all(len(own.fresh) == 1 and not own.replay for own in by_adapter.values())
