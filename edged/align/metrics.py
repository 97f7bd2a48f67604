"""Alignment metrics per adapter: win rate, CLPD, reward accuracy and margin.

CLPD is the mean of log p(chosen) - log p(rejected) in nats (MACE 3.1), win rate the share of pairs where it is
positive. Both favour the shorter answer whatever was learned, so reward margin and accuracy against the reference
model (TRL's names) stand beside them.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlite_utils import Database

AdapterSummary = dict[str, Any]
RECENT_PAIRS = 50
"""Number of latest pairs in the `_recent` means and the series' running means."""

_FIRST_ANSWERS, _FIRST_PAIRS, _MANY_PAIRS = 6, 5, 60
"""Fewest answers for a verdict, fewest pairs of a taste to judge by, and pairs at which it is not early any more."""
_NOTICEABLE = 0.1
"""Gain of that share from which on a taste is not called unfollowed, though it may be chance."""
_DEVIATIONS = 1.96
"""Standard deviations within which 95 % of a normal distribution lie."""

_MEANS = {
    "win_rate": "avg(win)",
    "clpd": "avg(logp_difference)",
    "reward_accuracy": "avg(reward_correct)",
    "reward_margin": "avg(reward_margin)",
    "loss": "avg(loss)",
    "clpd_per_token": "avg(logp_difference * 2.0 / (chosen_tokens + rejected_tokens))",
    "chosen_logratio_per_token": "avg((chosen_logp - ref_chosen_logp) / chosen_tokens)",
}


@dataclass(frozen=True, slots=True)
class Liked:
    """How many answers a user's taste model likes, each as (liked, of), fitted without the opinions on their prompts.

    An answer counts as the probability that it is liked. `served` are the latest answers as the user got them;
    `adapter` and `base` gave theirs by themselves, unchosen.
    """

    served: tuple[float, int] = (0.0, 0)
    adapter: tuple[float, int] = (0.0, 0)
    base: tuple[float, int] = (0.0, 0)

    def report(self) -> dict[str, dict[str, Any] | None]:
        """Return each share with its number of answers and 95 % interval; None where there are no answers."""
        return {
            name: {"share": liked / of, "answers": of, "interval": wilson(liked, of)} if of else None
            for name, (liked, of) in (("served", self.served), ("adapter", self.adapter), ("base", self.base))
        }


NOT_JUDGED = Liked()
"""What is known where no answer was judged."""


def summaries(db: Database, liked: Mapping[str, Liked] = MappingProxyType({})) -> list[AdapterSummary]:
    """The `summary` of every adapter that has a pair or a version, by name, with what is `liked` of some."""
    names = db.execute("SELECT adapter FROM pairs UNION SELECT adapter FROM adapter_versions ORDER BY 1").fetchall()
    return [found for (name,) in names if (found := summary(db, name, liked.get(name, NOT_JUDGED))) is not None]


