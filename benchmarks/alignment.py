"""How well preferences are learnt while the engine serves a full load, by the moment at which users would notice.

Owns a run under load and what is told of it: each pair scored before it was trained on, each pair scored by the version
that answered when it came, and pairs that are never trained on over time. Scores of the last two kinds are not the
engine's: transformers and peft compute them afterwards from the versions on disk. Must not know tables or reports.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.sequential_dpo import Reference
from benchmarks.support.preference_streams import quarters
from edged.align.feedback.pair import Record, StepSkipped, TokenPair, VersionPublished, VersionSaved
from edged.bench.recorder import ReplayRecorder, request_counts, serving_figures
from edged.bench.traces import Arrival, RequestTrace, scale_trace
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Request, Sampling
from edged.settings.load import Settings

WEIGHTS_FILE = "adapter_model.safetensors"
_LINE_EVERY_S = 10.0
Progress = Callable[[str], None]
_Event = tuple[float, int, Arrival | TokenPair]
"""When, which number of its kind, and what."""
Logps = Sequence[float]
"""[chosen, rejected, reference chosen, reference rejected] of a pair, in nats."""


class AlignmentError(RuntimeError):
    """A run cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do in `seconds`: requests at `rate_per_s`, and pairs at even distances."""

    model_dir: Path
    trace: RequestTrace
    rate_per_s: float
    seconds: float
    longest_drain_s: float = 300.0
    """How long pairs may take that are not learnt when the load ends."""
    seed: int = 0


@dataclass
class Notes(ReplayRecorder):
    """Everything that a run left behind; moments of what `ReplayRecorder` does not have are seconds since its start."""

    started_s: float = 0.0
    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    """When each pair came, by adapter and pair id."""
    versions: list[tuple[float, VersionPublished]] = field(default_factory=list)
    files: dict[tuple[str, int], str] = field(default_factory=dict)
    """Weights of the versions on disk, by adapter and version."""
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def journal(self, records: list[Record]) -> None:
        """The engine's callback for the learning loop's records."""
        now_s = time.monotonic() - self.started_s
        for record in records:
            if isinstance(record, VersionPublished):
                self.versions.append((now_s, record))
            elif isinstance(record, VersionSaved):
                self.files[record.adapter, record.version] = str(Path(record.path) / WEIGHTS_FILE)
        super().journal(records)

    def file_at(self, adapter: str, at_s: float) -> str | None:
        """Weights of the newest version that was published by then and is on disk; None: nothing was learnt yet."""
        known = [
            (moment, self.files[adapter, version.version])
            for moment, version in self.versions
            if version.adapter == adapter and (adapter, version.version) in self.files
        ]
        index = bisect_right(known, at_s, key=lambda entry: entry[0])
        return known[index - 1][1] if index else None


def run_under_load(
    load: Load, settings: Settings, pairs: Sequence[TokenPair], data_dir: Path, progress: Progress = lambda _line: None
) -> Notes:
    """Serve and learn; the adapters' versions are in `data_dir` then.

    Raises AlignmentError, and what building an engine raises.
    """
    notes = Notes()
    # Versions are kept and written often: they are what is scored afterwards.
    store = settings.store.model_copy(update={"save_every_s": 0.5, "keep_versions": 1_000_000})
    settings = settings.model_copy(update={"store": store})
    engine = Engine.build(settings, load.model_dir, notes.deliver, notes.journal, data_dir)
    engine.start()
    try:
        _play(engine, notes, load, pairs, progress)
    finally:
        engine.stop(0.0)
    return notes


def _play(engine: Engine, notes: Notes, load: Load, pairs: Sequence[TokenPair], progress: Progress) -> None:
    adapters = sorted({pair.adapter for pair in pairs})
    vocab = int(engine.status()["model"]["vocab_size"])
    arrivals = scale_trace(
        load.trace,
        rate_per_s=load.rate_per_s,
        seconds=load.seconds,
        context_tokens=engine.max_context_tokens,
        # Tokens that mean something to a tokenizer are among the first.
        token_ids=range(vocab // 8, vocab),
        seed=load.seed,
    )
    gap_s = load.seconds / len(pairs)
    requests: Iterator[_Event] = ((arrival.at_s, number, arrival) for number, arrival in enumerate(arrivals))
    feedback: Iterator[_Event] = ((number * gap_s, number, pair) for number, pair in enumerate(pairs))
    notes.started_s = time.monotonic()
    next_line_s = _LINE_EVERY_S
    for at_s, number, item in merge(requests, feedback, key=lambda event: event[0]):
        _sleep_until(notes.started_s + at_s, engine)
        if isinstance(item, Arrival):
            _submit(engine, notes, item, number, adapters[number % len(adapters)])
        else:
            notes.sent[item.adapter, item.pair_id] = time.monotonic() - notes.started_s
            notes.expect_pair(item.pair_id)
            engine.submit_pairs([item])
        if at_s >= next_line_s:
            next_line_s += _LINE_EVERY_S
            progress(
                f"{at_s:.0f} of {load.seconds:.0f} s: {notes.open_requests} requests open, {len(notes.sent)} pairs "
                f"sent, {len(notes.scores)} scored, {len(notes.versions)} versions"
            )
    _sleep_until(notes.started_s + load.seconds, engine)
    scored_in_time = len(notes.scores)
    status = engine.status()
    notes.report = {
        **serving_figures(list(notes.answers.values()), notes.started_s, load.seconds),
        "iterations": status["totals"]["iterations"],
        "steps_in_time": status["finetune"]["steps"],
        "scored_in_time": scored_in_time,
    }
    _drain(engine, notes, load)
    notes.report["requests"] = request_counts(list(notes.answers.values()))


def _submit(engine: Engine, notes: Notes, arrival: Arrival, number: int, adapter: str) -> None:
    request_id = f"request-{number}"
    sampling = Sampling(max_tokens=arrival.output_tokens, seed=number, ignore_eos=True)
    notes.expect(request_id, notes.started_s + arrival.at_s, len(arrival.prompt_ids))
    try:
        engine.submit(Request(request_id, arrival.prompt_ids, sampling, adapter))
    except EngineBusy:
        notes.refuse(request_id)


def _sleep_until(moment_s: float, engine: Engine) -> None:
    while (left := moment_s - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        _check(engine)


def _check(engine: Engine) -> None:
    if engine.error:
        raise AlignmentError(f"the engine ended: {engine.error}")


def _drain(engine: Engine, notes: Notes, load: Load) -> None:
    """Open answers are given up; pairs that wait are learnt, so that every one of them is told of."""
    for request_id, answer in list(notes.answers.items()):
        if answer.finish is None:
            engine.cancel(request_id)
    deadline_s = time.monotonic() + load.longest_drain_s
    notes.wait_until_answered(load.longest_drain_s, lambda: not engine.error)
    if engine.status()["finetune"]["enabled"]:
        while len(notes.scores) < len(notes.sent) and time.monotonic() < deadline_s:
            time.sleep(0.1)
            _check(engine)


# -- what is told of a run -------------------------------------------------------------------------------------------


def figures(rows: Sequence[Logps]) -> dict[str, list[float | None]]:
    """By quarter: reward accuracy (against the reference), win rate, CLPD in nats (MACE 3.1)."""
    return {
        "reward_accuracy": quarters([_correct(*row) for row in rows]),
        "win_rate": quarters([float(c > r) for c, r, _, _ in rows]),
        "clpd_nats": quarters([c - r for c, r, _, _ in rows]),
    }


def _correct(chosen: float, rejected: float, ref_chosen: float, ref_rejected: float) -> float:
    """1 where the margin is right, 0 where it is wrong; an untrained adapter is undecided everywhere: 0.5."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return float(margin > 0) if margin else 0.5


