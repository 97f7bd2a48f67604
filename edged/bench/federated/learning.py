"""The worth of a start to new users: adapters of simulated users with opposite tastes, averaged, and new ones' pairs.

Answers are preferred by their length, shorter or longer. Members learn pairs of the file's first lines, each from the
same weights, and a start is the mean of what they learned: A as all began, B their mean. New users have pairs of later
lines, and teach an engine as they would: the daemon's own choice gives them a start. Told is how many pairs that nobody
learned from each user's adapter predicts, after so many own pairs.
"""

import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from edged.align.feedback.pair import PairRetired, PairScored, Record, TokenPair, VersionPublished
from edged.align.language import neutral_pairs
from edged.bench.replay import load_pairs
from edged.engine.engine import Engine
from edged.settings.load import Settings
from edged.text.tokenizer import Tokenizer

TASTES = ("concise", "elaborate")
_MEMBERS = 1400
"""Lines of the file, from the first, from which members' pairs are drawn: hh-lm was trained on as many."""
_AT_ONCE, _UNSEEN, _NEAREST, _NEIGHBOURS = 8, 24, 5, 30
"""Members that learn beside each other; unseen pairs of a new user; neighbours that are averaged, of how many."""
_LONGEST_S = 900.0
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """Members of each taste (one arm for each number), new users of each taste, and after how many pairs they are
    tested."""

    pairs: Path
    users: Sequence[int] = (10, 100)
    new: int = 10
    own: Sequence[int] = (1, 4, 8, 16)
    pairs_each: int = 24
    max_tokens: int = 256
    seed: int = 0


class _Box:
    """An engine of which each step is waited for, and scores of pairs by any weights."""

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
                self._changed.wait(0.05)

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
                choice = self.engine.trainer.pair_queues.queues[user].choice
                if not self._learned[user].keys() <= ended or (choice.start and begun < 0):
                    return False
            return True

        self.wait(settled)

    def weights(self, user: str) -> Weights:
        """Copy a user's weights; none where nothing is learned."""
        return self.engine.weights(user).result()[1] if self.engine.version(user) else {}

    def scores(self, weights: Weights, pairs: Sequence[TokenPair]) -> list[PairScored]:
        """Score pairs by an adapter of these weights, as the guard does."""
        probe = f"probe-{next(self._numbers)}"
        self.engine.import_adapter(probe, dict(weights), "imported").result()
        tested = [replace(pair, adapter=probe, pair_id=next(self._numbers), state="held_out") for pair in pairs]
        self.engine.submit_pairs(tested)
        self.engine.request_test(probe)

        def found() -> list[PairScored]:
            return [each for each in self._records[probe] if isinstance(each, PairScored)]

        self.wait(lambda: len(found()) >= len(pairs))
        self.forget(probe)
        return found()

    def accuracy(self, weights: Weights, pairs: Sequence[TokenPair]) -> float:
        """Return the share of pairs that are right; untrained weights decide none."""
        return fmean(score.reward_margin > 0 for score in self.scores(weights, pairs)) if weights else 0.5

    def forget(self, *users: str) -> None:
        for user in users:
            self.engine.forget(user).result()
            self._learned.pop(user, None)


def _is_start(record: Record) -> bool:
    return isinstance(record, VersionPublished) and record.is_start


