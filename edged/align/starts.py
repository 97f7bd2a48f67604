"""Starts: adapters of people alike that users may begin with, their files, and the choice of one by a user's pairs."""

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from edged.align.adapters.adapter import AdapterError, AdapterFiles, Snapshot
from edged.align.feedback.pair import IMPORT_REASONS, START_REASON, PairScored, TokenPair
from edged.runtime.chance import by_chance
from edged.runtime.durable import sync
from edged.store.timestamps import utc_now, utc_text

log = logging.getLogger("edged.align")
START_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Factors of B that are tried: a mean over users is shorter than what each of them learns."""
MIN_PAIRS, MAX_PAIRS = 4, 32
"""Own pairs from which on a start is chosen, and up to which it is looked at anew with each."""
_MAX_LEARNED, _REST = 256, 32
"""Pairs beyond which a user's adapter is left alone, and for which a start rests that was taken back."""
_CHANCE = 0.15
"""Highest probability that so many pairs are right by chance at which a start is taken."""
_FACTS = "start.json"


@dataclass(frozen=True, slots=True)
class Start:
    """A start: `scale` is the factor of B with which it is used, 0 where it breaks the language, None before that is
    measured."""

    name: str
    version: int
    added_at: str
    scale: float | None = None


class StartFiles(AdapterFiles):
    """The starts on disk under `root`, each as the only version of an adapter of its name."""

    def catalogue(self) -> dict[str, Start]:
        """Return the whole starts of the settings' form by name; of others the log has the reason."""
        found = {}
        for name in self.adapters():
            version = self.versions(name)[-1]
            try:
                facts = json.loads((self.check(name, version) / _FACTS).read_text("utf-8"))
                found[name] = Start(name, version, str(facts["added_at"]), facts["scale"])
            except (AdapterError, OSError, ValueError, KeyError) as error:
                log.warning('start "%s" is not used: %s', name, error)
        return found

    def shelved(self, used: Collection[str]) -> list[str]:
        """Return the names of starts that are on disk and not `used`: of another base model, or of another form."""
        return sorted({folder.name for folder in self.root.parent.glob("*/*/") if folder.name not in used})

    def add(self, name: str, weights: dict[str, torch.Tensor]) -> Start:
        """Write a start, in place of one of its name. Raises OSError."""
        version = max(self.versions(name), default=0) + 1
        self.save(Snapshot(name, version, weights, {}, self.spec.form))
        return self.remember(Start(name, version, utc_text(utc_now())))

    def remember(self, start: Start) -> Start:
        """Write what is known of a start beside its weights; returns it. Raises OSError."""
        folder = self.path(start.name, start.version)
        # Beside the version, which a backup copies as it is.
        draft = folder.parent / f".{_FACTS}.draft"
        draft.write_text(json.dumps(asdict(start)), "utf-8")
        sync(draft)
        os.replace(draft, folder / _FACTS)
        sync(folder)
        return start

    def remove(self, name: str) -> None:
        """Delete a start. Raises OSError."""
        self.hide(name)
        self.forget(name)

    def weights(self, start: Start, scale: float) -> dict[str, torch.Tensor]:
        """Read a start's weights, B times `scale`. Raises AdapterError."""
        found = self.load(start.name, start.version).weights
        return {name: own * scale if name.endswith("lora_B.weight") else own for name, own in found.items()}


@dataclass(frozen=True, slots=True)
class StartScore:
    """A start's score by a user's pairs: `right` of `pairs`, the mean loss, and why it is taken or not."""

    start: str
    scale: float | None
    pairs: int = 0
    right: float = 0.0
    loss: float | None = None
    note: str = ""
    taken: bool = False


