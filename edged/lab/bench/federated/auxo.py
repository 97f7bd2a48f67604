"""Auxo's cohorts to the letter (dissertation 3.4, Algorithm 2): what edged leaves out, measured beside what it does.

Members take part in many rounds; their steps are linearised. Where the paper contradicts itself: a member explores
with probability epsilon^r (line 27 has the reverse), and ExploreReward shares the reward R, as 3.4.3 has it. Figure 3.7
shares the latest one, which gamma has not scaled: whoever does not fit would like all others even less.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edged.federated.clustering import heterogeneity, two_means
from edged.lab.bench.federated.linear import LinearMembers

ROUNDS, PARTICIPANTS = 20, 12
_EPSILON, _DECAY, _KIN = 0.9, 0.2, 0.1
"""Exploration, whose start the paper does not tell; gamma of rewards; the advantage of the own sub-cohort (line 20)."""
_MAX_COHORTS, _MIN_MEMBERS = 4, 2
LETTER = 2**-0.5
"""J after a split over J before it at which two cohorts are made: 1 / sqrt(K), K = 2 (Lemma 1)."""
Path = tuple[int, ...]
"""The way to a cohort in their tree: 0 or 1 at each split."""


@dataclass(frozen=True, slots=True)
class LearningMember:
    """A member: the ids of the pairs that it learns in each round, as its taste prefers them."""

    taste: str
    pairs: tuple[int, ...]


@dataclass(slots=True)
class Cohort:
    """A cohort: its weights, and what its latest round says of who fits it."""

    path: Path
    flat: torch.Tensor
    centre: torch.Tensor
    bound: float = 1.0
    """Distance to the centre beyond which a member is an outlier: avg(D) + std(D)."""
    labels: dict[int, int] = field(default_factory=dict)
    """Cluster of each member that took part (L)."""


class AuxoRun:
    """A run of Auxo over members; `ratios` has J after over J before, of each round's clusters."""

    def __init__(
        self, linear: LinearMembers, members: Sequence[LearningMember], size: int, seed: int, threshold: float = LETTER
    ) -> None:
        self._linear, self._members, self._threshold = linear, members, threshold
        self._chance, self._draws = random.Random(f"auxo {seed}"), np.random.default_rng(seed)
        self._rewards: list[defaultdict[Path, float]] = [defaultdict(float) for _ in members]
        self._explored: list[set[Path]] = [set() for _ in members]
        self.cohorts: dict[Path, Cohort] = {(): Cohort((), torch.zeros(size), torch.zeros(size))}
        """The leaves of the tree."""
        self.ratios: list[float] = []

    def play(self) -> None:
        """Play all rounds."""
        for number in range(1, ROUNDS + 1):
            groups: defaultdict[Path, list[int]] = defaultdict(list)
            for member in self._chance.sample(range(len(self._members)), min(PARTICIPANTS, len(self._members))):
                groups[self._select(self._rewards[member], _EPSILON**number)].append(member)
            for path, group in sorted(groups.items()):
                self._train(self.cohorts[path], group, number)

    def _select(self, rewards: dict[Path, float], explore: float) -> Path:
        """Return a cohort by chance with probability `explore`, else that of the highest reward (CohortSelection)."""
        leaves = sorted(self.cohorts)
        if self._chance.random() < explore:
            return self._chance.choice(leaves)
        # Who has no preference goes anywhere.
        return max(leaves, key=lambda path: (rewards.get(path, 0.0), self._chance.random()))

    def _train(self, cohort: Cohort, group: Sequence[int], number: int) -> None:
        """Train a cohort for a round, cluster its participants, split it where J falls enough, and give rewards."""
        moved = torch.stack([self._learn(self._members[member], cohort) for member in group])
        units = _unit(moved)
        cohort.flat = cohort.flat + moved.mean(0)
        self._cluster(cohort, group, units)
        gram = (units @ units.T).double().numpy()
        labels = np.array([cohort.labels.get(member, 0) for member in group])
        before = heterogeneity(gram, np.zeros(len(group), np.int64))
        ratio = heterogeneity(gram, labels) / before if before > 0 else 1.0
        self.ratios.append(ratio)
        enough = min(labels.sum(), len(labels) - labels.sum()) >= _MIN_MEMBERS
        # Not at the beginning of the training, and not at its end (3.4.4).
        in_time = ROUNDS / 4 < number < 3 * ROUNDS / 4
        if ratio <= self._threshold and enough and in_time and len(self.cohorts) < _MAX_COHORTS:
            self._split(cohort)
        known = [self._rewards[member].get(cohort.path, 0.0) > 0 for member in group]
        cohort.centre = units[torch.tensor(known)].mean(0) if any(known) else units.mean(0)
        apart = (units - cohort.centre).norm(dim=1)
        cohort.bound = float(apart.mean() + apart.std(correction=0)) or 1.0
        if cohort.path in self.cohorts and len(self.cohorts) > 1:
            for member, distance in zip(group, apart.tolist(), strict=True):
                self._explored[member].add(cohort.path)
                self._reward(self._rewards[member], cohort, distance, self._explored[member])

    def _learn(self, member: LearningMember, cohort: Cohort) -> torch.Tensor:
        return self._linear.learn(member.taste, member.pairs, cohort.flat)

    def _cluster(self, cohort: Cohort, group: Sequence[int], units: torch.Tensor) -> None:
        """Label participants: by K-means at first, then by the nearer mean of those with labels (lines 13-17)."""
        rows = [[at for at, member in enumerate(group) if cohort.labels.get(member) == label] for label in (0, 1)]
        if all(rows):
            centres = torch.stack([units[own].mean(0) for own in rows])
            found = torch.cdist(units, centres).argmin(1).tolist()
        elif cohort.labels or len(group) < 2:
            # One of the two has nobody here: its mean is not known in this round.
            return
        else:
            found = two_means((units @ units.T).double().numpy(), self._draws).tolist()
        cohort.labels.update(zip(group, found, strict=True))

    def _split(self, cohort: Cohort) -> None:
        """Make two cohorts of one, which begin with its weights (l. 19-20)."""
        del self.cohorts[cohort.path]
        for label in (0, 1):
            path = (*cohort.path, label)
            self.cohorts[path] = Cohort(path, cohort.flat.clone(), cohort.centre.clone(), cohort.bound)
            for member, rewards in enumerate(self._rewards):
                rewards[path] = rewards[cohort.path] + _KIN * (cohort.labels.get(member) == label)

    def _reward(self, rewards: dict[Path, float], cohort: Cohort, distance: float, explored: Collection[Path]) -> None:
        """Add the reward for this distance to the cohort's centre; cohorts not explored yet get a share by kinship."""
        fit = 1.0 - distance / cohort.bound
        own = rewards[cohort.path] = _DECAY * fit + (1 - _DECAY) * rewards.get(cohort.path, 0.0)
        for path in self.cohorts.keys() - {cohort.path, *explored}:
            apart = len(cohort.path) - len(_common(path, cohort.path))
            rewards[path] = rewards.get(path, 0.0) + own / (apart + 1)

    def cohort_of(self, member: LearningMember) -> Cohort:
        """Return the cohort of a new member: that of the best reward after one round in a cohort by chance."""
        rewards: dict[Path, float] = {}
        tried = self.cohorts[self._select(rewards, 1.0)]
        if len(self.cohorts) > 1:
            unit = _unit(self._learn(member, tried)[None])[0]
            self._reward(rewards, tried, float((unit - tried.centre).norm()), ())
        return self.cohorts[self._select(rewards, 0.0)]


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of length 1: the paper compares updates by their cosine."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _common(one: Path, other: Path) -> Path:
    """Return the way that two cohorts have in common."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