def means(rows: Sequence[Logps]) -> dict[str, float]:
    """The same over all pairs, of which there is at least one."""
    count = len(rows)
    return {
        "reward_accuracy": sum(_correct(*row) for row in rows) / count,
        "win_rate": sum(c > r for c, r, _, _ in rows) / count,
        "clpd_nats": sum(c - r for c, r, _, _ in rows) / count,
    }


def before_training(notes: Notes, pairs: Sequence[TokenPair]) -> dict[str, list[float | None]]:
    """`figures` by the engine's own scores, each by the version that was about to be trained on the pair.

    In the order in which the pairs came; a pair that was never scored is left out.
    """
    scores = {(score.adapter, score.pair_id): score for score in notes.scores}
    found = [scores[key] for pair in pairs if (key := (pair.adapter, pair.pair_id)) in scores]
    return figures([(s.chosen_logp, s.rejected_logp, s.ref_chosen_logp, s.ref_rejected_logp) for s in found])


def on_arrival(notes: Notes, pairs: Sequence[TokenPair], reference: Reference) -> dict[str, list[float | None]]:
    """`figures` of each pair by the version that answered when it came: what its user saw at that wall time."""
    rows: list[Logps] = []
    for file, group in groupby(
        pairs, key=lambda pair: notes.file_at(pair.adapter, notes.sent[pair.adapter, pair.pair_id])
    ):
        rows += score(reference, list(group), file)
    return figures(rows)


def held_out_over_time(
    notes: Notes, adapter: str, held_out: Sequence[TokenPair], reference: Reference, moments_s: Sequence[float]
) -> list[dict[str, float]]:
    """`means` over pairs that were never trained on, by the version of each moment."""
    found: dict[str | None, dict[str, float]] = {}
    series = []
    for at_s in moments_s:
        file = notes.file_at(adapter, at_s)
        if file not in found:
            found[file] = means(score(reference, held_out, file))
        series.append({"at_s": at_s, **found[file]})
    return series


def score(reference: Reference, pairs: Sequence[TokenPair], file: str | None) -> list[list[float]]:
    """The four sums of each pair by the weights in `file`; None: nothing was learnt, the base model's."""
    return reference.score(pairs, file) if file is not None else reference.base(pairs)


def learning(notes: Notes) -> dict[str, Any]:
    """Counts of pairs, steps and versions, and why any was taken back or skipped."""
    trained = [version.pairs for _, version in notes.versions if version.reason == "trained"]
    reasons = [version.reason for _, version in notes.versions if version.reason != "trained"]
    skipped: list[StepSkipped] = notes.skipped_steps
    latest = {(score.adapter, score.pair_id): at_s for score, at_s in zip(notes.scores, notes.scored_s, strict=True)}
    waited = [at_s - notes.started_s - notes.sent[key] for key, at_s in latest.items()]
    return {
        "pairs_sent": len(notes.sent),
        "pairs_scored": len(latest),
        "versions": len(notes.versions),
        "mean_pairs_of_a_step": sum(trained) / len(trained) if trained else None,
        "taken_back": reasons,
        "skipped": [step.reason for step in skipped],
        "mean_wait_s": sum(waited) / len(waited) if waited else None,
    }
