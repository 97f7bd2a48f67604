"""People who change their minds, and others who say the same under their names: what is followed and what is held.

    python -m benchmarks.drift hh-harmless.jsonl.gz --model hh-lm [--taste concise] [--seeds 4] [--quick]
        [--output FILE]

150 pairs of a taste, then a change: a flip, a flip that is taken back, a gradual one, and two tastes by topic. As the
user's own direct signals each is to be followed: reward accuracy in windows of 20 pairs beside plain sequential DPO on
the same stream and at the same settings. 40 pairs of the opposite taste from elsewhere are an attack, which is to be
held; honest pairs that are all imported are not. Default settings; pairs come one by one.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.language import Bench, open_bench, stream
from benchmarks.support.command import MODEL, SEEDS, existing_file, finish, keep, markdown, names, option, parse, say
from benchmarks.support.machine_limits import report_header
from benchmarks.support.preference_streams import FIRST_ONLINE_LINE, TASTES
from benchmarks.support.sequential_dpo import recipe_of
from edged.align.feedback.pair import TokenPair
from edged.lab.bench.replay import load_pairs
from edged.settings.load import load_settings
from edged.text.tokenizer import Tokenizer

PAIRS = 270
BEFORE = 150
RETURN_AFTER, ATTACKS = 60, 40
"""Pairs after which a change is taken back, and the number of pairs of an attack."""
WINDOW = 20
Stream = Callable[[Sequence[TokenPair]], list[TokenPair]]


def flipped(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Return the same pairs with the opposite preference."""
    return [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]


def flip(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Switch to the opposite taste from one pair to the next."""
    return [*pairs[:BEFORE], *flipped(pairs[BEFORE:])]


def there_and_back(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Switch to the opposite taste, and after RETURN_AFTER pairs back to the first one."""
    middle = BEFORE + RETURN_AFTER
    return [*pairs[:BEFORE], *flipped(pairs[BEFORE:middle]), *pairs[middle:]]


def gradual(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Flip ever more pairs: from none to every one within RETURN_AFTER pairs."""
    found = list(pairs[:BEFORE])
    for index, pair in enumerate(pairs[BEFORE:]):
        # The share of flipped pairs so far follows the ramp.
        wanted = min(1.0, index / RETURN_AFTER)
        found += flipped([pair]) if (index * 0.618034) % 1.0 < wanted else [pair]
    return found


def by_topic(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Give one user two tastes: the opposite one for prompts of an even number of tokens."""
    after = [flipped([pair])[0] if len(pair.prompt) % 2 == 0 else pair for pair in pairs[BEFORE:]]
    return [*pairs[:BEFORE], *after]


def attack(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Replace ATTACKS pairs after the first BEFORE by imported ones of the opposite taste; the rest stays the user's
    own."""
    middle = BEFORE + ATTACKS
    return [*pairs[:BEFORE], *third_party(flipped(pairs[BEFORE:middle])), *pairs[middle:]]


def imported(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Mark all pairs of one taste as imported, none as the user's own signals."""
    return third_party(pairs)


def third_party(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """Return the same pairs as if another account had sent them."""
    return [replace(pair, first_party=False) for pair in pairs]


STREAMS: dict[str, Stream] = {
    "flip": flip,
    "there and back": there_and_back,
    "gradual": gradual,
    "by topic": by_topic,
    "attack": attack,
    "imported": imported,
}


def follow(bench: Bench, pairs: Sequence[TokenPair]) -> dict[str, Any]:
    """Give the pairs to an untrained adapter one by one; return its accuracies, and the outcomes of the pairs."""
    first = len(bench.recorder.versions)
    margins = {score.pair_id: score.reward_margin for score in bench.learn(pairs, one_by_one=True)}
    held = {
        direct: [
            bench.recorder.outcomes[pair.pair_id].state == "quarantined" for pair in pairs if pair.first_party == direct
        ]
        for direct in (True, False)
    }
    bench.engine.forget(pairs[0].adapter).result()
    return {
        "accuracy": by_window([margins.get(pair.pair_id) for pair in pairs]),
        "held_own": [sum(held[True]), len(held[True])],
        "held_foreign": [sum(held[False]), len(held[False])],
        "versions": [
            version.reason
            for _, version in bench.recorder.versions[first:]
            if version.reason not in ("trained", "practised")
        ],
    }


def by_window(margins: Sequence[float | None]) -> list[float | None]:
    """Return reward accuracy of the BEFORE pairs' last window and of each WINDOW after them; unscored pairs are left
    out."""
    bounds = [BEFORE - WINDOW, *range(BEFORE, len(margins) + 1, WINDOW)]
    found: list[float | None] = []
    for start, stop in pairwise(bounds):
        known = [margin for margin in margins[start:stop] if margin is not None]
        found.append(sum((m > 0) + 0.5 * (m == 0) for m in known) / len(known) if known else None)
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("pairs", "HH-RLHF dialogues: a (gzipped) JSONL file", type=existing_file),
        MODEL,
        option("--taste", "before the change", "concise", choices=TASTES),
        option("--streams", "by comma", list(STREAMS), type=names(STREAMS)),
        SEEDS,
        quick="few pairs",
    )
    settings = load_settings(None, environ={}, overrides={"feedback.pairs_per_hour": 0})
    tokenizer = Tokenizer.load(options.model)
    pairs, _ = load_pairs(options.pairs, "hh", tokenizer, settings.align.max_pair_tokens)
    online = [pair for pair in pairs if pair.pair_id >= FIRST_ONLINE_LINE]
    count = BEFORE + WINDOW if options.quick else PAIRS
    report: dict[str, Any] = {
        "model": options.model.name,
        "taste": options.taste,
        **report_header(),
        "align": settings.align.model_dump(),
        "runs": [],
    }
    with open_bench(options.model, settings, recipe_of(str(options.model), settings.align)) as bench:
        for seed, name in itertools.product(range(options.seeds), options.streams):
            own = stream(online, options.taste, f"{options.taste}-{seed}", bench.tokenizer.decode, seed)
            said = STREAMS[name]([replace(pair, first_party=True) for pair in own[:count]])
            plain = by_window([(c - rc) - (r - rr) for c, r, rc, rr in bench.reference.learn(said, seed)])
            run = {"stream": name, "seed": seed, "loop": plain, **follow(bench, said)}
            report["runs"].append(run)
            say(json.dumps(run))
            keep(options, report)
    finish(options, report, table(report["runs"]))


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return means over seeds, as Markdown."""
    rows = []
    for name in dict.fromkeys(run["stream"] for run in runs):
        group = [run for run in runs if run["stream"] == name]
        held = ", ".join(
            " of ".join(str(sum(run[key][part] for run in group)) for part in (0, 1))
            for key in ("held_own", "held_foreign")
        )
        for label, key, told in (("edged", "accuracy", held), ("loop", "loop", "")):
            first, *rest = means([run[key] for run in group])
            rows.append((name, label, first, " ".join(rest), told))
    columns = ("stream", "", "before", "after the change, by 20 pairs", "held: the user's own, from elsewhere")
    return "\n".join(markdown(columns, rows))


def means(rows: Sequence[Sequence[float | None]]) -> list[str]:
    """Return means by column over the rows that have a value in it."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [f"{statistics.fmean(column):.2f}" if column else "-" for column in columns]


if __name__ == "__main__":
    main()