def summary(db: Database, adapter: str, liked: Liked = NOT_JUDGED) -> AdapterSummary | None:
    """One adapter's metrics, and what is `liked` of its answers; None for an adapter without pairs and versions.

    Keys: adapter, version, pairs_seen, pairs_trained, pairs_queued, pairs_held_out, pairs_skipped,
    pairs_quarantined, ratings_queued (single ratings among those queued), held (a sentence on pairs that wait for a
    decision, with the first one's reason, or ""); win_rate, clpd, reward_accuracy, reward_margin, loss over all
    prequential scores and, with the suffix `_recent`, over the last RECENT_PAIRS; held_out_win_rate, held_out_clpd,
    held_out_reward_accuracy, held_out_kl_nats of the latest version that was tested, held_out_version;
    neutral_nll_change of the latest version that was tested, relative to the base; answer_tokens_recent and
    answer_repetition_recent of the latest RECENT_PAIRS answers; updated_at. Means over nothing are None.
    reward_accuracy_recent_interval and win_rate_recent_interval are 95 % intervals, [low, high]; liked is
    `Liked.report`, and verdict a sentence.
    """

    def row(sql: str) -> dict[str, Any]:
        return next(iter(db.query(sql, {"adapter": adapter})))

    means = ", ".join(f"{mean} AS {key}" for key, mean in _MEANS.items())
    recent = ", ".join(f"{mean} AS {key}_recent" for key, mean in _MEANS.items())
    prequential = "FROM alignment_metrics WHERE adapter = :adapter AND split = 'prequential'"
    latest = f"SELECT * {prequential} ORDER BY id DESC LIMIT {RECENT_PAIRS}"
    found = {
        "adapter": adapter,
        **row("SELECT coalesce(max(version), 0) AS version FROM adapter_versions WHERE adapter = :adapter"),
        **row(
            """SELECT count(*) AS pairs_seen,
                   coalesce(sum(state IN ('trained', 'learnt')), 0) AS pairs_trained,
                   coalesce(sum(state = 'queued'), 0) AS pairs_queued,
                   coalesce(sum(state = 'held_out'), 0) AS pairs_held_out,
                   coalesce(sum(state = 'skipped'), 0) AS pairs_skipped,
                   coalesce(sum(state = 'quarantined'), 0) AS pairs_quarantined,
                   coalesce(sum(state = 'queued' AND '' IN (chosen, rejected)), 0) AS ratings_queued,
                   (SELECT reason FROM quarantine WHERE adapter = :adapter AND decision IS NULL
                       ORDER BY created_at, pair_id LIMIT 1) AS quarantine_reason
               FROM pairs WHERE adapter = :adapter"""
        ),
        **row(f"SELECT {means} {prequential}"),
        **_intervals(row(f"SELECT {_COUNTS} FROM ({latest})")),
        **row(f"SELECT {recent} FROM ({latest})"),
        **latest_test(db, adapter),
        **row(
            f"""SELECT avg(completion_tokens) AS answer_tokens_recent, avg(repetition) AS answer_repetition_recent
                FROM (SELECT * FROM choices JOIN completions ON completions.id = completion_id
                      WHERE adapter = :adapter AND finish_reason IN ('stop', 'length')
                      ORDER BY completions.created_at DESC LIMIT {RECENT_PAIRS})"""
        ),
        **row(
            """SELECT max(moment) AS updated_at FROM (
                   SELECT max(created_at) AS moment FROM pairs WHERE adapter = :adapter
                   UNION ALL SELECT max(created_at) FROM adapter_versions WHERE adapter = :adapter
                   UNION ALL SELECT max(created_at) FROM alignment_metrics WHERE adapter = :adapter)"""
        ),
    }
    pairs, why = found["pairs_quarantined"], found.pop("quarantine_reason")
    found["held"] = f"{pairs} pair{'s' * (pairs > 1)} of {adapter} {'are' if pairs > 1 else 'is'} held: {why}"
    found["held"] = found["held"] if pairs else ""
    found |= {"liked": liked.report(), "verdict": verdict(liked, found["pairs_seen"])}
    return found if found["pairs_seen"] or found["version"] else None


_COUNTS = "count(*) AS pairs, sum(win) AS won, sum(reward_correct) AS correct"


def _intervals(counts: dict[str, Any]) -> AdapterSummary:
    """The 95 % intervals of recent pairs' reward accuracy and win rate, [low, high]; None without pairs."""
    shares = {"reward_accuracy": "correct", "win_rate": "won"}
    return {
        f"{name}_recent_interval": wilson(counts[key], counts["pairs"]) if counts["pairs"] else None
        for name, key in shares.items()
    }


