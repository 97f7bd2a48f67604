"""What a few signals of a person do: shares of answers that the person likes, through a daemon at its defaults.

    python -m benchmarks.signals --model demo [--rows picks,edits] [--tastes bang,short] [--seeds 3] [--json]

Each row, taste and seed has a daemon of its own. A simulated person asks, and picks, edits or rates by a rule. Unseen
questions are then asked, at once and when no new version has come for a while, and the same rule judges the answers.
"Unchosen" answers are the adapter's own: an answer with log-probabilities is never the best of several. KL is of them
to the base, per token. No question is asked at two moments, since practice learns on what was asked; the base answers
the questions of the last look of a moment.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks.support.command import finish, keep, markdown, model_folder, names, numbers, option, parse, say
from benchmarks.support.person import ANSWERS, BaseModel, Bench, Figures, Person
from benchmarks.support.rivals import compare
from benchmarks.support.tastes import ANYTHING, COOKING, DEMO, EDITS, ELSEWHERE, ENGLISH, FACTS
from edged.client.client import Client, DaemonError
from edged.models import find_model
from edged.settings.load import ModelSettings
from examples.quickstart.daemon import TemporaryDaemon

WRONG_EVERY = 5
TIMEOUT_S = 600.0


# -- rows --------------------------------------------------------------------------------------------------------------


def picks(person: Person, counts: Sequence[int], wrong_every: int = 0) -> Iterator[Figures]:
    """Yield the figures after so many picks; each `wrong_every`-th is wrong, 0: none."""
    for done, count in zip([0, *counts], counts, strict=False):
        for number in range(done + 1, count + 1):
            person.pick(person.rule, wrong=wrong_every > 0 and number % wrong_every == 0)
        yield from person.moments(count)


def last_picks(person: Person, counts: Sequence[int], wrong_every: int = 0) -> Iterator[Figures]:
    """Yield the figures after the last pick alone."""
    return picks(person, counts[-1:], wrong_every)


def signals(person: Person, counts: Sequence[int], signal: Callable[[Person], None]) -> Iterator[Figures]:
    """Yield the figures after signals of one kind."""
    for _ in range(counts[-1]):
        signal(person)
    yield from person.moments(counts[-1])


def change(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after picks one way and half as many, then as many, the other way, by which they are judged."""

    def other(text: str) -> bool:
        return not person.rule(text)

    for _ in range(counts[-1]):
        person.pick(person.rule)
    person.settle()
    for done, count in ((0, counts[-1] // 2), (counts[-1] // 2, counts[-1])):
        for _ in range(count - done):
            person.pick(other)
        yield from person.moments(count, other)


def topic(person: Person, counts: Sequence[int], elsewhere: bool) -> Iterator[Figures]:
    """Yield the figures after picks by the rule on cooking alone, and as many by chance `elsewhere`, if they are."""
    for _ in range(counts[-1]):
        person.pick(person.rule, COOKING)
        if elsewhere:
            person.pick(lambda text: False, ELSEWHERE)
    yield from person.moments(counts[-1], groups=(COOKING, ELSEWHERE))


def preference(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures of a written preference, beside the base's with the same text as a system prompt."""
    for _ in range(counts[-1]):
        person.ask(next(person.unasked[ANYTHING]))
    person.client.call("PUT", f"/v1/adapters/{person.name}/preference", {"text": person.written})
    for figures in person.moments(0):
        asked = [next(person.unseen[ANYTHING]) for _ in range(person.bench.num_questions)]
        told = [person.ask(question, ANSWERS, user="", system=person.written) for question in asked]
        yield {**figures, "system_prompt": person.share(told, person.rule)}


def facts(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after picks, with the number of facts that the base and the adapter know, greedily."""
    for figures in last_picks(person, counts):
        right = [0, 0]
        for question, fact in FACTS:
            for side, user in enumerate(("", person.name)):
                text = person.ask(question, user=user, temperature=0.0, max_tokens=16)[0].text
                right[side] += bool(re.search(rf"\b{fact}\b", text, re.IGNORECASE))
        yield {**figures, "facts": right}


def busy(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after picks of four users of like taste in turns, beside requests for half of the time."""
    others = [
        Person(person.bench, person.client, person.taste, person.seed + at, f"user{at}") for at in (101, 102, 103)
    ]
    clicks_s: list[float] = []
    with half_load(person):
        for number in range(counts[-1]):
            for each in (*others, person):
                # Some of the first picks make no choice yet.
                if each is person and number >= counts[-1] // 2:
                    clicks_s.append(person.click_s())
                else:
                    each.pick(each.rule)
        for figures in person.moments(counts[-1]):
            yield {**figures, "clicks_s": clicks_s}


@contextlib.contextmanager
def half_load(person: Person) -> Iterator[None]:
    """Have users who teach nothing ask one after the other, and wait as long after each answer as it took."""
    ended = threading.Event()

    def ask() -> None:
        with Client(person.client.address, TIMEOUT_S) as client:
            reader = Person(person.bench, client, person.taste, person.seed + 200, "reader")
            while not ended.is_set():
                started = time.monotonic()
                reader.ask(next(reader.unasked[ANYTHING]))
                ended.wait(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rivals(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after picks, with what others make of the same."""
    for figures in last_picks(person, counts):
        questions = list(islice(person.unseen[ANYTHING], person.bench.num_questions))
        yield {**figures, "rivals": compare(person, questions)}


Row = Callable[[Person, Sequence[int]], Iterator[Figures]]
ROWS: dict[str, tuple[Row, str]] = {
    "picks": (picks, ""),
    "training": (last_picks, '[serving]\nbest_of = "off"\n'),
    "edits": (partial(signals, signal=Person.correct), ""),
    "thumbs": (partial(signals, signal=Person.rate), ""),
    "change": (change, ""),
    "topic": (partial(topic, elsewhere=True), ""),
    "topic_alone": (partial(topic, elsewhere=False), ""),
    "wrong": (partial(last_picks, wrong_every=WRONG_EVERY), ""),
    "preference": (preference, ""),
    "facts": (facts, ""),
    "busy": (busy, ""),
    "rivals": (rivals, ""),
}
"""What a person does in each row, and the settings that are not the defaults."""


def measure(bench: Bench, counts: Sequence[int], row: str, taste: str, seed: int) -> Figures:
    """Return the figures of one person with a daemon."""
    play, settings = ROWS[row]
    folder = Path(tempfile.mkdtemp(prefix="edged-signals-"))
    config = folder / "edged.toml"
    config.write_text(settings)
    daemon = TemporaryDaemon("--model", bench.model, "--config", str(config), folder=folder)
    started = time.monotonic()
    run: Figures = {"row": row, "taste": taste, "seed": seed, "moments": []}
    try:
        daemon.wait_until_ready()
        with daemon.client(TIMEOUT_S) as client:
            for figures in play(Person(bench, client, taste, seed), counts):
                run["moments"].append({**figures, "seconds": time.monotonic() - started})
                say(" | ".join(cells(run, run["moments"][-1])))
    except DaemonError as error:
        run["error"] = str(error)
        say(f"{row}, {taste}, seed {seed}: {error}")
    finally:
        run["problems"] = [line for line in daemon.log.splitlines() if re.search("Error|Traceback|WARN", line)][-20:]
        daemon.remove()
    return run


# -- the table ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("row", "taste", "seed", "signals", "base", "at once", "settled", "unchosen"),
    *("of missing: at once", "settled", "unchosen", "KL", "neutral", "repetition", "chosen", "other", "s"),
)
SHARES = ("at_once", "settled", "unchosen")


def of_missing(moment: Figures, key: str) -> float | None:
    """Return a share's gain over the base, of what the base misses."""
    share, base = moment.get(key), moment["base"]
    return None if share is None or base >= 1.0 else (share - base) / (1.0 - base)


def rest_change(moment: Figures) -> float | None:
    """Return the change of the NLL of what an edit leaves, beside the base's."""
    base, own = moment.get("rest_nll") or (None, None)
    return own / base - 1.0 if base and own else None


def other(moment: Figures) -> str:
    """Return what one row alone measures."""
    if "facts" in moment:
        return "facts: base {}, adapter {} of {}".format(*moment["facts"], len(FACTS))
    if "rivals" in moment:
        return "; ".join(f"{name} {share:.2f}" for name, share in moment["rivals"].items())
    if "clicks_s" in moment:
        return f"from a pick to an answer by it: median {statistics.median(moment['clicks_s']):.2f} s"
    if "system_prompt" in moment:
        tokens = f"{moment['more_prompt_tokens']:+d} prompt tokens beside the base's"
        return f"system prompt {moment['system_prompt']:.2f}; {tokens}"
    change = rest_change(moment)
    return "" if change is None else f"NLL of the rest {change:+.0%}"


def number(value: float | None, form: str = ".2f") -> str:
    """Format a figure; empty where there is none."""
    return "" if value is None else format(value, form)


def row_name(figures: Figures) -> str:
    """Return the row, with the group of questions where there are several."""
    return figures["row"] if figures["group"] == ANYTHING else f"{figures['row']}: {figures['group']}"


def cells(run: Figures, moment: Figures) -> list[str]:
    """Return the cells of a moment's row."""
    case = [row_name({**run, **moment}), run["taste"], run["seed"], moment["signals"]]
    shares = [number(moment.get(key)) for key in ("base", *SHARES)]
    gains = [number(of_missing(moment, key)) for key in SHARES]
    repeated = "{:.2f} {:.2f}".format(*moment["repetition"])
    language = [number(moment["kl_nats"], ".3f"), number(moment["neutral_nll_change"], "+.1%"), repeated]
    last = [number(moment["chosen"]), other(moment), number(moment["seconds"], ".0f")]
    return [*map(str, case), *shares, *gains, *language, *last]


def means(runs: Sequence[Figures]) -> list[Figures]:
    """Return for each row, group and number of signals the means over tastes and seeds: each with its standard error,
    None of one run."""
    groups: dict[tuple[str, str, int], list[Figures]] = {}
    for run in runs:
        for moment in run["moments"]:
            groups.setdefault((run["row"], moment["group"], moment["signals"]), []).append(moment)

    def mean(values: Iterable[float | None]) -> tuple[float, float | None] | None:
        known = [value for value in values if value is not None]
        error = statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else None
        return (statistics.fmean(known), error) if known else None

    return [
        {
            **{"row": row, "group": group, "signals": signals, "runs": len(moments)},
            **{key: mean(of_missing(moment, key) for moment in moments) for key in SHARES},
            "gain": mean(moment["settled"] - moment["base"] for moment in moments),
            **{key: mean(moment[key] for moment in moments) for key in ("kl_nats", "neutral_nll_change")},
            "rest_nll_change": mean(map(rest_change, moments)),
        }
        for (row, group, signals), moments in groups.items()
    ]


MEANS = {"gain": ".2f", "kl_nats": ".3f", "neutral_nll_change": "+.1%", "rest_nll_change": "+.0%"}


def table(report: Figures) -> str:
    """Return a Markdown table of every moment, and one of the means."""
    moments = [cells(run, moment) for run in report["runs"] for moment in run["moments"]]
    rows = []
    for each in report["means"]:
        told = [(each[key], form) for key, form in {**dict.fromkeys(SHARES, ".2f"), **MEANS}.items()]
        spread = [" ± ".join(number(value, form) for value in mean or () if value is not None) for mean, form in told]
        rows.append([row_name(each), each["signals"], each["runs"], *spread])
    heads = ("row", "signals", "runs", "of missing: at once", "settled", "unchosen", "gain", "KL", "neutral", "rest")
    failed = [
        f"{run['row']}, {run['taste']}, seed {run['seed']}: {run['error']}" for run in report["runs"] if "error" in run
    ]
    return "\n".join([*markdown(COLUMNS, moments), "", *markdown(heads, rows), *failed])


def cases(options: Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield each row, taste and seed to measure; an edit is the taste of its row."""
    known = DEMO if options.model == "demo" else ENGLISH
    for row in options.rows:
        for taste in EDITS if row == "edits" else known:
            if not options.tastes or taste in options.tastes:
                yield from ((row, taste, seed) for seed in range(options.seeds))


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--model", '"demo" or a model\'s directory', "demo", type=_model),
        option("--rows", "by comma", list(ROWS), ["picks", "edits"], type=names(ROWS)),
        option("--tastes", "or edits, by comma; all unless told", [], ["bang", "lower_case"], type=names(_KNOWN)),
        option("--signals", "after which is looked; all rows but picks take the last", [5, 10, 20], [2], type=numbers),
        option("--prompts", "unseen questions at each moment", 24, 3),
        option("--settle", "seconds to wait for learning, at most", 40.0, 3.0),
        option("--seeds", "of questions and persons, from seed 0 on", 1),
        quick="two signals, one taste",
    )
    folder = find_model(ModelSettings(path=str(options.model)))[0]
    bench = Bench(str(options.model), BaseModel(folder), options.prompts, options.settle)
    report: Figures = {"model": str(options.model), "signals": options.signals, "runs": [], "means": []}
    for row, taste, seed in cases(options):
        report["runs"].append(measure(bench, options.signals, row, taste, seed))
        report["means"] = means(report["runs"])
        keep(options, report)
    finish(options, report, table(report))


_KNOWN = sorted({*DEMO, *ENGLISH, *EDITS})


def _model(text: str) -> str | Path:
    return text if text == "demo" else model_folder(text)


if __name__ == "__main__":
    main()