@dataclass(slots=True)
class StartChoice:
    """A user's choice of a start: the scores of own pairs, and the start with which the user's adapter began."""

    learned: int = 0
    """Number of own pairs that were learned or tested."""
    margins: dict[int, float] = field(default_factory=dict)
    """Reward margin of the latest pairs by the user's own adapter, before it had learned them."""
    scores: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """(Loss in nats, reward margin) of pairs by each start."""
    scored: set[str] = field(default_factory=set)
    """Starts that were judged once."""
    verdict: list[StartScore] = field(default_factory=list)
    """How starts were judged last."""
    own: float = 0.0
    """Pairs that the own adapter had right then."""
    start: str = ""
    since: int = 0
    """The version with which the adapter began as `start`."""
    imported: int = 0
    """The version that came from elsewhere: such adapters are left alone, as those of jobs are; 0: none."""
    rests: dict[str, int] = field(default_factory=dict)
    """Value of `learned` from which on a start that was taken back may be taken again."""

    def take_scores(self, scores: Iterable[PairScored]) -> None:
        """Take in the own adapter's scores of pairs that it had not learned."""
        for score in scores:
            if score.split == "prequential" and not score.rating:
                self.learned += score.pair_id not in self.margins
                self.margins[score.pair_id] = score.reward_margin
        for pair_id in list(self.margins)[:-MAX_PAIRS]:
            del self.margins[pair_id]
            for each in self.scores.values():
                each.pop(pair_id, None)

    def take_version(self, version: int, reason: str, restored: int | None, learned: int | None = None) -> None:
        """Take in a version that no step made, in their order; `learned` pairs were known then, by default all."""
        if reason.startswith(START_REASON):
            self.start, self.since = reason.removeprefix(START_REASON), version
        elif reason in IMPORT_REASONS:
            self.start, self.imported = "", version
        elif restored is not None:
            if self.start and restored < self.since:
                self.rests[self.start] = (self.learned if learned is None else learned) + _REST
                self.start = ""
            self.imported = self.imported if restored >= self.imported else 0

    @property
    def left_alone(self) -> str:
        """Why no start is taken whatever the pairs say, or ""."""
        if self.imported:
            return "an imported adapter is left alone"
        return f"a user with over {_MAX_LEARNED} learned pairs is left alone" if self.learned > _MAX_LEARNED else ""

    def due(self, starts: Iterable[Start]) -> bool:
        """Whether starts are to be scored on the pairs: up to MAX_PAIRS with each, then where one never was."""
        usable = [start.name for start in starts if start.scale]
        news = self.learned <= MAX_PAIRS or not self.scored.issuperset(usable)
        return bool(usable) and news and len(self.margins) >= MIN_PAIRS and not self.left_alone

    def judge(self, starts: Sequence[Start]) -> str:
        """Judge the starts on the pairs that all of them were scored on; return the one to take, or "".

        It is that of least mean loss, where it is right on more pairs than chance would be, and than the user's own
        adapter was.
        """
        usable = [start for start in starts if start.scale]
        known = [pair for pair in self.margins if all(pair in self.scores.get(s.name, ()) for s in usable)]
        self.own, self.scored = sum(_right(self.margins[pair]) for pair in known), {start.name for start in usable}
        found = []
        for start in usable if known else ():
            losses, margins = zip(*(self.scores[start.name][pair] for pair in known), strict=True)
            right, loss = sum(map(_right, margins)), sum(losses) / len(losses)
            found.append(StartScore(start.name, start.scale, len(known), right, loss))
        best = min(found, key=lambda score: score.loss or 0.0, default=None)
        self.verdict = [self._noted(score, best) for score in found]
        return next((score.start for score in self.verdict if score.taken), "")

    def _noted(self, score: StartScore, best: StartScore | None) -> StartScore:
        rest = self.rests.get(score.start, 0) - self.learned
        if score.start == self.start:
            note = "the user's adapter began with it"
        elif self.left_alone:
            note = self.left_alone
        elif best is None or score.pairs < MIN_PAIRS:
            note = f"{score.pairs} pairs are scored: a start is chosen by {MIN_PAIRS} or more"
        elif score.start != best.start:
            note = f"{best.start} fits better"
        elif rest > 0:
            note = f"it was taken back, and rests for {rest} pairs"
        elif by_chance(score.right, score.pairs) > _CHANCE:
            note = "chance may be right on as many"
        elif score.right <= self.own:
            note = f"the user's own adapter was right on {self.own:g}"
        else:
            return replace(score, note="it fits", taken=True)
        return replace(score, note=note)


def _right(margin: float) -> float:
    """How far a pair is right: an untrained adapter's margin is 0 everywhere, neither right nor wrong."""
    return 0.5 if margin == 0 else float(margin > 0)


def neutral_as_pairs(neutral: Sequence[TokenPair]) -> list[TokenPair]:
    """Return neutral text as pairs whose KL to the base is measured, too: their ids are positive."""
    return [replace(pair, pair_id=-pair.pair_id, ref_chosen_logp=None) for pair in neutral]