def verdict(liked: Liked, pairs: int) -> str:
    """A sentence on whether the answers are what the user likes: better than chance, not sure, or not followed yet.

    Chance is what the base's answers reach, and half where none of them were judged.
    """
    hits, of = liked.served if liked.served[1] >= _FIRST_ANSWERS else liked.adapter
    if of < _FIRST_ANSWERS or pairs < _FIRST_PAIRS:
        about = f"{pairs} pair{'s' * (pairs != 1)}"
        return f"too early to tell: {about}" if pairs < _MANY_PAIRS else f"not judged: no answers since {about}"
    base_known = liked.base[1] >= _FIRST_ANSWERS
    base = liked.base[0] / liked.base[1] if base_known else 0.5
    gain, (low, high) = hits / of - base, wilson(hits, of)
    base_low, base_high = wilson(*liked.base) if base_known else [base, base]
    # Newcombe's interval of the difference of two shares (1998, method 10) is above, or below, 0.
    above = gain > math.hypot(hits / of - low, base_high - base)
    below = -gain > math.hypot(high - hits / of, base - base_low)
    kind = "not sure yet" if gain > _NOTICEABLE else "not followed yet"
    kind = "better than chance" if above else "worse than chance" if below else kind
    told = f"{kind}: {100 * hits / of:.0f} % of the last {of} answers are liked ({100 * low:.0f} to {100 * high:.0f})"
    if liked.served[1] >= _FIRST_ANSWERS and liked.adapter[1] >= _FIRST_ANSWERS:
        told += f", {100 * liked.adapter[0] / liked.adapter[1]:.0f} % of those that the adapter gives unchosen"
    return f"{told}, {100 * base:.0f} % of the base's" if base_known else told


def wilson(hits: float, count: int) -> list[float]:
    """Wilson's 95 % interval of the share of `hits` among `count` (Wilson 1927): [low, high]."""
    share, z = hits / count, _DEVIATIONS**2 / count
    half = math.sqrt(z * share * (1 - share) + z * z / 4)
    return [max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))]


def latest_test(db: Database, adapter: str) -> dict[str, Any]:
    """The means of the held-out pairs at the latest test, and the change of neutral text's NLL; None: untested.

    Keys: those of `summary` that begin with `held_out_`, and neutral_nll_change.
    """
    tested = db.query(
        """SELECT avg(win) AS held_out_win_rate, avg(logp_difference) AS held_out_clpd,
               avg(reward_correct) AS held_out_reward_accuracy, avg(kl_nats) AS held_out_kl_nats,
               max(version) AS held_out_version,
               (SELECT neutral_nll / neutral_base_nll - 1.0 FROM adapter_versions
                WHERE adapter = :adapter AND neutral_nll IS NOT NULL
                ORDER BY version DESC LIMIT 1) AS neutral_nll_change
           FROM alignment_metrics WHERE adapter = :adapter AND split = 'held_out' AND version = (
               SELECT max(version) FROM alignment_metrics WHERE adapter = :adapter AND split = 'held_out')""",
        {"adapter": adapter},
    )
    return next(iter(tested))


def series(db: Database, adapter: str, limit: int = 500) -> list[dict[str, Any]]:
    """The last `limit` prequential scores, oldest first, one dict per pair.

    Keys: pair (1 for the adapter's first), pair_id, created_at, version, win, logp_difference, reward_margin,
    reward_correct, loss, and the running means over RECENT_PAIRS: win_rate, clpd, reward_accuracy.
    """
    window = f"OVER (ORDER BY id ROWS BETWEEN {RECENT_PAIRS - 1} PRECEDING AND CURRENT ROW)"
    rows = db.query(
        f"""SELECT row_number() OVER (ORDER BY id) AS pair, pair_id, created_at, version, win, logp_difference,
                reward_margin, reward_correct, loss,
                avg(win) {window} AS win_rate, avg(logp_difference) {window} AS clpd,
                avg(reward_correct) {window} AS reward_accuracy
            FROM alignment_metrics WHERE adapter = :adapter AND split = 'prequential'
            ORDER BY id DESC LIMIT :limit""",
        {"adapter": adapter, "limit": limit},
    )
    return list(rows)[::-1]


