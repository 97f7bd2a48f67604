"""The taste model: a logistic (Bradley-Terry) fit of a person's utility of an answer, with a Gaussian prior.

An opinion says that the utility of one answer is above another's, or, of a rating alone, above or below a threshold.
The prior is a Gaussian process over differences of answers: the product of how alike they are in their features and
of how alike their prompts are, so that what is liked under one topic counts less under others. The posterior is
Laplace's (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithms 3.1 and 3.2).

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edged.align.taste.features import Features, describe, features, subject_of

Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts to vectors of unit length, [texts, dims]."""
MAX_OPINIONS = 400
"""The newest opinions that a fit takes."""
_AMPLITUDE = 1.0
_BIAS_STD = 1.0
_EMBED_STD = 1.0
_GENERAL = 0.5
"""Share of the prior's variance that all prompts have in common; the rest is their topic's."""
_SCREEN = 1.0
_HALF_LIFE_PICKS = 12.0
_DAY_S = 86_400.0
_HALF_LIFE_DAYS = 180.0
_NEW_PICKS = 10
_FEW_PROMPTS = 5


@dataclass(frozen=True, slots=True)
class Opinion:
    """One signal's pair; a rating alone has `rejected` "" (good) or `chosen` "" (bad). `at_s` is Unix time."""

    prompt: str
    chosen: str
    rejected: str
    weight: float
    at_s: float

    @property
    def alone(self) -> int:
        """1 for a good rating alone, -1 for a bad one, 0 for a pair."""
        return (self.rejected == "") - (self.chosen == "")


@dataclass(frozen=True, slots=True)
class Belief:
    """A belief in words; `agree` of the `of` picks that tell agree, and `key` names it for striking."""

    key: str
    text: str
    likes: bool
    agree: int
    of: int


