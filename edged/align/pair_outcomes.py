"""What becomes of the pairs of a step or test that ended: trained, learnt, queued again, or quarantined."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from edged.align.dpo.adapter_step import AdapterStep, PairOutcome
from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.feedback.pair import PairRetired, PairScored, PairState, Record, TokenPair
from edged.align.pair_queues import AdapterQueue
from edged.runtime import logs
from edged.settings.load import GuardSettings

log = logging.getLogger("edged.align")


def retired(pair: TokenPair, state: PairState, version: int, epochs: int, reason: str = "") -> PairRetired:
    """The record of a pair's new state."""
    return PairRetired(pair.pair_id, pair.adapter, state, version, epochs, reason)


def of_step(learner: AdapterQueue, member: AdapterStep, version: int, epochs: int) -> list[PairRetired]:
    """A step's pairs, of which each is to be trained on `epochs` times, go where they belong."""
    judged = [(outcome.pair, outcome.loss, outcome.verdict) for outcome in member.outcomes]
    learner.suspicion.learn(judged, member.grad_norm)
    records = []
    for outcome in member.outcomes:
        if member.strange and outcome.trained and outcome.pair.trusted:
            # Nothing was learned yet of what somebody found good: its next step is without those at fault.
            learner.queue.append(outcome.pair)
        else:
            records.append(_of_pair(learner, outcome, version, epochs, member.strange))
    return records


def _of_pair(learner: AdapterQueue, outcome: PairOutcome, version: int, epochs: int, strange: str) -> PairRetired:
    pair, done = outcome.pair, outcome.pair.epochs_done + int(outcome.trained)
    why = outcome.verdict.why or (strange if outcome.trained else "")
    if why:
        return retired(pair, "quarantined", version, pair.epochs_done, why)
    if outcome.trained and done < epochs:
        learner.queue.append(replace(pair, epochs_done=done))
        return retired(pair, "queued", version, done)
    ended: PairState = "trained" if outcome.trained else "learnt"
    learner.replay.append(replace(pair, epochs_done=done, state=ended))
    reason = "" if outcome.trained else f"loss {outcome.loss:.4f} is under align.loss_threshold"
    return retired(pair, ended, version, done, reason)


def of_burst(learner: AdapterQueue, member: AdapterStep, version: int, now: float) -> list[PairRetired]:
    """A burst is quarantined: the step's new pairs, and all that are as new; the others wait again.

    `now` in seconds.
    """
    spared = [pair for pair in member.fresh if pair.epochs_done or pair.trusted or pair.direct or pair.again]
    pairs = [pair for pair in member.fresh if pair not in spared] + learner.hold_burst(now)
    learner.queue.extendleft(reversed(spared))
    message = f"{len(pairs)} pairs of {learner.name} are quarantined ({member.burst})"
    logs.event(log, logging.WARNING, "quarantine", message, adapter=learner.name, pairs=len(pairs))
    return [retired(pair, "quarantined", version, pair.epochs_done, member.burst) for pair in pairs]


def of_sick(learner: AdapterQueue, member: AdapterStep, version: int) -> list[PairRetired]:
    """The pairs whose loss alone is not finite are quarantined, the others queued again; nothing when all are such."""
    sick = {outcome.pair.pair_id: outcome.loss for outcome in member.outcomes if not math.isfinite(outcome.loss)}
    if not 0 < len(sick) < len(member.fresh):
        return []
    records = []
    for pair in reversed(member.fresh):
        if pair.pair_id in sick:
            reason = f"outlying: its loss is {sick[pair.pair_id]}"
            records.append(retired(pair, "quarantined", version, pair.epochs_done, reason))
        else:
            learner.queue.appendleft(pair)
    return records


def of_age(learner: AdapterQueue, version: int, guard: GuardSettings) -> list[PairRetired]:
    """Held-out pairs that newer ones took the place of are queued."""
    reason = "newer pairs are kept as the test"
    return [retired(pair, "queued", version, pair.epochs_done, reason) for pair in learner.outgrown(guard)]


def of_turn(learner: AdapterQueue, member: AdapterStep) -> None:
    """A step's new direct pairs are watched while it is open whether preferences have changed."""
    for outcome in member.outcomes:
        pair = outcome.pair
        if learner.turn is not None and pair.direct and not pair.epochs_done:
            learner.turn.take(
                pair.pair_id, outcome.loss, outcome.verdict.contrary, len(pair.chosen) - len(pair.rejected)
            )


def of_test(learner: AdapterQueue, test: HeldOutEvaluation) -> tuple[list[PairScored], list[Record]]:
    """(scores that a judgement may use, records): new held-out pairs that are outlying are quarantined."""
    used: list[PairScored] = []
    records: list[Record] = []
    for scored in test.scores:
        pair = learner.held_out.get(scored.pair_id)
        new = scored.pair_id in learner.unscored
        first = replace(scored, split="prequential", kl_nats=None)
        why = learner.suspicion.judge(pair, scored.loss).why if pair is not None and new else ""
        if pair is not None and why:
            learner.drop({pair.pair_id})
            records += [first, retired(pair, "quarantined", test.version, 0, why)]
            continue
        used.append(scored)
        records += [scored, first] if new else [scored]
    learner.unscored -= {scored.pair_id for scored in used}
    return used, records