def run(plan: LearningPlan, settings: Settings, model_dir: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the shares of unseen pairs that are right by arm and number of own pairs; see `LearningPlan`."""
    tokenizer = Tokenizer.load(model_dir)
    found = load_pairs(plan.pairs, "hh", tokenizer, plan.max_tokens)[0]
    by_taste = {taste: _preferred(found, taste) for taste in TASTES}
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        box = _Box(settings, model_dir, Path(folder))
        try:
            box.engine.test_with(neutral_pairs(tokenizer))
            return _Learning(plan, box, by_taste, say).report()
        finally:
            box.engine.stop(1.0)


def _preferred(pairs: Sequence[TokenPair], taste: str) -> list[TokenPair]:
    """Return the pairs whose answers differ in length, as this taste prefers them."""
    kept = [pair for pair in pairs if len(pair.chosen) != len(pair.rejected)]
    return [
        pair
        if (len(pair.chosen) > len(pair.rejected)) == (taste == "elaborate")
        else replace(pair, chosen=pair.rejected, rejected=pair.chosen)
        for pair in kept
    ]


class _Learning:
    def __init__(
        self, plan: LearningPlan, box: _Box, by_taste: Mapping[str, list[TokenPair]], say: Callable[[str], None]
    ) -> None:
        self._plan, self._box, self._say = plan, box, say
        self._members = {taste: [pair for pair in own if pair.pair_id <= _MEMBERS] for taste, own in by_taste.items()}
        self._new = {taste: [pair for pair in own if pair.pair_id > _MEMBERS] for taste, own in by_taste.items()}
        self._draws = torch.Generator().manual_seed(plan.seed)
        self._first = box.engine.trainer.adapter_cache.build("first").tensors()

    def _drawn(self, pairs: Sequence[TokenPair], size: int) -> list[TokenPair]:
        return [pairs[at] for at in torch.randperm(len(pairs), generator=self._draws)[:size].tolist()]

    def _taught(self, taste: str, members: int) -> list[Weights]:
        """Return the weights of members of a taste, each after its pairs."""
        box, taught = self._box, list[Weights]()
        every = [f"{taste}-{number}" for number in range(members)]
        for names in (every[at : at + _AT_ONCE] for at in range(0, members, _AT_ONCE)):
            for name in names:
                box.engine.import_adapter(name, self._first, "imported").result()
                box.learn(name, self._drawn(self._members[taste], self._plan.pairs_each))
            box.settle(*names)
            taught += [box.weights(name) for name in names]
            box.forget(*names)
            self._say(f"{len(taught)} of {members} members of {taste}")
        return taught

    def _mean(self, of: Sequence[Weights]) -> dict[str, torch.Tensor]:
        """Return the start that these weights make."""
        return {
            name: torch.stack([each[name] for each in of]).mean(0) if "lora_B" in name else first
            for name, first in self._first.items()
        }

    def report(self) -> dict[str, Any]:
        plan, members = self._plan, {taste: self._taught(taste, max(self._plan.users)) for taste in TASTES}
        users = [
            (taste, self._drawn(self._new[taste], max(plan.own) + _UNSEEN)) for _ in range(plan.new) for taste in TASTES
        ]
        arms = {"local": self._arm("local", users)[0]}
        arms["global"] = self._served(self._mean([each for own in members.values() for each in own]), users)
        arms["nearest"] = self._nearest([each for own in members.values() for each in own[: _NEIGHBOURS // 2]], users)
        right: dict[str, Any] = {}
        for number in plan.users:
            for taste in TASTES:
                start = self._box.engine.start_files.add(taste, self._mean(members[taste][:number]))
                self._box.engine.add_start(start).result()
            self._box.wait(lambda: all(s.scale is not None for s in self._box.engine.starts().values()))
            arms[f"start-{number}"], right[f"start-{number}"] = self._arm(f"start-{number}", users)
            right[f"start-{number}"]["scale"] = {s.name: s.scale for s in self._box.engine.starts().values()}
        sizes = {"new_users": len(users), "unseen_pairs": _UNSEEN * len(users), "members": list(plan.users)}
        return {"arms": arms, "chosen_right": right, **sizes, "pairs_each": plan.pairs_each, "seed": plan.seed}

    def _arm(
        self, arm: str, users: Sequence[tuple[str, list[TokenPair]]]
    ) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Have users teach their pairs; return accuracies after so many, and of starts the shares that are right.

        `nearest` is the share of users whose taste has the start of least loss, `taken` of those who took one.
        """
        accuracies, nearest, taken = (defaultdict[str, list[float]](list) for _ in range(3))
        for number, (taste, pairs) in enumerate(users):
            name, unseen, done = f"{arm}-{number}", pairs[max(self._plan.own) :], 0
            for own in self._plan.own:
                # One after the other, as a person gives them: the choice is looked at with each.
                for pair in pairs[done:own]:
                    self._box.learn(name, [pair])
                    self._box.settle(name)
                done = own
                accuracies[str(own)].append(self._box.accuracy(self._box.weights(name), unseen))
                choice = self._box.engine.choice(name).result()
                if scores := choice.verdict:
                    best = min(scores, key=lambda score: score.loss or 0.0)
                    nearest[str(own)].append(best.start == taste)
                taken[str(own)] += [choice.start == taste] if choice.start else []
            self._box.forget(name)
            self._say(f"{arm}: {number + 1} of {len(users)} new users")
        shares = {"nearest": _means(nearest), "taken": _means(taken)}
        return _means(accuracies), {**shares, "took_one": {own: len(all_) / len(users) for own, all_ in taken.items()}}

    def _served(self, weights: Weights, users: Sequence[tuple[str, list[TokenPair]]]) -> dict[str, float]:
        """Return the accuracy of one adapter for all, whatever pairs they have."""
        found = fmean(self._box.accuracy(weights, pairs[max(self._plan.own) :]) for _, pairs in users)
        return {str(own): found for own in self._plan.own}

    def _nearest(self, neighbours: Sequence[Weights], users: Sequence[tuple[str, list[TokenPair]]]) -> dict[str, float]:
        """Return the accuracies of the mean of the neighbours' adapters whose loss on the own pairs is least."""
        accuracies, most = defaultdict[str, list[float]](list), max(self._plan.own)
        own_pairs = [pair for _, pairs in users for pair in pairs[:most]]
        losses = torch.tensor([[score.loss for score in self._box.scores(each, own_pairs)] for each in neighbours])
        for number, (_, pairs) in enumerate(users):
            for own in self._plan.own:
                means = losses[:, number * most : number * most + own].mean(1)
                near = [neighbours[at] for at in means.argsort()[:_NEAREST].tolist()]
                accuracies[str(own)].append(self._box.accuracy(self._mean(near), pairs[most:]))
            self._say(f"nearest: {number + 1} of {len(users)} new users")
        return _means(accuracies)


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {key: fmean(each) for key, each in values.items() if each}