class Taste:
    """The posterior of one person's taste. Make it by `fit`."""

    def __init__(self, opinions: Sequence[Opinion], struck: Collection[str], embed: Embed | None) -> None:
        opinions = [each for each in opinions if each.weight > 0 and each.chosen != each.rejected]
        self._opinions = sorted(opinions, key=lambda each: each.at_s)[-MAX_OPINIONS:]
        self._struck = frozenset(map(subject_of, struck))
        self._embed = embed
        self._events = _events(self._opinions)
        self._columns = _Columns(self._opinions, self._struck)
        self._topics = _Topics([each.prompt for each in self._opinions])
        self._signs = np.array([-float(each.alone) for each in self._opinions])
        self._design = self._differences()
        age = _age_weights(self._opinions, self._events)
        self._weights = np.array([each.weight for each in self._opinions]) * age
        self._columns.screen(self._design, self._events, self._weights)
        self._scaled = self._design * self._columns.scales
        if self._opinions:
            self._doubt_contradicted()
        self._solve()
        self.sure = self._sureness()
        self.prompts = len({each.prompt for each in self._opinions})
        """Number of prompts that it has opinions on."""
        self.version = len(opinions)
        """Number of the opinions that it was made of: it changes with each signal."""

    @classmethod
    def fit(cls, opinions: Sequence[Opinion], struck: Collection[str] = (), embed: Embed | None = None) -> Taste:
        """Return the taste that `opinions` tell; features of the `struck` keys and what is near to them have no part.

        Of many opinions only the newest `MAX_OPINIONS` count.
        """
        return cls(opinions, struck, embed)

    def scores(self, prompt: str, answers: Sequence[str], ended: bool = True) -> np.ndarray:
        """Return each answer's mean utility; `ended` False: they are beginnings, whose end and length mean nothing."""
        return self._utilities(self._alpha, prompt, answers, ended)

    def scores_apart(self, prompt: str, answers: Sequence[str]) -> np.ndarray:
        """Return scores by the posterior without the opinions on this very prompt."""
        group = np.array([i for i, each in enumerate(self._opinions) if each.prompt == prompt], int)
        return self._utilities(self._alpha_without(group), prompt, answers, True)

    def preference(self, prompt: str, one: str, other: str) -> float:
        """Return the probability that the person prefers `one` to `other` under `prompt`."""
        if not self._opinions or one == other:
            return 0.5
        rows = self._columns.rows([one, other], True)
        row = self._with_embedding(rows, [one, other])
        difference = (row[0] - row[1]) * self._columns.scales
        likeness = self._topics.likeness(prompt)
        cross = (self._scaled @ difference) * likeness
        mean = float(cross @ self._alpha)
        own = float(difference @ difference)
        variance = own - float(cross @ self._gain @ cross)
        return _probability(mean, max(variance, 0.0))

    def likes(self, prompt: str, answer: str, apart: bool = False) -> float:
        """Return the probability that the person likes `answer`; `apart`: told without the opinions on this prompt."""
        score = (self.scores_apart if apart else self.scores)(prompt, [answer])[0]
        slope, threshold = self._threshold
        return float(_sigmoid(slope * (score - threshold)))

    def beliefs(self, most: int = 6) -> list[Belief]:
        """Return what it believes most, in words."""
        if not self._opinions:
            return []
        events = _mean_by_event(self._design, self._events)
        weights = (self._scaled.T @ self._alpha) * self._columns.scales
        told = np.abs(weights) * np.sqrt((events**2).mean(0))
        found: list[Belief] = []
        taken: list[np.ndarray] = []
        subjects: set[str] = set()
        for column in np.argsort(-told, kind="stable"):
            name = self._columns.name(int(column))
            if len(found) == most:
                break
            if name is None or subject_of(name) in subjects:
                continue
            values = events[:, column]
            of, agree = int((np.abs(values) > 1e-9).sum()), int((values * weights[column] > 1e-9).sum())
            if of < 2 or agree < 0.7 * of or (agree - of / 2) < 0.75 * math.sqrt(of):
                continue
            if any(abs(_correlation(values, other)) > 0.9 for other in taken):
                continue
            found.append(Belief(name, describe(name), bool(weights[column] > 0), agree, of))
            taken.append(values)
            subjects.add(subject_of(name))
        return found

    def _differences(self) -> np.ndarray:
        """Return an opinion's chosen answer less its rejected one, in features; a rating alone stands against the
        mean of all texts."""
        texts = list(dict.fromkeys(text for each in self._opinions for text in (each.chosen, each.rejected)))
        place = {text: i for i, text in enumerate(texts)}
        rows = self._with_embedding(self._columns.rows(texts, True), texts)
        self._mean = rows.mean(0) if len(texts) else rows.sum(0)
        chosen = rows[[place[each.chosen] for each in self._opinions]]
        rejected = rows[[place[each.rejected] for each in self._opinions]]
        alone = self._signs[:, None]
        return np.where(alone < 0, chosen - self._mean, np.where(alone > 0, self._mean - rejected, chosen - rejected))

    def _with_embedding(self, rows: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        if self._embed is None or not texts:
            return rows
        return np.concatenate([rows, self._embed(texts) * _EMBED_STD], 1)

    def _doubt_contradicted(self) -> None:
        """Lower the weight of older opinions that the newest picks, fitted alone, contradict: a change of mind."""
        last = self._events[-1] if len(self._events) else 0
        new = self._events > last - _NEW_PICKS
        if new.all():
            return
        kernel = self._kernel()
        mean = _laplace(kernel[np.ix_(new, new)], self._weights[new])[0]
        agreed = _sigmoid(kernel[np.ix_(~new, new)] @ mean)
        self._weights[~new] *= np.minimum(1.0, 2 * agreed) ** 2

    def _kernel(self) -> np.ndarray:
        likeness = self._topics.among()
        return (self._scaled @ self._scaled.T) * likeness + _BIAS_STD**2 * np.outer(self._signs, self._signs)

    def _solve(self) -> None:
        self._k = self._kernel()
        self._alpha, self._f, self._gain = _laplace(self._k, self._weights)

    def _alpha_without(self, group: np.ndarray) -> np.ndarray:
        """Return the dual weights of the posterior without the likelihood of `group` (its cavity)."""
        if not len(group):
            return self._alpha
        # cov: the posterior's covariance between all opinions and the group's.
        mixing = -self._gain @ self._k[:, group]
        mixing[group, np.arange(len(group))] += 1.0
        inner = self._k[group] @ mixing
        p = _sigmoid(self._f[group])
        curvature = self._weights[group] * p * (1 - p)
        step = np.linalg.solve(np.eye(len(group)) - curvature[:, None] * inner, self._alpha[group])
        return self._alpha - mixing @ step

    def _utilities(self, alpha: np.ndarray, prompt: str, answers: Sequence[str], ended: bool) -> np.ndarray:
        if not self._opinions or not answers:
            return np.zeros(len(answers))
        rows = self._with_embedding(self._columns.rows(answers, ended), answers)
        return ((rows - self._mean) * self._columns.scales) @ (self._scaled.T @ (alpha * self._topics.likeness(prompt)))

    def _groups(self) -> list[np.ndarray]:
        prompts: dict[str, list[int]] = {}
        for i, each in enumerate(self._opinions):
            prompts.setdefault(each.prompt, []).append(i)
        return [np.array(group) for group in prompts.values()]

    def _sureness(self) -> float:
        """Return the share of pairs that it decides as the person did, their prompts left out in turn."""
        if not self._opinions:
            return 0.5
        groups = self._groups()
        right = total = 0.0
        bias = _BIAS_STD**2 * self._signs
        for group in groups:
            alpha = self._alpha_without(group)
            f = self._k[group] @ alpha - self._signs[group] * (bias @ alpha)
            weights = self._weights[group]
            right += float(weights @ (0.5 + 0.5 * np.sign(np.round(f, 9))) / weights.sum())
            total += 1
        if len(groups) < _FEW_PROMPTS:
            return float(np.clip(0.5 + 0.5 * (right / total - 0.5), 0.5, 1.0))
        return float((right + 1) / (total + 2))

    @cached_property
    def _threshold(self) -> tuple[float, float]:
        """Return the slope and the threshold that tell what was chosen from what was rejected, prompts left out."""
        good: list[float] = []
        bad: list[float] = []
        for group in self._groups():
            alpha = self._alpha_without(group)
            for i in group:
                each = self._opinions[i]
                if each.chosen:
                    good.append(float(self._utilities(alpha, each.prompt, [each.chosen], True)[0]))
                if each.rejected:
                    bad.append(float(self._utilities(alpha, each.prompt, [each.rejected], True)[0]))
        if not good or not bad:
            return 1.0, 0.0
        return 2.0, (float(np.mean(good)) + float(np.mean(bad))) / 2


class _Columns:
    """The features that opinions' texts have, as columns; a feature of one text alone tells nothing of others."""

    def __init__(self, opinions: Sequence[Opinion], struck: frozenset[str]) -> None:
        self._texts = [features(t) for t in dict.fromkeys(t for o in opinions for t in (o.chosen, o.rejected) if t)]
        every = np.concatenate([each.hashes for each in self._texts]) if self._texts else np.zeros(0, np.int64)
        hashes, counts = np.unique(every, return_counts=True)
        self._hashes = hashes[counts >= min(2, max(len(self._texts) - 1, 1))]
        if struck:
            gone = [h for t in self._texts for n, h in zip(t.names, t.hashes, strict=True) if subject_of(n) in struck]
            self._hashes = np.setdiff1d(self._hashes, np.array(gone, np.int64))
        self.scales = np.ones(len(self._hashes))

    def rows(self, texts: Sequence[str], ended: bool) -> np.ndarray:
        """Return the features of `texts`, [texts, columns]."""
        out = np.zeros((len(texts), len(self._hashes)))
        for row, text in zip(out, texts, strict=True):
            if not text or not len(self._hashes):
                continue
            each: Features = features(text, ended)
            places = np.minimum(np.searchsorted(self._hashes, each.hashes), len(self._hashes) - 1)
            known = self._hashes[places] == each.hashes
            row[places[known]] = each.values[known]
        return out

    def screen(self, design: np.ndarray, events: np.ndarray, weights: np.ndarray) -> None:
        """Widen the prior of features for which the picks speak, each taken alone; narrow that of the others."""
        self.scales = np.full(design.shape[1], _AMPLITUDE)
        if not len(events):
            return
        by_event = _mean_by_event(design, events)
        event_weights = np.bincount(events, weights) / np.bincount(events)
        score = event_weights @ by_event / 2
        information = event_weights @ by_event**2 / 4
        evidence = score**2 / (2 * (information + 0.05))
        self.scales = _AMPLITUDE * np.exp(_SCREEN * (evidence - 2.0).clip(-2, 2) / 2)

    def name(self, column: int) -> str | None:
        """Return a column's feature; None for one of an embedding."""
        if column >= len(self._hashes):
            return None
        for each in self._texts:
            at = np.flatnonzero(each.hashes == self._hashes[column])
            if len(at):
                return each.names[int(at[0])]
        return None


class _Topics:
    """How alike prompts are, by the words that they share."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = list(dict.fromkeys(prompts))
        place = {prompt: i for i, prompt in enumerate(self._prompts)}
        self._of = np.array([place[prompt] for prompt in prompts], int)
        self._words = [_topic_words(prompt) for prompt in self._prompts]
        counts: dict[str, int] = {}
        for words in self._words:
            for word in words:
                counts[word] = counts.get(word, 0) + 1
        n = len(self._prompts)
        self._idf = {word: math.log((n + 1) / count) for word, count in counts.items()}
        self._place = {word: i for i, word in enumerate(counts)}
        self._vectors = np.stack([self._vector(words) for words in self._words]) if n else np.zeros((0, 0))

    def _vector(self, words: frozenset[str]) -> np.ndarray:
        out = np.zeros(len(self._place) + 1)
        new = 0.0
        for word in words:
            if word in self._place:
                out[self._place[word]] = self._idf[word]
            else:
                new += math.log(len(self._prompts) + 1) ** 2
        out[-1] = 0.0
        norm = math.sqrt(float(out @ out) + new)
        return out / norm if norm else out

    def among(self) -> np.ndarray:
        """Return the likeness of opinions' prompts, [opinions, opinions]."""
        alike = self._vectors @ self._vectors.T
        np.fill_diagonal(alike, 1.0)
        return (_GENERAL + (1 - _GENERAL) * alike)[np.ix_(self._of, self._of)]

    def likeness(self, prompt: str) -> np.ndarray:
        """Return the likeness of `prompt` to each opinion's, [opinions]."""
        alike = self._vectors @ self._vector(_topic_words(prompt))
        if prompt in self._prompts:
            alike[self._prompts.index(prompt)] = 1.0
        return (_GENERAL + (1 - _GENERAL) * alike)[self._of]


def _topic_words(prompt: str) -> frozenset[str]:
    return frozenset(name[5:] for name in features(prompt).names if name.startswith("word:"))


def _events(opinions: Sequence[Opinion]) -> np.ndarray:
    """Return for each opinion, oldest first, the number of its pick: opinions of one moment and prompt are one."""
    seen: dict[tuple[float, str], int] = {}
    return np.array([seen.setdefault((each.at_s, each.prompt), len(seen)) for each in opinions], int)


def _age_weights(opinions: Sequence[Opinion], events: np.ndarray) -> np.ndarray:
    if not opinions:
        return np.zeros(0)
    later = events[-1] - events
    days = np.array([opinions[-1].at_s - each.at_s for each in opinions]) / _DAY_S
    return 0.5 ** (later / _HALF_LIFE_PICKS + days / _HALF_LIFE_DAYS)


def _mean_by_event(rows: np.ndarray, events: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(np.diff(events, prepend=-1))
    return np.add.reduceat(rows, starts) / np.diff(np.append(starts, len(events)))[:, None]


def _laplace(kernel: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (dual weights, latent means, gain): the posterior's mean is kernel @ dual, its variance
    k - cross @ gain @ cross."""
    n = len(weights)
    f, dual = np.zeros(n), np.zeros(n)
    best = -math.inf
    for _ in range(30):
        p = _sigmoid(f)
        root = np.sqrt(np.maximum(weights * p * (1 - p), 1e-12))
        inner = np.eye(n) + root[:, None] * kernel * root
        b = root**2 * f + weights * (1 - p)
        new = b - root * np.linalg.solve(inner, root * (kernel @ b))
        step = 1.0
        while True:
            trial = dual + step * (new - dual)
            latent = kernel @ trial
            value = float(-weights @ np.logaddexp(0, -latent) - trial @ latent / 2)
            if value >= best - 1e-9 or step < 1e-3:
                break
            step /= 2
        dual, f = trial, latent
        if value - best < 1e-6 * max(1.0, abs(value)):
            break
        best = value
    p = _sigmoid(f)
    root = np.sqrt(np.maximum(weights * p * (1 - p), 1e-12))
    inner = np.eye(n) + root[:, None] * kernel * root
    return weights * (1 - p), f, root[:, None] * np.linalg.inv(inner) * root if n else np.zeros((0, 0))


def _sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))


def _probability(mean: float, variance: float) -> float:
    """Return the logistic's mean over a Gaussian (MacKay, 1992)."""
    return float(_sigmoid(mean / math.sqrt(1 + math.pi * variance / 8)))


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    norm = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / norm if norm else 0.0
