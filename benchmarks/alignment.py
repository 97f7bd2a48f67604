"""Alignment under full serving load: four tastes, policies side by side, beside a plain sequential DPO loop.

    python -m benchmarks.alignment hh-harmless.jsonl.gz --model hh-lm --trace azure-llm-2023-conv.csv [--quick]
        [--tastes concise,elaborate] [--policies mace,ekya,adainf] [--seeds 1] [--rate R] [--readers 6]
        [--thumbs SHARE] [--output FILE]

The stream is the file's lines from 1401 on, which hh-lm was not trained on, each pair tested before it is trained on.
The loop (transformers, peft, autograd) has the machine for itself. Then each policy gets the same requests and the same
pairs at the same moments: requests at 90 % of the rate that a burst reaches, pairs at even distances. Told by quarter
of the stream: reward accuracy before training on a pair (as the loop's), and by the version that answered when the pair
came (at equal wall time); and CLPD of 64 earlier pairs, which no adapter trains on, over time. Pairs that still wait
when the load ends are learned after it, so that every pair has a score; how many were scored in time is told. At last
two users with opposite tastes share an engine. Of --thumbs of the pairs a user rates one answer alone, which is learned
where `align.unpaired` in --config says so; the loop has the whole pairs, and a pair counts on arrival either way. The
scores before training are the engine's own; transformers and peft compute the others afterwards, from the versions on
disk. Takes some 6 minutes a taste, policy and seed on 2 cores.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import math
import sys
import tempfile
import time
from argparse import BooleanOptionalAction, Namespace
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.support.command import (
    DEVICE,
    FORMAT,
    MODEL,
    PAIRS,
    READERS,
    SEEDS,
    THUMBS,
    existing_file,
    finish,
    keep,
    markdown,
    names,
    number,
    option,
    pace_of,
    parse,
    say,
)
from benchmarks.support.interleave import open_sides
from benchmarks.support.local_engine import LearningRecorder, LocalEngine
from benchmarks.support.machine_limits import report_header
from benchmarks.support.preference_streams import FIRST_ONLINE_LINE, TASTES, Taste, quarters, rated, relabel
from benchmarks.support.sequential_dpo import Reference, recipe_of, side_of
from edged.align.feedback.pair import StepSkipped, TokenPair
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy
from edged.engine.sampling.params import Sampling
from edged.lab.bench.figures import request_counts, serving_figures
from edged.lab.bench.replay import ReplayPlan, load_pairs, replay
from edged.lab.bench.traces import Arrival, PromptIds, RequestTrace, TraceError, read_trace, scale_trace
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.reader import Pace
from edged.settings.load import Settings, load_settings
from edged.text.tokenizer import Tokenizer

OPPOSITE: tuple[Taste, Taste] = ("concise", "elaborate")
FULL_LOAD = 0.9
"""Request rate as a share of the rate that a burst reaches."""
ALLOWED = 0.03
"""Reward accuracy by which a quarter may stay below the loop's."""
_SECOND_USER = 1_000_000
"""Added to the pair ids of the second of two users."""


_LINE_EVERY_S = 10.0
_Event = tuple[float, int, Arrival | TokenPair]
"""(time in seconds, number among its kind, the request or pair)."""
Logps = Sequence[float]
"""[chosen, rejected, reference chosen, reference rejected] log-probabilities of a pair, in nats."""


class AlignmentError(RuntimeError):
    """A run cannot continue; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine for `seconds`: requests at `rate_per_s`, and pairs at even distances."""

    model_dir: Path
    trace: RequestTrace
    rate_per_s: float
    seconds: float
    longest_drain_s: float = 300.0
    """Longest time to learn the pairs that are still queued when the load ends."""
    seed: int = 0
    pace: Pace | None = None
    """Speed of the readers of the answers; None: nobody reads them while they are made."""


class Notes(LearningRecorder):
    """A recorder of a run's scores, outcomes and versions, with its report."""

    def __init__(self) -> None:
        super().__init__()
        self.started_s = 0.0
        self.report: dict[str, Any] = {}

    def file_at(self, adapter: str, at_s: float) -> str | None:
        """Return the weights of the newest version published by `at_s` that is on disk; None before the first one."""
        known = [
            (moment_s - self.started_s, self.files[adapter, version.version])
            for moment_s, version in self.versions
            if version.adapter == adapter and (adapter, version.version) in self.files
        ]
        index = bisect_right(known, at_s, key=lambda entry: entry[0])
        return known[index - 1][1] if index else None


