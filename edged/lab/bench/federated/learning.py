"""The worth of a start to new users: adapters of simulated users with opposite tastes, averaged, and new ones' pairs.

Answers are preferred by their length, shorter or longer. Members learn pairs of the file's first lines, each from the
same weights, and a start is the mean of what they learned: A as all began, B their mean. New users have pairs of later
lines, and teach an engine as they would: the daemon's own choice gives them a start. Told is how many pairs that nobody
learned from each user's adapter predicts, after so many own pairs.

Members of starts, of `global` and of `nearest`, and all new users take real steps. Linearised (`linear.py`) are the
members of `auxo` and of the test of splits, of which hundreds learn many times, and which neighbours are nearest.
"""

import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from edged.align.feedback.pair import PairRetired, Record, TokenPair, VersionPublished
from edged.align.language import neutral_pairs
from edged.engine.engine import Engine
from edged.federated.averaging import B, mean
from edged.federated.clustering import find_split, heterogeneity
from edged.federated.privacy import clipped, noised, record_deviation
from edged.lab.bench.federated.auxo import LETTER, AuxoRun, LearningMember
from edged.lab.bench.federated.kept import Kept
from edged.lab.bench.federated.linear import TASTES, AnswerModel, LinearMembers, Weights, by_taste
from edged.lab.bench.replay import load_pairs
from edged.settings.load import Settings
from edged.store.data_dir import sha256_of
from edged.text.tokenizer import Tokenizer

_MEMBERS = 1400
"""Lines of the file, from the first, from which members' pairs are drawn: hh-lm was trained on as many."""
_AT_ONCE, _UNSEEN, _NEAREST, _NEIGHBOURS = 8, 24, 5, 30
"""Members that learn beside each other; unseen pairs of a new user; neighbours that are averaged, of how many."""
_CLIP = 0.4
"""The L2 norm to which a member's B is clipped: hh-lm's median."""
_SPLIT_UPDATES = 30
_LONGEST_S, _LOOK_S = 1800.0, 0.01


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """Members of each taste (one arm for each number), new users of each taste, and after how many pairs they are
    tested."""

    pairs: Path
    users: Sequence[int] = (10, 100)
    new: int = 10
    own: Sequence[int] = (1, 4, 8, 16)
    noise: float = 0.0
    """A campaign's noise (z): boxes add it so that the sum has z over the clip though half of them leave theirs out."""
    splits: int = 20
    """Seeds of the test of splits, and whether Auxo is played; 0: neither."""
    pairs_each: int = 24
    max_tokens: int = 256
    seed: int = 0


class _Box:
    """An engine of which each step is waited for."""

    def __init__(self, settings: Settings, model_dir: Path, folder: Path) -> None:
        self._changed = threading.Condition()
        self._records: dict[str, list[Record]] = defaultdict(list)
        self._learned: dict[str, dict[int, TokenPair]] = defaultdict(dict)
        self._numbers = count(1)
        self.engine = Engine.build(settings, model_dir, lambda _: None, self._take, folder)
        self.engine.start()

    def _take(self, records: list[Record]) -> None:
        with self._changed:
            for record in records:
                if hasattr(record, "adapter"):
                    self._records[record.adapter].append(record)
                if isinstance(record, VersionPublished) and record.is_start:
                    # As the daemon has it: on a start all is learned again.
                    again = [replace(pair, again=True) for pair in self._learned[record.adapter].values()]
                    self.engine.submit_pairs(again)
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _LONGEST_S
        with self._changed:
            while not done():
                if self.engine.error or time.monotonic() > end_s:
                    raise RuntimeError(f"the engine did not come to an end: {self.engine.error or 'it is too slow'}")
                self._changed.wait(_LOOK_S)

    def learn(self, user: str, pairs: Sequence[TokenPair]) -> None:
        """Submit a user's pairs; see `settle`."""
        own = [replace(pair, adapter=user, pair_id=next(self._numbers)) for pair in pairs]
        self._learned[user] |= {pair.pair_id: pair for pair in own}
        self.engine.submit_pairs(own)

    def settle(self, *users: str) -> None:
        """Wait until these users' pairs are learned, and no start is due."""

        def settled() -> bool:
            trials = self.engine.trainer.trials
            if trials.asked or trials.step is not None or trials.reading:
                return False
            for user in users:
                records = self._records[user]
                begun = max((at for at, each in enumerate(records) if _is_start(each)), default=-1)
                ended = {each.pair_id for each in records[begun + 1 :] if isinstance(each, PairRetired)}
                # The engine takes pairs in when it comes to it: a new user has no queue before.
                queue = self.engine.trainer.pair_queues.queues.get(user)
                waits = not self._learned[user].keys() <= ended
                if queue is None or waits or (queue.choice.start and begun < 0):
                    return False
            return True

        self.wait(settled)

    def weights(self, user: str) -> Weights:
        """Copy a user's weights; none where nothing is learned."""
        return self.engine.weights(user).result()[1] if self.engine.version(user) else {}

    def forget(self, *users: str) -> None:
        for user in users:
            self.engine.forget(user).result()
            self._learned.pop(user, None)
            self._records.pop(user, None)