def versions(db: Database, adapter: str, limit: int = 100) -> list[dict[str, Any]]:
    """The last `limit` versions, newest first.

    Keys: version, created_at, parent, reason, restored, pairs, loss, grad_norm, step_s, path, on_disk; of its test
    held_out_reward_accuracy over held_out_pairs, kl_nats per token, and neutral_nll_change; own_kl_nats of practice;
    the answer to the adapter's first prompt; tested_at, and the problem for which it was taken back ("" for none).
    """
    rows = db.query(
        """SELECT version, created_at, parent, reason, restored, pairs, loss, grad_norm, step_s, path, on_disk,
               held_out_reward_accuracy, coalesce(held_out_pairs, 0) AS held_out_pairs, kl_nats,
               own_kl_nats, neutral_nll / neutral_base_nll - 1.0 AS neutral_nll_change, answer,
               tested_at, problem
           FROM adapter_versions LEFT JOIN (
               SELECT version, avg(reward_correct) AS held_out_reward_accuracy, count(*) AS held_out_pairs,
                   avg(kl_nats) AS kl_nats
               FROM alignment_metrics WHERE id IN (  -- a version may be tested again, with newer pairs
                   SELECT max(id) FROM alignment_metrics WHERE adapter = :adapter AND split = 'held_out'
                   GROUP BY version, pair_id)
               GROUP BY version) USING (version)
           WHERE adapter = :adapter ORDER BY version DESC LIMIT :limit""",
        {"adapter": adapter, "limit": limit},
    )
    return [{**row, "on_disk": bool(row["on_disk"])} for row in rows]


OTHER = "other"
"""Name under which the remaining adapters are summed; an adapter of that name is one of them."""
_READ_MEANS = "SELECT avg(win), avg(logp_difference), avg(reward_correct)"
_ROWS = 1000
"""Number of latest scores and pairs that are read."""


@dataclass(frozen=True, slots=True)
class AdapterReading:
    """One adapter's means over its latest RECENT_PAIRS scores (None without any), and the pairs that wait."""

    adapter: str
    pairs_pending: int
    win_rate: float | None = None
    clpd_nats: float | None = None
    reward_accuracy: float | None = None
    kl_nats: float | None = None
    """KL to the base, per token of held-out answers, and the change of neutral text's NLL, in its latest test."""
    nll_change: float | None = None


def recent_adapters(db: Database, known: Collection[str], pairs_pending: int, most: int) -> list[AdapterReading]:
    """The `most` adapters of `known` that were scored or given pairs last, and OTHER where there are more.

    `pairs_pending` is how many pairs wait in all. OTHER's means are over all their scores among the latest ones.
    """
    shown = [_reading(db, name) for name in _latest(db, known)[:most]]
    if len(shown) < len(set(known)):
        waiting = pairs_pending - sum(reading.pairs_pending for reading in shown)
        marks = ", ".join("?" * len(shown))
        rows = "SELECT * FROM alignment_metrics ORDER BY id DESC LIMIT ?"
        others = f"{_READ_MEANS} FROM ({rows}) WHERE split = 'prequential' AND adapter NOT IN ({marks})"
        means = db.execute(others, [_ROWS, *(reading.adapter for reading in shown)]).fetchone()
        # The difference may be negative: the store records a step's end a moment after the trainer.
        shown.append(AdapterReading(OTHER, max(0, waiting), *means))
    return shown


def _latest(db: Database, known: Collection[str]) -> list[str]:
    """Names in order of their latest scores and pairs, then the others by name."""
    active = db.execute(
        """SELECT adapter FROM (
               SELECT * FROM (SELECT adapter, created_at FROM alignment_metrics ORDER BY id DESC LIMIT :rows)
               UNION ALL SELECT * FROM (SELECT adapter, created_at FROM pairs ORDER BY id DESC LIMIT :rows))
           GROUP BY adapter ORDER BY max(created_at) DESC, adapter""",
        {"rows": _ROWS},
    )
    names = dict.fromkeys([*(name for (name,) in active), *sorted(known)])
    return [name for name in names if name in known and name != OTHER]


def _reading(db: Database, name: str) -> AdapterReading:
    (pending,) = db.execute("SELECT count(*) FROM pairs WHERE adapter = ? AND state = 'queued'", [name]).fetchone()
    rows = "SELECT * FROM alignment_metrics WHERE adapter = ? AND split = 'prequential' ORDER BY version DESC, id DESC"
    win_rate, clpd, accuracy = db.execute(f"{_READ_MEANS} FROM ({rows} LIMIT ?)", [name, RECENT_PAIRS]).fetchone()
    test = latest_test(db, name)
    return AdapterReading(name, pending, win_rate, clpd, accuracy, test["held_out_kl_nats"], test["neutral_nll_change"])
