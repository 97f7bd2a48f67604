"""The taste model: a logistic (Bradley-Terry) fit of a person's utility of an answer, with a Gaussian prior.

An opinion says that the utility of one answer is above another's, or, of a rating alone, above or below a threshold.
The prior is a Gaussian process over differences of answers: the product of how alike they are in their features and
of how alike their prompts are, so that what is liked under one topic counts less under others. The posterior is
Laplace's (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithms 3.1 and 3.2).

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from zlib import crc32

import numpy as np

from edged.align.taste.edits import Operator, induce
from edged.align.taste.features import describe, features, subject_of

MAX_OPINIONS = 240
"""The newest opinions that a fit takes."""
_MAX_COLUMNS = 800
_FOLDS = 5
_FOLD_OPINIONS = 75
"""The newest opinions that the fits of folds take."""
_HALF_LIFE_PICKS = 40
_HALF_LIFE_S = 180 * 86_400
_BIAS_STD = 1.0
"""The prior's standard deviation of the threshold of ratings alone."""
_GENERAL = 0.5
"""Share of the prior's variance that all prompts have in common; the rest is their topic's."""
_TOPIC_DIMS = 6
_EVIDENCE = 3.5
"""The log-evidence, of a feature taken alone, at which its prior is neither widened nor narrowed."""
_NEWEST_PICKS = (10, 20)
"""Of what numbers of newest picks fits are made, in turn, that older ones may contradict."""
_LATEST_PICKS, _LEAST_PICKS = 16, 8
"""Of how many latest picks it is asked whether a mind changes in them, at most, and from how many on in all."""
_CONTRADICTED = 0.44
"""Share of picks in a row, of those that agree, at which they do not count any more."""
_AGREED_WINDOW = 11
_AGREED, _AGREED_PICKS = 0.6, 4
"""How many picks in a row that is told by, and what share of how many more is added to them."""
_USUAL, _USUAL_PICKS = 0.65, 5
"""The share of choices decided right after some five picks, as measured, and how many picks it weighs as much as."""
_AS_EXPECTED = 0.6
"""P(what was chosen is preferred to the worst beside it) from which on a signal is as the others tell."""
_LOCAL, _ELSEWHERE_PICKS = 6, 3
"""How much more the picks under a like prompt tell of a prompt: the exponent of their cosine; and as how many of them
all picks together count."""
_SHARES = np.linspace(0.05, 0.95, 19)
"""Shares of the answers of picks that thresholds of liking have under them."""
_NEWEST_EDITS = 5
"""The newest edits by which it is told whether they are wanted under a prompt."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """One signal's pair; a rating alone has `rejected` "" (good) or `chosen` "" (bad). `at_s` is Unix time."""

    prompt: str
    chosen: str
    rejected: str
    weight: float
    at_s: float
    edited: bool = False
    """Whether the chosen answer is the rejected one as the person has edited it."""


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

    def __init__(self, opinions: Sequence[Opinion], struck: Collection[str]) -> None:
        self._design = _Design(opinions, frozenset(map(subject_of, struck)))
        self.prompts = len({each.prompt for each in opinions})
        """Number of prompts that it has opinions on."""
        self.version = crc32(repr((len(opinions), opinions[-1:], sorted(struck))).encode())
        """A number that changes with each signal, and with what is struck."""
        self._edits = [(each.rejected, each.chosen) for each in opinions if each.edited]
        self._struck = frozenset(struck)
        self._forget_what_changed()
        self._all = _Posterior(self._design, np.arange(self._design.count)) if self._design.count else None

    @classmethod
    def fit(cls, opinions: Sequence[Opinion], struck: Collection[str] = ()) -> Taste:
        """Return the taste that `opinions` tell; features of the `struck` keys and what is near to them have no part.

        Of many opinions only the newest `MAX_OPINIONS` count.
        """
        return cls(opinions, struck)

    def scores(self, prompt: str, answers: Sequence[str], ended: Iterable[bool] = repeat(True)) -> np.ndarray:
        """Return each answer's mean utility; `ended` False: it is a beginning, whose end and length mean nothing."""
        return np.zeros(len(answers)) if self._all is None else self._all.utilities(prompt, answers, ended)

    def scores_apart(self, prompt: str, answers: Sequence[str]) -> np.ndarray:
        """Return scores by a fit without the opinions on this very prompt, nor those on the others of its fold."""
        fit = self._apart(prompt)
        return np.zeros(len(answers)) if fit is None else fit.utilities(prompt, answers)

    def preference(self, prompt: str, one: str, other: str) -> float:
        """Return the probability that the person prefers `one` to `other` under `prompt`."""
        return 0.5 if self._all is None else self._all.preference(prompt, one, other)

    def difference(self, prompt: str, one: str, other: str) -> float:
        """Return how far apart the person likes the two, in either direction, now or before his latest picks.

        1 is usual of answers that his signals compare, told without these. While a mind changes, the fit of all is torn
        between what was liked and what is: neither is liked alike. Where nothing is known, any two are 1 apart.
        """
        fits = [(fit, usual) for fit, usual in ((self._all, self._usual), self._earlier) if fit and usual]
        return max((float(np.ptp(fit.utilities(prompt, [one, other]))) / usual for fit, usual in fits), default=1.0)

    def likes(self, prompt: str, answer: str, apart: bool = False) -> float:
        """Return the probability that the person likes `answer`; `apart`: told without the opinions on this prompt."""
        score = (self.scores_apart if apart else self.scores)(prompt, [answer])[0]
        slope, threshold = self._liking
        return float(_sigmoid(slope * (score - threshold)))

    @property
    def tested(self) -> bool:
        """Whether there are choices to test the fit by, with prompts left out."""
        return float(self._tested[0].sum()) > 1e-3

    @property
    def sure(self) -> float:
        """The share of choices of one of two that are the person's, with prompts left out of the fit in turn.

        For few prompts it is mostly the share that most people's signals have.
        """
        weights, right = self._tested
        total = float(weights.sum())
        return (float(weights @ right) + _USUAL * _USUAL_PICKS) / (total + _USUAL_PICKS) if self.tested else 0.5

    def sure_of(self, prompt: str, answers: Sequence[str]) -> float:
        """Return `sure` for a prompt to which `answers` are: what was right under prompts like it counts most.

        It is near 0.5 where what the person likes elsewhere does not count.
        """
        weights, right = self._tested
        if not self.tested:
            return 0.5
        near = weights * np.exp(_LOCAL * self._design.alike(prompt, answers))
        near /= near.max()
        return float(near @ right + _ELSEWHERE_PICKS * self.sure) / (float(near.sum()) + _ELSEWHERE_PICKS)

    @cached_property
    def doubted(self) -> bool:
        """Whether the latest signal was against what those on other prompts tell, or about answers alike to them.

        So it is, too, where there are no signals on other prompts.
        """
        if self._all is None:
            return False
        latest = np.flatnonzero(self._design.events == self._design.events[-1])
        fit = self._apart(self._design.opinions[-1].prompt)
        return fit is None or float(_moderated(*fit.latent(latest)).max()) < _AS_EXPECTED

    @cached_property
    def operator(self) -> Operator | None:
        """The change that the person's edits share, without its struck parts."""
        found = induce(self._edits)
        return found.without(self._struck) if found else None

    def edit(self, prompt: str) -> Operator | None:
        """Return the change to make to answers to `prompt`: None where the person does not like it there."""
        if self.operator is None:
            return None
        newest = self._edits[-_NEWEST_EDITS:]
        wanted = sum(self.preference(prompt, new, old) for old, new in newest) / len(newest)
        return self.operator if wanted > 0.5 else None

    def beliefs(self, most: int = 6) -> list[Belief]:
        """Return what it believes most, in words: first the parts of what its edits share."""
        if self._all is None:
            return []
        edits = self.operator.parts if self.operator else {}
        shown = {key: sum(part.shown(new) for _, new in self._edits) for key, part in edits.items()}
        told = [Belief(key, part.text, True, shown[key], len(self._edits)) for key, part in edits.items()]
        said = {each.text for each in told}
        return [*told, *(each for each in self._believed(most) if each.text not in said)][: max(most, len(told))]

    def _believed(self, most: int) -> list[Belief]:
        design = self._design
        assert self._all is not None
        weights = self._all.weights()
        events = design.by_event(np.arange(design.count))
        told = np.abs(weights) * np.sqrt((events**2).mean(0))
        found: list[Belief] = []
        taken: list[np.ndarray] = []
        for column in np.argsort(-told, kind="stable")[: np.count_nonzero(told)]:
            name, values = design.name(int(column)), events[:, column]
            telling = values[np.abs(values) > 1e-4]
            of, agree = len(telling), int((telling * weights[column] > 0).sum())
            alike = any(abs(_cosine(values, other)) > 0.9 for other in taken)
            named = subject_of(name) in {subject_of(each.key) for each in found}
            if of >= 2 and agree - of / 2 >= max(0.2 * of, 0.7 * math.sqrt(of)) and not alike and not named:
                found.append(Belief(name, describe(name), bool(weights[column] > 0), agree, of))
                taken.append(values)
            if len(found) >= most:
                break
        return found[:most]

    def _forget_what_changed(self) -> None:
        """Lower the weight of older picks that the newest picks contradict: a change of mind."""
        design = self._design
        for newest in _NEWEST_PICKS:
            old = np.flatnonzero(design.events[-1:] - design.events >= newest)
            if not len(old):
                return
            mean, variance = _Posterior(design, np.arange(len(old), design.count)).latent(old)
            events = design.events[old]
            agreed = np.bincount(events, mean > 0) / np.bincount(events)
            window = np.ones(_AGREED_WINDOW)
            told = np.convolve(np.ones(len(agreed)), window)[_AGREED_WINDOW // 2 :][: len(agreed)]
            near = np.convolve(agreed, window)[_AGREED_WINDOW // 2 :][: len(agreed)] + _AGREED * _AGREED_PICKS
            kept = np.clip((near / (told + _AGREED_PICKS) - _CONTRADICTED) / (0.5 - _CONTRADICTED), 0, 1)
            design.weights = design.weights.copy()
            design.weights[old] *= kept[events] * np.minimum(1, 2 * _moderated(mean, variance)) ** 2

    @cached_property
    def _left_out(self) -> list[tuple[_Posterior, np.ndarray]]:
        """Fits without each share of the prompts, and the opinions that they were made without, of the newest ones."""
        newest = np.arange(max(0, self._design.count - _FOLD_OPINIONS), self._design.count)
        prompts = self._design.prompt_of[newest]
        folds = min(_FOLDS, len(set(prompts)))
        if folds < 2:
            return []
        held = [prompts % folds == fold for fold in range(folds)]
        return [(_Posterior(self._design, newest[~out]), newest[out]) for out in held if out.any() and not out.all()]

    @cached_property
    def _earlier(self) -> tuple[_Posterior | None, float]:
        """The fit without the latest picks, by weights that nothing has lowered, and the mean distance of the utilities
        of these picks' answers; (None, 0) for few picks."""
        design = self._design
        events = int(design.events[-1]) + 1 if design.count else 0
        if events < _LEAST_PICKS:
            return None, 0.0
        old = design.events < events - min(_LATEST_PICKS, events // 2)
        fit = _Posterior(design, np.flatnonzero(old), design.first_weights)
        return fit, float(np.abs(fit.latent(np.flatnonzero(~old))[0]).mean())

    @cached_property
    def _usual(self) -> float:
        """The mean distance of the utilities of the two sides of an opinion, with its prompt left out."""
        means = [np.abs(fit.latent(group)[0]) for fit, group in self._left_out]
        return float(np.concatenate(means).mean()) if means else 0.0

    @cached_property
    def _tested(self) -> tuple[np.ndarray, np.ndarray]:
        """The test by prompt: how much its opinions tell, and the share decided right without them."""
        size = len(self._design.prompt_places)
        weights, right = np.full(size, 1e-9), np.zeros(size)
        for fit, group in self._left_out:
            mean = fit.latent(group)[0]
            # A pair that the fit leaves open tells little: its answers may be equal to the person.
            told = np.minimum(1, np.abs(mean) / (np.abs(mean).mean() + 1e-9))
            share = told * self._design.weights[group] / self._design.event_size[group]
            np.add.at(weights, self._design.prompt_of[group], share)
            np.add.at(right, self._design.prompt_of[group], share * (mean > 0))
        return weights, right / weights

    def _apart(self, prompt: str) -> _Posterior | None:
        place = self._design.prompt_places.get(prompt)
        if place is None:
            return self._all
        found = (fit for fit, group in self._left_out if place in self._design.prompt_of[group])
        return next(found, self._left_out[0][0] if self._left_out else None)

    @cached_property
    def _liking(self) -> tuple[float, float]:
        """The slope and the threshold of liking that explain best what was chosen of what, with prompts left out.

        Of several answers one that is liked is chosen, any of them, and any at all where none is liked. A person takes
        one answer in ten for what it is not. The prior of the share of answers under the threshold is Beta(2, 2):
        signals that tell nothing leave it at half, not at an end.
        """
        design = self._design
        picks: list[np.ndarray] = []
        alone: list[float] = []
        for fit, group in self._left_out:
            for event in np.unique(design.events[group]):
                told = group[design.events[group] == event]
                texts = dict.fromkeys(t for i in told for t in (design.opinions[i].chosen, design.opinions[i].rejected))
                picks.append(fit.utilities(design.opinions[told[0]].prompt, [text for text in texts if text]))
                alone.append(design.signs[told[0]])
        if not picks:
            return 1.0, 0.0
        scores, rated = np.concatenate(picks), np.array(alone)
        starts = np.cumsum([0, *map(len, picks[:-1])])
        best, found = -math.inf, (1.0, 0.0)
        for slope in np.array([0.25, 0.5, 1, 2, 4, 8]) / (scores.std() + 0.1):
            for share, threshold in zip(_SHARES, np.quantile(scores, _SHARES), strict=True):
                liked = 0.1 + 0.8 * _sigmoid(slope * (scores - threshold))
                first, all_of_pick = liked[starts], np.add.reduceat(liked, starts)
                fits = np.where(rated < 0, first, np.where(rated > 0, 1 - first, first / all_of_pick))
                if (value := float(np.log(fits).sum()) + math.log(share * (1 - share))) > best + 1e-9:
                    best, found = value, (float(slope), float(threshold))
        return found


class _Design:
    """Opinions as differences of their answers' features, oldest first."""

    def __init__(self, opinions: Sequence[Opinion], struck: frozenset[str]) -> None:
        told = [each for each in opinions if each.weight > 0 and each.chosen != each.rejected]
        told.sort(key=lambda each: (each.at_s, each.prompt, each.chosen, each.rejected))
        self.opinions = told[-MAX_OPINIONS:]
        self.count = len(self.opinions)
        texts = list(dict.fromkeys(t for each in self.opinions for t in (each.chosen, each.rejected) if t))
        self._texts = [features(text) for text in texts]
        self._hashes = self._known(struck)
        raw = self._matrix(texts)
        self.mean = raw.mean(0) if len(texts) else raw.sum(0)
        self.rows = np.concatenate([raw - self.mean, np.zeros((1, raw.shape[1]), np.float32)])
        places = {text: i for i, text in enumerate(texts)} | {"": len(texts)}
        self._chosen = np.array([places[each.chosen] for each in self.opinions], int)
        self._rejected = np.array([places[each.rejected] for each in self.opinions], int)
        self.signs = np.array([(each.chosen == "") - float(each.rejected == "") for each in self.opinions])
        self.prompt_places: dict[str, int] = {}
        self.prompt_of = np.array(
            [self.prompt_places.setdefault(o.prompt, len(self.prompt_places)) for o in self.opinions], int
        )
        seen: dict[tuple[float, str], int] = {}
        self.events = np.array([seen.setdefault((o.at_s, o.prompt), len(seen)) for o in self.opinions], int)
        self.event_size = np.bincount(self.events)[self.events] if self.count else np.zeros(0)
        documents: list[list[str]] = [[prompt] for prompt in self.prompt_places]
        for place, each in zip(self.prompt_of, self.opinions, strict=True):
            documents[place] += [each.chosen, each.rejected]
        self.topics = _Topics(documents)
        later = self.events[-1:] - self.events
        age_s = np.array([self.opinions[-1].at_s - each.at_s for each in self.opinions])
        weights = np.array([each.weight for each in self.opinions])
        self.weights = self.first_weights = weights * 0.5 ** (later / _HALF_LIFE_PICKS + age_s / _HALF_LIFE_S)

    def _known(self, struck: frozenset[str]) -> np.ndarray:
        """Return the features that are columns; one of hardly any text tells nothing of others."""
        hashes = np.concatenate([np.zeros(0, np.int64), *(each.hashes for each in self._texts)])
        hashes, counts = np.unique(hashes, return_counts=True)
        kept: np.ndarray = hashes[counts >= np.clip(len(self._texts) // 30, 1, 4)]
        if not struck:
            return kept
        gone = [h for t in self._texts for name, h in zip(t.names, t.hashes, strict=True) if subject_of(name) in struck]
        return np.setdiff1d(kept, np.array(gone, np.int64))

    def _matrix(self, texts: Sequence[str], ended: Iterable[bool] = repeat(True)) -> np.ndarray:
        out = np.zeros((len(texts), len(self._hashes)), np.float32)
        for row, text, whole in zip(out, texts, ended, strict=False):
            if text and len(self._hashes):
                each = features(text) if whole else features(text, False)  # the call is the key of what is kept
                places = np.minimum(np.searchsorted(self._hashes, each.hashes), len(self._hashes) - 1)
                known = self._hashes[places] == each.hashes
                row[places[known]] = each.values[known]
        return out

    def centred(self, texts: Sequence[str], ended: Iterable[bool] = repeat(True)) -> np.ndarray:
        """Return the features of `texts` less their mean among the opinions', [texts, columns]."""
        centred: np.ndarray = self._matrix(texts, ended) - self.mean
        return centred

    def alike(self, prompt: str, answers: Sequence[str]) -> np.ndarray:
        """Return how alike `prompt`, to which `answers` are, is to each prompt of the opinions: cosines, [prompts]."""
        place = self.prompt_places.get(prompt)
        return self.topics.alike_to([prompt, *answers]) if place is None else self.topics.alike[place]

    def sides(self, opinions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (texts, chosen, rejected): rows of `opinions`' texts, and the places among them of their sides."""
        both = np.concatenate([self._chosen[opinions], self._rejected[opinions]])
        texts, places = np.unique(both, return_inverse=True)
        return texts, places[: len(opinions)], places[len(opinions) :]

    def by_event(self, opinions: np.ndarray) -> np.ndarray:
        """Return the mean difference of each pick's opinions, [picks, columns]."""
        texts, chosen, rejected = self.sides(opinions)
        events = np.unique(self.events[opinions], return_inverse=True)[1]
        share = 1 / np.bincount(events)[events]
        mixing = np.zeros((events[-1] + 1, len(texts)), np.float32)
        np.add.at(mixing, (events, chosen), share)
        np.add.at(mixing, (events, rejected), -share)
        return mixing @ self.rows[texts]

    def name(self, column: int) -> str:
        """Return a column's feature."""
        found = ((t, np.flatnonzero(t.hashes == self._hashes[column])) for t in self._texts)
        return next(text.names[int(at[0])] for text, at in found if len(at))


class _Posterior:
    """The posterior by some of the opinions, at least one."""

    def __init__(self, design: _Design, opinions: np.ndarray, weights: np.ndarray | None = None) -> None:
        """`weights` are of all of the design's opinions, by default those that it has."""
        self._design = design
        self._prompts = design.prompt_of[opinions]
        self._texts, self._chosen, self._rejected = design.sides(opinions)
        weights = (design.weights if weights is None else weights)[opinions]
        self._columns, self._scales = self._screen(opinions, weights)
        self._rows = design.rows[np.ix_(self._texts, self._columns)] * self._scales
        kernel = self._cross(self._rows[self._chosen] - self._rows[self._rejected], self._prompts)
        kernel += _BIAS_STD**2 * np.outer(design.signs[opinions], design.signs[opinions])
        self._dual, self._curvature = _mode(kernel, weights)
        self._kernel = kernel

    def _screen(self, opinions: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns that matter and their scales.

        Features for which the picks speak, each taken alone, have a wider prior: what a person likes is a few of them.
        """
        events = np.unique(self._design.events[opinions], return_inverse=True)[1]
        rows = self._design.by_event(opinions)
        weights = np.bincount(events, weights) / np.bincount(events)
        squares = rows**2
        score, information = weights @ rows / 2, weights @ squares / 4
        evidence = score**2 / (2 * information + 0.1)
        scales = np.exp((evidence - _EVIDENCE).clip(-_EVIDENCE, _EVIDENCE))
        columns = np.sort(np.argsort(-(scales**2) * squares.sum(0), kind="stable")[:_MAX_COLUMNS])
        return columns, scales[columns].astype(np.float32)

    @cached_property
    def _gain(self) -> np.ndarray:
        """The matrix of the posterior's variance: own - cross @ gain @ cross."""
        root = np.sqrt(self._curvature)
        gain: np.ndarray = root[:, None] * np.linalg.inv(np.eye(len(root)) + root[:, None] * self._kernel * root) * root
        return gain

    def weights(self) -> np.ndarray:
        """Return the weight of each feature, whatever the prompt, [columns]."""
        out = np.zeros(self._design.rows.shape[1])
        out[self._columns] = self._direction(self._dual)
        return out

    def utilities(self, prompt: str, answers: Sequence[str], ended: Iterable[bool] = repeat(True)) -> np.ndarray:
        """Return the mean utility of each answer."""
        likeness = _likeness(self._design.alike(prompt, answers)[self._prompts])
        rows = self._design.centred(answers, ended)[:, self._columns]
        scores: np.ndarray = rows @ self._direction(self._dual * likeness)
        return scores

    def preference(self, prompt: str, one: str, other: str) -> float:
        """Return the probability that `one` is preferred to `other`."""
        rows = self._design.centred([one, other])[:, self._columns] * self._scales
        difference = rows[:1] - rows[1:]
        cross = self._inner(difference) * _likeness(self._design.alike(prompt, [one, other])[self._prompts])
        return float(_moderated(*self._moments(difference, cross))[0])

    def latent(self, opinions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the variance of the difference of utilities that each of `opinions` is about."""
        texts, chosen, rejected = self._design.sides(opinions)
        rows = self._design.rows[np.ix_(texts, self._columns)] * self._scales
        differences = rows[chosen] - rows[rejected]
        return self._moments(differences, self._cross(differences, self._design.prompt_of[opinions]))

    def _direction(self, dual: np.ndarray) -> np.ndarray:
        texts = len(self._texts)
        by_text = np.bincount(self._chosen, dual, texts) - np.bincount(self._rejected, dual, texts)
        direction: np.ndarray = (by_text @ self._rows) * self._scales
        return direction

    def _inner(self, differences: np.ndarray) -> np.ndarray:
        by_text = (differences @ self._rows.T).astype(float)
        inner: np.ndarray = by_text[:, self._chosen] - by_text[:, self._rejected]
        return inner

    def _cross(self, differences: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Return the prior's covariance of differences of answers under `prompts` with the opinions."""
        cross: np.ndarray = self._inner(differences) * _likeness(
            self._design.topics.alike[np.ix_(prompts, self._prompts)]
        )
        return cross

    def _moments(self, differences: np.ndarray, cross: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        variance = (differences**2).sum(1) - ((cross @ self._gain) * cross).sum(1)
        return cross @ self._dual, np.maximum(variance, 0.0)


class _Topics:
    """How alike prompts are, by the words of each and of its answers (latent semantic analysis)."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        words = [_words(texts) for texts in documents]
        self._words, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *words]), return_counts=True)
        self._rarity = np.log((len(documents) + 1) / counts)
        self._new = math.log(len(documents) + 1)
        vectors = np.array([self._vector(each) for each in words]).reshape(len(words), len(self._words))
        self._mean = vectors.mean(0) if len(words) else self._rarity
        centred = vectors - self._mean
        values, axes = np.linalg.eigh(centred @ centred.T)
        # Axes that tie with the first one left out are any of many: which ones depends on the processor.
        kept = values > 1e-6 + (1 + 1e-6) * max([0.0, *values[:-_TOPIC_DIMS]])
        self._axes = centred.T @ (axes[:, kept] / np.sqrt(values[kept]))
        self._places = _unit(centred @ self._axes)
        self.alike = self._places @ self._places.T
        """The cosine of each prompt and each, [prompts, prompts]."""

    def _vector(self, words: np.ndarray) -> np.ndarray:
        out = np.zeros(len(self._words))
        known = np.flatnonzero(np.isin(self._words, words, assume_unique=True))
        out[known] = self._rarity[known]
        norm = math.sqrt(float(out @ out) + (len(words) - len(known)) * self._new**2)
        return out / norm if norm else out

    def alike_to(self, texts: Sequence[str]) -> np.ndarray:
        """Return the cosine of a prompt with its answers and each prompt of the opinions, [prompts]."""
        place = _unit((self._vector(_words(texts)) - self._mean)[None] @ self._axes)[0]
        alike: np.ndarray = self._places @ place
        return alike


def _words(texts: Sequence[str]) -> np.ndarray:
    every = [features(text) for text in dict.fromkeys(texts)]
    return np.unique(np.concatenate([each.hashes[: each.num_words] for each in every]))


def _likeness(alike: np.ndarray) -> np.ndarray:
    """Return the prior's covariance of a taste under two prompts, from their cosine."""
    return _GENERAL + (1 - _GENERAL) * alike


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = rows / np.maximum(np.sqrt((rows**2).sum(1, keepdims=True)), 1e-9)
    return unit


def _mode(kernel: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior's dual weights and the likelihood's curvature there, by Newton's method."""
    n = len(weights)
    f, dual = np.zeros(n), np.zeros(n)
    value = -math.inf
    for _ in range(20):
        p = _sigmoid(f)
        root = np.sqrt(weights * p * (1 - p))
        b = root**2 * f + weights * (1 - p)
        inner = np.eye(n) + root[:, None] * kernel * root
        step = b - root * np.linalg.solve(inner, root * (kernel @ b)) - dual
        before = value
        for _ in range(12):
            f = kernel @ (dual + step)
            value = float(-weights @ np.logaddexp(0, -f) - (dual + step) @ f / 2)
            if value >= before - 1e-9:
                break
            step = step / 2
        dual = dual + step
        if value - before < 1e-3:
            break
    p = _sigmoid(f)
    return weights * (1 - p), weights * p * (1 - p)


def _sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))


def _moderated(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the mean of the logistic of a Gaussian (MacKay, The evidence framework, 1992)."""
    return _sigmoid(mean / np.sqrt(1 + math.pi * variance / 8))


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    norm = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / norm if norm else 0.0