def _is_start(record: Record) -> bool:
    return isinstance(record, VersionPublished) and record.is_start


def run(
    plan: LearningPlan, settings: Settings, model_dir: Path, say: Callable[[str], None], keep: Path | None = None
) -> dict[str, Any]:
    """Return the shares of unseen pairs that are right by arm and number of own pairs; see `LearningPlan`.

    What is computed is kept in the folder `keep`, from which the next run of the same plan goes on.
    """
    tokenizer = Tokenizer.load(model_dir)
    found = load_pairs(plan.pairs, "hh", tokenizer, plan.max_tokens)[0]
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        box = _Box(settings, model_dir, Path(folder) / "engine")
        try:
            box.engine.test_with(neutral_pairs(tokenizer))
            spec = box.engine.start_files.spec
            # Not of the plan: how many take part, which only adds results.
            about = {name: value for name, value in asdict(plan).items() if name not in ("users", "new", "splits")}
            about |= {"pairs": sha256_of(plan.pairs), "base": spec.fingerprint, "align": settings.align.model_dump()}
            return _Learning(plan, box, found, Kept(keep or Path(folder), about), model_dir, settings, say).report()
        finally:
            box.engine.stop(1.0)


@dataclass(frozen=True, slots=True)
class _NewUser:
    name: str
    taste: str
    own: list[TokenPair]
    unseen: list[TokenPair]