def run_under_load(load: Load, settings: Settings, pairs: Sequence[TokenPair], data_dir: Path) -> Notes:
    """Serve and learn under the load; the adapters' versions are in `data_dir` afterwards.

    Raises AlignmentError, and what building an engine raises.
    """
    notes = Notes()
    # Versions are kept and written often, because they are scored afterwards.
    store = settings.store.model_copy(update={"save_every_s": 0.5, "keep_versions": 1_000_000})
    settings = settings.model_copy(update={"store": store})
    local = LocalEngine(load.model_dir, settings, data_dir, recorder=notes)
    try:
        _play(local, notes, load, pairs)
    finally:
        local.close()
    return notes


def _play(local: LocalEngine, notes: Notes, load: Load, pairs: Sequence[TokenPair]) -> None:
    engine, vocab = local.engine, local.vocab
    adapters = sorted({pair.adapter for pair in pairs})
    # A tokenizer's special tokens are among the first ids.
    prompts = PromptIds(engine.max_context_tokens, range(vocab // 8, vocab), load.seed)
    arrivals = scale_trace(load.trace, prompts, rate_per_s=load.rate_per_s, seconds=load.seconds)
    gap_s = load.seconds / len(pairs)
    requests: Iterator[_Event] = ((arrival.at_s, number, arrival) for number, arrival in enumerate(arrivals))
    feedback: Iterator[_Event] = ((number * gap_s, number, pair) for number, pair in enumerate(pairs))
    notes.started_s = time.monotonic()
    next_line_s = _LINE_EVERY_S
    for at_s, index, item in merge(requests, feedback, key=lambda event: event[0]):
        _sleep_until(notes.started_s + at_s, engine)
        if isinstance(item, Arrival):
            name, adapter = f"request-{index}", adapters[index % len(adapters)]
            drawn = {"temperature": Sampling().temperature, "seed": index}
            try:
                local.ask(
                    name, item.prompt_ids, item.output_tokens, adapter, notes.started_s + at_s, load.pace, **drawn
                )
            except EngineBusy:
                notes.refuse(name)
        elif item.single and engine.settings.align.unpaired == "off":
            notes.expect_pair(item.pair_id)
        else:
            local.submit_pairs([item])
        if at_s >= next_line_s:
            next_line_s += _LINE_EVERY_S
            say(
                f"  {at_s:.0f} of {load.seconds:.0f} s: {notes.open_requests} requests open, {len(notes.pairs)} pairs "
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
    _drain(engine, notes, load, sum(not pair.single for pair in pairs))
    notes.report["requests"] = request_counts(list(notes.answers.values()))


def _sleep_until(moment_s: float, engine: Engine) -> None:
    while (left := moment_s - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        _check(engine)


def _check(engine: Engine) -> None:
    if engine.error:
        raise AlignmentError(f"the engine ended: {engine.error}")


def _drain(engine: Engine, notes: Notes, load: Load, pairs: int) -> None:
    """Cancel open answers and wait until what is queued is learned, so that every one of `pairs` has a score."""
    for request_id, answer in list(notes.answers.items()):
        if answer.finish is None:
            engine.cancel(request_id)
    deadline_s = time.monotonic() + load.longest_drain_s
    notes.wait_until_answered(load.longest_drain_s, lambda: not engine.error)
    if engine.status()["finetune"]["enabled"]:
        while time.monotonic() < deadline_s:
            if len(notes.scores) >= pairs and not engine.status()["finetune"]["pairs_queued"]:
                break
            time.sleep(0.1)
            _check(engine)


# -- what is told of a run -------------------------------------------------------------------------------------------


def figures(rows: Sequence[Logps]) -> dict[str, list[float | None]]:
    """Return by quarter: reward accuracy (against the reference), win rate, CLPD in nats (MACE 3.1)."""
    return {
        "reward_accuracy": quarters([_correct(*row) for row in rows]),
        "win_rate": quarters([float(c > r) for c, r, _, _ in rows]),
        "clpd_nats": quarters([c - r for c, r, _, _ in rows]),
    }


def _correct(chosen: float, rejected: float, ref_chosen: float, ref_rejected: float) -> float:
    """Return 1 if the reward margin is right, 0 if wrong, 0.5 if it is 0, as for an untrained adapter."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return float(margin > 0) if margin else 0.5


def means(rows: Sequence[Logps]) -> dict[str, float]:
    """Return the same metrics over all pairs, of which there is at least one."""
    count = len(rows)
    return {
        "reward_accuracy": sum(_correct(*row) for row in rows) / count,
        "win_rate": sum(c > r for c, r, _, _ in rows) / count,
        "clpd_nats": sum(c - r for c, r, _, _ in rows) / count,
    }


def before_training(notes: Notes, pairs: Sequence[TokenPair]) -> dict[str, list[float | None]]:
    """Return `figures` from the engine's own scores, each by the version that was about to be trained on the pair.

    Rows are in the order in which the pairs came; a pair that was never scored is left out.
    """
    scores = {(score.adapter, score.pair_id): score for _, score in notes.scores}
    found = [scores[key] for pair in pairs if (key := (pair.adapter, pair.pair_id)) in scores]
    return figures([(s.chosen_logp, s.rejected_logp, s.ref_chosen_logp, s.ref_rejected_logp) for s in found])


def on_arrival(notes: Notes, pairs: Sequence[TokenPair], reference: Reference) -> dict[str, list[float | None]]:
    """Return `figures` of each pair by the version that was served when the pair came."""
    rows: list[Logps] = []
    for weights, group in groupby(
        pairs, key=lambda pair: notes.file_at(pair.adapter, notes.pairs[pair.pair_id].sent_s - notes.started_s)
    ):
        rows += score(reference, list(group), weights)
    return figures(rows)


def held_out_over_time(
    notes: Notes, adapter: str, held_out: Sequence[TokenPair], reference: Reference, moments_s: Sequence[float]
) -> list[dict[str, float]]:
    """Return `means` over pairs that were never trained on, by the version that was served at each time."""
    found: dict[str | None, dict[str, float]] = {}
    series = []
    for at_s in moments_s:
        file = notes.file_at(adapter, at_s)
        if file not in found:
            found[file] = means(score(reference, held_out, file))
        series.append({"at_s": at_s, **found[file]})
    return series


def score(reference: Reference, pairs: Sequence[TokenPair], file: str | None) -> list[list[float]]:
    """Return the four log-probabilities of each pair under the weights in `file`; None: the base model's."""
    return reference.score(pairs, file) if file is not None else reference.base(pairs)


def learning(notes: Notes) -> dict[str, Any]:
    """Return counts of pairs, steps and versions, and the reasons of rollbacks and skipped steps."""
    trained = [version.pairs for _, version in notes.versions if version.reason == "trained"]
    reasons = [version.reason for _, version in notes.versions if version.reason != "trained"]
    skipped: list[StepSkipped] = notes.skipped_steps
    latest = {score.pair_id: at_s for at_s, score in notes.scores}
    waited = [at_s - notes.pairs[pair_id].sent_s for pair_id, at_s in latest.items()]
    return {
        "pairs_sent": len(notes.pairs),
        "pairs_scored": len(latest),
        "versions": len(notes.versions),
        "mean_pairs_of_a_step": sum(trained) / len(trained) if trained else None,
        "taken_back": reasons,
        "skipped": [step.reason for step in skipped],
        "mean_wait_s": sum(waited) / len(waited) if waited else None,
    }


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The options, streams and reference model that all runs share."""

    options: Namespace
    tokenizer: Tokenizer
    online: list[TokenPair]
    earlier: list[TokenPair]
    reference: Reference
    load: Load

    def stream(self, taste: Taste, adapter: str) -> list[TokenPair]:
        """Return the taste's pairs, as many as the options ask for."""
        return relabel(self.online, taste, adapter, self.tokenizer.decode)[: self.options.pairs_most]

    def held_out(self, taste: Taste) -> list[TokenPair]:
        """Return the last pairs before the stream on which the taste has a preference."""
        return relabel(self.earlier, taste, taste, self.tokenizer.decode)[-self.options.held_out :]


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    header = report_header(options.device)
    tokenizer = Tokenizer.load(options.model)
    pairs, _ = load_pairs(options.pairs, options.format, tokenizer, Settings().align.max_pair_tokens)
    online = [pair for pair in pairs if pair.pair_id >= options.first_line]
    earlier = [pair for pair in pairs if pair.pair_id < options.first_line]
    if not online or not earlier:
        sys.exit(
            f"{options.pairs.name} has {len(earlier)} usable pairs before line {options.first_line} and {len(online)} "
            "from there on: both are needed, choose another --first-line"
        )
    try:
        trace = read_trace(options.trace)
    except TraceError as error:
        sys.exit(str(error))
    rate = options.rate or FULL_LOAD * capacity(options)
    load = Load(options.model, trace, rate, 0.0, pace=pace_of(options))
    recipe = recipe_of(str(options.model), settings_of(options, "mace").align, options.device)
    with open_sides([side_of(recipe)]) as (side,):
        bench = Bench(options, tokenizer, online, earlier, Reference(side), load)
        report = {
            "model": options.model.name,
            **header,
            "trace": load.trace.name,
            "requests_per_s": rate,
            "readers_words_per_s": options.readers,
            "pairs_per_s": options.pairs_per_s,
            "thumbs": options.thumbs,
            "settings": options.config.read_text() if options.config else "",
            "tastes": {},
        }
        for taste in options.tastes:
            report["tastes"][taste] = one_taste(bench, taste)
            keep(options, report)
        if options.opposite:
            report["opposite"] = [opposite_tastes(bench, seed, report["tastes"]) for seed in range(options.seeds)]
    finish(options, report, table(report))


def parsed() -> Namespace:
    """Parse the command line."""
    return parse(
        __doc__,
        PAIRS,
        FORMAT,
        option("--first-line", "of the stream", FIRST_ONLINE_LINE),
        MODEL,
        option("--trace", 'an Azure .csv, a Mooncake .jsonl or "poisson"', "poisson"),
        option("--tastes", "by comma", list(TASTES), list(OPPOSITE), type=names(TASTES)),
        option("--policies", "by comma", ["mace", "ekya", "adainf"], ["mace"], type=names(ROWS)),
        option("--opposite", "two users at last", True, action=BooleanOptionalAction),
        SEEDS,
        option("--rate", "requests/s (default 90 %% of a burst's)", type=number(float)),
        READERS,
        option("--pairs-per-s", "of each user", 2.0, 5.0),
        THUMBS,
        option("--pairs-most", "of a taste, at most; all unless told", None, 40, type=number(int)),
        option("--held-out", "pairs scored over time", 64, 8),
        option("--moments", "at which they are", 12, 3),
        option("--config", "TOML file with further settings", type=existing_file),
        DEVICE,
        quick="40 pairs, 2 tastes, fast",
    )


def settings_of(options: Namespace, policy: str) -> Settings:
    """Return the default settings, or the file's, with the options of the run."""
    overrides = {"model.device": options.device, "scheduler.policy": policy}
    return load_settings(options.config, environ={}, overrides=overrides)


def capacity(options: Namespace) -> float:
    """Return the requests per second of a burst, as a replay measures it."""
    settings = settings_of(options, "fcfs")
    plan = ReplayPlan(
        trace=options.trace,
        pairs=options.pairs,
        model_dir=options.model,
        settings=settings,
        pair_format=options.format,
        retrain_rate=0.0,
        seconds=1.0,
    )
    return float(replay(plan, lambda line: say(f"  {line}"))["load"]["capacity_per_s"])


# -- one taste -------------------------------------------------------------------------------------------------------


def one_taste(bench: Bench, taste: Taste) -> dict[str, Any]:
    """Run the sequential loop, then every policy, for every seed."""
    pairs = bench.stream(taste, taste)
    found: dict[str, Any] = {"pairs": len(pairs), "loop": [], "policies": {name: [] for name in bench.options.policies}}
    for seed in range(bench.options.seeds):
        say(f"{taste}, seed {seed}: {len(pairs)} pairs, the loop")
        found["loop"].append(loop(bench, taste, pairs, seed))
        for policy in bench.options.policies:
            say(f"{taste}, seed {seed}: {policy}")
            named = [replace(pair, adapter=f"{taste}-{seed}") for pair in pairs]
            found["policies"][policy].append(loaded(bench, policy, named, seed, {f"{taste}-{seed}": taste}))
    return found


def loop(bench: Bench, taste: Taste, pairs: Sequence[TokenPair], seed: int) -> dict[str, Any]:
    """Run the reference: a sequential DPO loop without a server, and the base model without learning."""
    started = time.monotonic()
    rows = bench.reference.learn(pairs, seed)
    seconds = time.monotonic() - started
    held_out = bench.held_out(taste)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        file = Path(folder) / "loop.safetensors"
        bench.reference.save(str(file))
        after = bench.reference.score(held_out)
        said = strayed(bench, held_out, str(file))
    return {
        "seed": seed,
        "seconds": seconds,
        "before_training": figures(rows),
        "base": figures(as_base(rows)),
        "held_out_before": means(as_base(after)),
        "held_out_after": means(after),
        "language": said,
    }


def strayed(bench: Bench, pairs: Sequence[TokenPair], file: str | None) -> dict[str, float]:
    """Return KL to the base in nats a token, and the change of NLL, of both answers of each pair under an adapter's
    weights."""
    texts = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    nll, base, kl = map(sum, zip(*bench.reference.language(texts, file, keep=True), strict=True)) if file else (1, 1, 0)
    return {"kl_nats": kl / sum(len(answer) for _, answer in texts), "nll_change": nll / base - 1.0}


def as_base(rows: Sequence[Logps]) -> list[Logps]:
    """Return the rows of the same pairs as the reference policy scores them."""
    return [[rc, rr, rc, rr] for _, _, rc, rr in rows]


def loaded(
    bench: Bench, policy: str, pairs: Sequence[TokenPair], seed: int, tastes: dict[str, Taste]
) -> dict[str, Any]:
    """Run one engine under load; `tastes` maps adapter names to tastes."""
    options = bench.options
    seconds = len(pairs) / len(tastes) / options.pairs_per_s
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        load = replace(bench.load, seconds=seconds, seed=seed)
        given = rated(pairs, options.thumbs, seed)
        notes = run_under_load(load, settings_of(options, policy), given, Path(folder))
        say(f"  scoring {len(notes.files)} versions")
        users = {name: one_user(bench, notes, pairs, name, taste, seconds) for name, taste in tastes.items()}
    return {"seed": seed, "seconds": seconds, **notes.report, **learning(notes), "users": users}


def one_user(
    bench: Bench, notes: Notes, pairs: Sequence[TokenPair], name: str, taste: Taste, seconds: float
) -> dict[str, Any]:
    """Return the figures of one adapter."""
    own = [pair for pair in pairs if pair.adapter == name]
    count = bench.options.moments
    moments_s = [seconds * (number + 1) / count for number in range(count)]
    held_out = bench.held_out(taste)
    return {
        "taste": taste,
        "before_training": before_training(notes, own),
        "on_arrival": on_arrival(notes, own, bench.reference),
        "held_out": held_out_over_time(notes, name, held_out, bench.reference, moments_s),
        "language": strayed(bench, held_out, notes.file_at(name, math.inf)),
    }


def opposite_tastes(bench: Bench, seed: int, tastes: dict[str, Any]) -> dict[str, Any]:
    """Run two users with opposite tastes on one engine, their pairs in turns."""
    names = {f"{taste}-{seed}": taste for taste in OPPOSITE}
    streams = [bench.stream(taste, name) for name, taste in names.items()]
    say(f"{' and '.join(OPPOSITE)} at once, seed {seed}")
    mixed = [
        replace(pair, pair_id=pair.pair_id + user * _SECOND_USER)
        for together in zip(*streams, strict=False)
        for user, pair in enumerate(together)
    ]
    return loaded(bench, "mace", mixed, seed, names)


# -- the table -------------------------------------------------------------------------------------------------------


def average(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the means over seeds, by quarter."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) if column else None for column in columns]


def quarter_text(values: Sequence[float | None], digits: int = 2) -> str:
    """Format quarters as `0.61 0.72 0.80 0.91`."""
    return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def worst_gap(ours: Sequence[float | None], loop_quarters: Sequence[float | None]) -> float | None:
    """Return the worst quarter's difference to the loop's: positive if above, negative if below."""
    gaps = [a - b for a, b in zip(ours, loop_quarters, strict=True) if a is not None and b is not None]
    return min(gaps, default=None)


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of the quarters and the last held-out CLPD."""
    columns = (
        "taste",
        "who",
        "scored while the load lasted",
        "reward accuracy before training, by quarter",
        "worst against the loop",
        "at the pair's arrival",
        "its CLPD",
        "held-out CLPD, last",
        "held-out accuracy, last",
        "KL",
        "NLL",
    )
    rows = [row for taste, found in report["tastes"].items() for row in rows_of_taste(taste, found)]
    for run in report.get("opposite", []):
        for user in run["users"].values():
            loops = report["tastes"].get(user["taste"], {}).get("loop", [])
            rows.append(policy_row(f"{user['taste']} beside its opposite", "mace", [run], [user], loops))
    title = (
        f"{report['model']}, {report['trace']} at {report['requests_per_s']:.2f} requests/s, "
        f"{report['pairs_per_s']:g} pairs/s a user, {report['device']}"
    )
    return "\n".join([title, "", *markdown(columns, rows)])


def rows_of_taste(taste: str, found: dict[str, Any]) -> list[Sequence[object]]:
    """Return the loop's row, one without training, and every policy's."""
    loops = found["loop"]

    def mean(part: str, name: str) -> str:
        return quarter_text(average([run[part][name] for run in loops]), 2 if name == "reward_accuracy" else 0)

    before, after = (
        sum(run[when]["clpd_nats"] for run in loops) / len(loops) for when in ("held_out_before", "held_out_after")
    )
    accuracy = sum(run["held_out_after"]["reward_accuracy"] for run in loops) / len(loops)
    learned, clpd = mean("before_training", "reward_accuracy"), mean("before_training", "clpd_nats")
    label = f"{taste} ({found['pairs']})"
    rows: list[Sequence[object]] = [
        (label, "the loop alone", "", learned, "", "", clpd, f"{after:.0f}", f"{accuracy:.2f}", *far(loops)),
        ("", "no training", "", "", "", "", mean("base", "clpd_nats"), f"{before:.0f}", "", "", ""),
    ]
    for policy, runs in found["policies"].items():
        rows.append(policy_row("", policy, runs, [user for run in runs for user in run["users"].values()], loops))
    return rows


def policy_row(
    label: str,
    policy: str,
    runs: Sequence[dict[str, Any]],
    users: Sequence[dict[str, Any]],
    loops: Sequence[dict[str, Any]],
) -> Sequence[object]:
    """Return a policy's row over its seeds; the share scored in time is over all users of a run together."""
    in_time, sent = (sum(run[name] for run in runs) for name in ("scored_in_time", "pairs_sent"))
    ours = average([user["before_training"]["reward_accuracy"] for user in users])
    gap = worst_gap(ours, average([run["before_training"]["reward_accuracy"] for run in loops])) if loops else None
    verdict = "" if gap is None else f"{gap:+.3f}{'' if gap >= -ALLOWED else ' (!)'}"
    arrival = quarter_text(average([user["on_arrival"]["reward_accuracy"] for user in users]))
    clpd = quarter_text(average([user["on_arrival"]["clpd_nats"] for user in users]), 0)
    last, accuracy = (
        sum(user["held_out"][-1][name] for user in users) / len(users) for name in ("clpd_nats", "reward_accuracy")
    )
    told = (f"{in_time} of {sent}", quarter_text(ours), verdict, arrival, clpd)
    return label, policy, *told, f"{last:.0f}", f"{accuracy:.2f}", *far(users)


def far(runs: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Format the mean KL and change of NLL over `runs`."""
    kl, nll = (sum(run["language"][key] for run in runs) / len(runs) for key in ("kl_nats", "nll_change"))
    return f"{kl:.3f}", f"{nll:+.1%}"


if __name__ == "__main__":
    main()