class _Learning:
    def __init__(
        self,
        plan: LearningPlan,
        box: _Box,
        pairs: Sequence[TokenPair],
        kept: Kept,
        model_dir: Path,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._box, self._kept, self._say = plan, box, kept, say
        # Answers of one length are no matter of these tastes.
        unlike = [pair for pair in pairs if len(pair.chosen) != len(pair.rejected)]
        self._pools = [[pair for pair in unlike if (pair.pair_id > _MEMBERS) == new] for new in (False, True)]
        first = box.engine.trainer.adapter_cache.build("first")
        self._first = first.tensors()
        self._model = AnswerModel(model_dir, first.form, self._first)
        self._linear = LinearMembers(self._model, kept, settings.align, say)
        self._users = [self._new_user(taste, number) for number in range(plan.new) for taste in TASTES]

    def _draw(self, name: str, taste: str, size: int, new: bool = False) -> list[TokenPair]:
        """Draw pairs by a name: whoever else takes part, they are the same."""
        drawn = random.Random(f"{self._plan.seed} {name}").sample(self._pools[new], size)
        return [by_taste(pair, taste) for pair in drawn]

    def _new_user(self, taste: str, number: int) -> _NewUser:
        name, most = f"new-{taste}-{number}", max(self._plan.own)
        drawn = self._draw(name, taste, most + _UNSEEN, new=True)
        return _NewUser(name, taste, drawn[:most], drawn[most:])

    def _taught(self, taste: str, members: int) -> list[torch.Tensor]:
        """Return the B of members of a taste, each after its pairs."""
        box, every = self._box, [f"{taste}-{number}" for number in range(members)]
        missing = [name for name in every if self._kept.tensor(name) is None]
        for names in (missing[at : at + _AT_ONCE] for at in range(0, len(missing), _AT_ONCE)):
            for name in names:
                box.engine.import_adapter(name, self._first, "imported").result()
                box.learn(name, self._draw(name, taste, self._plan.pairs_each))
            box.settle(*names)
            for name in names:
                self._kept.keep_tensor(name, self._model.flat(box.weights(name)))
            box.forget(*names)
            self._say(f"members: {names[-1]}")
        taught = [self._kept.tensor(name) for name in every]
        return [flat for flat in taught if flat is not None]

    def _start(self, of: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the start of these members."""
        return self._model.weights(mean_sent(of, self._plan.noise, self._plan.seed))

    def _accuracy(self, weights: Weights, pairs: Sequence[TokenPair]) -> float:
        """Return the share of pairs that are right; untrained weights decide none."""
        return float((self._model.margins(weights, pairs) > 0).float().mean()) if weights else 0.5

    def report(self) -> dict[str, Any]:
        plan, members = self._plan, {taste: self._taught(taste, max(self._plan.users)) for taste in TASTES}
        arms = {"local": self._arm("local", None)[0]}
        arms["global"] = self._served("global", self._start([each for own in members.values() for each in own]))
        arms["nearest"] = self._nearest([each for own in members.values() for each in own[: _NEIGHBOURS // 2]])
        right: dict[str, Any] = {}
        for number in plan.users:
            starts = {taste: members[taste][:number] for taste in TASTES}
            arms[f"start-{number}"], right[f"start-{number}"] = self._arm(f"start-{number}", starts)
        played = self._auxo(arms) if plan.splits else {}
        sizes = {"new_users": len(self._users), "unseen_pairs": _UNSEEN * len(self._users), "members": list(plan.users)}
        about = {"pairs_each": plan.pairs_each, "noise": plan.noise, "seed": plan.seed}
        linear = ["auxo", "auxo-split", "single", "which neighbours are nearest"]
        return {"arms": arms, "chosen_right": right, **played, **sizes, **about, "linearised": linear}

    def _arm(
        self, arm: str, starts: Mapping[str, Sequence[torch.Tensor]] | None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Have new users teach their pairs; return accuracies after so many, and of starts the shares that are right.

        `nearest` is the share of users whose taste has the start of least loss, `taken` of those who took one.
        """
        missing = [user for user in self._users if self._kept.figures(f"{arm} {user.name}") is None]
        if starts and missing:
            engine = self._box.engine
            for taste, of in starts.items():
                engine.add_start(engine.start_files.add(taste, self._start(of))).result()
            self._box.wait(lambda: all(start.scale is not None for start in engine.starts().values()))
            self._kept.keep_figures(f"{arm} scale", {start.name: start.scale for start in engine.starts().values()})
        for number, user in enumerate(missing):
            self._kept.keep_figures(f"{arm} {user.name}", self._teach(f"{arm}-{user.name}", user))
            self._say(f"{arm}: {number + 1} of {len(missing)} new users")
        found = [self._kept.figures(f"{arm} {user.name}") for user in self._users]
        means = {kind: _means([each[kind] for each in found]) for kind in ("accuracy", "nearest", "taken")}
        took = {str(own): fmean(str(own) in each["taken"] for each in found) for own in self._plan.own}
        return means.pop("accuracy"), {**means, "took_one": took, "scale": self._kept.figures(f"{arm} scale")}

    def _teach(self, name: str, user: _NewUser) -> dict[str, dict[str, float]]:
        """Have a new user teach; return by number of own pairs what is right then."""
        box, done = self._box, 0
        found: dict[str, dict[str, float]] = {"accuracy": {}, "nearest": {}, "taken": {}}
        for own in self._plan.own:
            # One after the other, as a person gives them: the choice is looked at with each.
            for pair in user.own[done:own]:
                box.learn(name, [pair])
                box.settle(name)
            done = own
            found["accuracy"][str(own)] = self._accuracy(box.weights(name), user.unseen)
            choice = box.engine.choice(name).result()
            if scores := choice.verdict:
                best = min(scores, key=lambda score: score.loss or 0.0)
                found["nearest"][str(own)] = float(best.start == user.taste)
            if choice.start:
                found["taken"][str(own)] = float(choice.start == user.taste)
        box.forget(name)
        return found

    def _served(self, arm: str, weights: Weights) -> dict[str, float]:
        """Return the accuracy of one adapter for all, whatever pairs they have."""
        found = fmean(self._accuracy(weights, user.unseen) for user in self._users)
        self._say(f"{arm}: {found:.3f}")
        return {str(own): found for own in self._plan.own}

    def _nearest(self, neighbours: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return the accuracies of the mean of the neighbours' adapters whose loss on the own pairs is least."""
        self._linear.add([pair for user in self._users for pair in user.own])
        accuracies = []
        for number, user in enumerate(self._users):
            ids, found = [pair.pair_id for pair in user.own], dict[str, float]()
            margins = torch.stack([self._linear.margins(flat, user.taste, ids) for flat in neighbours])
            losses = torch.nn.functional.softplus(-self._linear.beta * margins)
            for own in self._plan.own:
                near = losses[:, :own].mean(1).argsort()[:_NEAREST].tolist()
                found[str(own)] = self._accuracy(self._start([neighbours[at] for at in near]), user.unseen)
            accuracies.append(found)
            self._say(f"nearest: {number + 1} of {len(self._users)} new users")
        return _means(accuracies)

    def _member(self, name: str, taste: str) -> LearningMember:
        """Return a member whose steps are linearised."""
        pairs = self._draw(name, taste, self._plan.pairs_each)
        self._linear.add(pairs)
        return LearningMember(taste, tuple(pair.pair_id for pair in pairs))

    def _auxo(self, arms: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Play Auxo to the letter, and with a split whatever J says; test splits. Adds arms, returns the other figures.

        A new user takes part with the own pairs once, and is served the cohort of the highest reward then.
        """
        plan, figures = self._plan, dict[str, Any]()
        self._linear.add([pair for user in self._users for pair in user.own])
        members = [self._member(f"{taste}-{number}", taste) for number in range(max(plan.users)) for taste in TASTES]
        size = sum(own.numel() for name, own in self._first.items() if "lora_B" in name)
        for arm, threshold in (("auxo", LETTER), ("auxo-split", 1.0)):
            auxo = AuxoRun(self._linear, members, size, plan.seed, threshold)
            auxo.play()
            accuracies = []
            for user in self._users:
                found = {}
                for own in plan.own:
                    new = LearningMember(user.taste, tuple(pair.pair_id for pair in user.own[:own]))
                    found[str(own)] = self._accuracy(self._model.weights(auxo.cohort_of(new).flat), user.unseen)
                accuracies.append(found)
            arms[arm] = _means(accuracies)
            figures[arm] = {"cohorts": len(auxo.cohorts), "ratio": _spread(auxo.ratios), "needs": threshold}
            self._say(f"{arm}: {len(auxo.cohorts)} cohorts")
        return {"auxo": figures, "single": {kind: self._splits(kind) for kind in ("one", "two")}}

    def _splits(self, kind: str) -> dict[str, Any]:
        """Return how often updates that are seen singly split, of members of one taste or of two, and how purely."""
        tests, ratios = [], []
        for seed in range(self._plan.splits):
            tastes = [TASTES[number % 2 if kind == "two" else seed % 2] for number in range(_SPLIT_UPDATES)]
            own = [self._member(f"single {kind} {seed} {number}", taste) for number, taste in enumerate(tastes)]
            updates = torch.stack([self._linear.learn(each.taste, each.pairs) for each in own]).numpy()
            test = find_split(updates, np.random.default_rng(seed))
            assert test is not None
            same = fmean(TASTES[label] == taste for label, taste in zip(test.labels, tastes, strict=True))
            tests.append((test, max(same, 1 - same)))
            units = updates / np.linalg.norm(updates, axis=1, keepdims=True)
            gram, labels = units @ units.T, np.array(test.labels)
            ratios.append(heterogeneity(gram, labels) / heterogeneity(gram, np.zeros_like(labels)))
            self._say(f"single, {kind}: {seed + 1} of {self._plan.splits}")
        split = [purity for test, purity in tests if test.splits]
        return {
            "updates": _SPLIT_UPDATES,
            "seeds": len(tests),
            "splits": len(split),
            "z": _spread([test.z for test, _ in tests]),
            "needs": tests[0][0].least,
            "ratio": _spread(ratios),
            "purity": fmean(split) if split and kind == "two" else None,
        }


def mean_sent(of: Sequence[torch.Tensor], noise: float, seed: int) -> torch.Tensor:
    """Return the mean of members' B as boxes send them in a round of so many: clipped, each with its noise."""
    deviation, drawn = record_deviation(noise, _CLIP, len(of)), np.random.default_rng(seed).bytes
    sent = [noised(clipped({B: flat.numpy()}, _CLIP), deviation, drawn) for flat in of]
    return torch.from_numpy(mean(sent)[B])


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the rows that have it."""
    keys = sorted({key for row in rows for key in row}, key=int)
    return {key: fmean(row[key] for row in rows if key in row) for key in keys}


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return least, median and largest."""
    return min(values), median(values), max(values)
