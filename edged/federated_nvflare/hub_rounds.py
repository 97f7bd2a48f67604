"""A campaign's folder at the hub: its starts, the sums of the rounds under way, and who has the result. No NVFlare.

Each file is whole at any moment: it is written beside its place, synced, and moved there.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from edged.federated.averaging import moved, new_start, read_start, write_start
from edged.federated.campaign_file import CampaignFile, CampaignRefused, parse_campaign
from edged.federated.privacy import Tensors, norm
from edged.federated.records import FederatedRecord, RecordRefused, RoundFile, check_weights, lora_shapes
from edged.federated.robust import AGGREGATES
from edged.federated_nvflare.box_daemon import facts_of
from edged.federated_nvflare.encrypted_sum import Sealed, add
from edged.federated_nvflare.kits import SUM_PUBLIC_KEY
from edged.runtime.durable import sync, write_whole

STARTS = "starts"
"""Where a job's configuration has the named starts that it teaches on."""
_MAX_BYTES = 1 << 28
_ROUNDING = 1.0 + 1e-4
"""Factor by which float32 may make a clipped record longer."""
_FACTS, _SUM, _JOB, _TOLD, _SEALED = "edged", "sum.safetensors", "job.json", "told.json", "sealed"
_WEIGHTS = "adapter_model.safetensors"


def campaign_of(meta: Mapping[str, Any]) -> CampaignFile:
    """Return the campaign that the meta data of an NVFlare job hold. Raises CampaignRefused."""
    props = meta.get("custom_props")
    table = props.get("edged") if isinstance(props, dict) else None
    if not isinstance(table, dict):
        raise CampaignRefused("the job has no campaign: submit it with `edged federated submit`")
    return parse_campaign(table)


@dataclass(frozen=True, slots=True)
class RunningSum:
    """The records of a round under way: `boxes` says after how many seconds each came.

    `tensors` are with `single` they themselves, one after the other, in float32. Else they are zeros of one record's
    form, and `sealed` is the encrypted sum.
    """

    round: int
    nonce: str
    single: bool
    boxes: dict[str, float] = field(default_factory=dict)
    form: dict[str, Any] = field(default_factory=dict)
    sealed: Sealed = ()
    tensors: Tensors = field(default_factory=dict)

    def plus(self, box: str, response_s: float, record: FederatedRecord, sealed: Sealed, key: Path) -> RunningSum:
        """Return the sum with one more record, encrypted by `key` or single. Raises RecordRefused for another form."""
        form = record.form.model_dump()
        shapes = {name: own.shape for name, own in record.tensors.items()}
        if self.boxes and (form != self.form or shapes != self.shapes):
            raise RecordRefused("its form is another than that of the first record of the round")
        more = replace(self, boxes={**self.boxes, box: response_s}, form=form)
        if self.single:
            first = {name: own[:0] for name, own in record.tensors.items()} | dict(self.tensors)
            return replace(more, tensors={name: np.concatenate([first[name], record.tensors[name]]) for name in first})
        if not sealed or any(own.any() for own in record.tensors.values()):
            raise RecordRefused("it is not encrypted: its box has another edged, or another kit")
        try:
            total = add([self.sealed, sealed] if self.boxes else [sealed], key.read_bytes())
        except Exception as error:  # whatever TenSEAL makes of a stranger's bytes
            raise RecordRefused(f"its encrypted numbers cannot be added: {error}") from None
        return replace(more, tensors=record.tensors, sealed=total)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each tensor of a record."""
        each = len(self.boxes) if self.single else 1
        return {name: (len(own) // each, own.shape[1]) for name, own in self.tensors.items()}

    def mean(self, aggregate: str) -> dict[str, np.ndarray]:
        """Return the mean of single records, in float32, by the `aggregate` of this name."""
        number = len(self.boxes)
        updates = np.concatenate([own.reshape(number, -1) for own in self.tensors.values()], 1, dtype=np.float64)
        left, found = AGGREGATES[aggregate](updates), {}
        for name, shape in self.shapes.items():
            found[name] = left[: math.prod(shape)].reshape(shape).astype(np.float32)
            left = left[math.prod(shape) :]
        return found


class HubRounds:
    """The rounds of one start: of a campaign's new one in `root/NAME`, of a named one in `root/NAME/START`.

    One process at a time writes the folder.
    """

    def __init__(self, root: Path, job: CampaignFile, start: str = "") -> None:
        """Open the folder, or make it. Raises OSError."""
        self.job, self.start, self.folder = job, start, root / job.name / start
        self._key = root.parent / "startup" / SUM_PUBLIC_KEY
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        """The start's name on boxes: a new one is called as its campaign."""
        return self.start or self.job.name

    def begin_with(self, folder: Path) -> None:
        """Take a named start from a PEFT folder, before its first round. Raises OSError, ValueError, KeyError."""
        if self.start and not self._start.exists():
            draft = self.folder / "draft"
            write_start(draft, *read_start(folder))
            self._place(draft, 0)

    @property
    def round(self) -> int:
        """The round under way: how many are complete."""
        return max((int(path.name.removeprefix("start-")) for path in self.folder.glob("start-*")), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether all rounds are complete."""
        return self.round >= self.job.rounds

    @property
    def boxes(self) -> dict[str, float]:
        """After how many seconds each box of the round under way answered; the sum itself is not read."""
        return dict(self._facts().get("boxes", {}))

    def sum(self) -> RunningSum:
        """Return what the round under way has; its nonce is kept when the hub starts anew."""
        if facts := self._facts():
            tensors = load_file(self.folder / _SUM)
            sealed = [tensors.pop(name).tobytes() for name in sorted(tensors) if name.startswith(_SEALED)]
            return RunningSum(**facts, sealed=sealed, tensors=tensors)
        return self._keep(RunningSum(self.round, secrets.token_hex(16), self.job.aggregation == "single"))

    def round_file(self) -> bytes:
        """Return what boxes are asked in the round under way."""
        about: dict[str, Any] = {"job": self.job, "round": self.round, "nonce": self.sum().nonce, "start": self.start}
        return RoundFile(**about, tensors=self._weights()).content()

    def take(self, box: str, content: bytes, response_s: float, sealed: Sealed = ()) -> int:
        """Count a box's record, whose numbers are `sealed` or single, and return how many are on disk.

        Raises RecordRefused, CampaignRefused for what is none of this round, OSError.
        """
        so_far = self.sum()
        if box in so_far.boxes:
            raise RecordRefused(f'a record of "{box}" is in the sum already')
        path = self.folder / "incoming.safetensors"
        path.write_bytes(content)
        try:
            record = FederatedRecord.read(path, _MAX_BYTES)
        finally:
            path.unlink()
        asked = (self.job.table(), so_far.round, so_far.nonce, self.start)
        if (record.job.table(), record.round, record.nonce, record.start) != asked:
            raise RecordRefused("it is of another round than the one under way")
        if weights := self._weights():
            check_weights(weights, record.shapes)
        clip = self.job.clip
        if clip is not None and not self.job.noise and norm(record.tensors) > clip * _ROUNDING:
            raise RecordRefused(f"its norm is over the clip of {clip:g}")
        return len(self._keep(so_far.plus(box, response_s, record, sealed, self._key)).boxes)

    def close(self) -> bool:
        """End the round where enough boxes have answered, and tell whether they had: start' = start + mean.

        The mean of a sum stays encrypted, beside the start that it moves.
        """
        done = self.sum()
        if len(done.boxes) < self.job.threshold:
            return False
        start = self._weights() or new_start(self.job.name, lora_shapes(done.shapes, done.form["inputs"]))
        draft = self.folder / "draft"
        draft.mkdir(exist_ok=True)
        if done.single:
            start = moved(start, done.mean(self.job.aggregate))
        else:
            key, former = self._key.read_bytes(), self.sealed_start()
            mean = add([done.sealed], key, 1.0 / len(done.boxes))
            save_file(_as_bytes(add([mean, former], key) if former else mean), draft / _SEALED)
        write_start(draft, start, done.form["alpha"])
        (draft / "responses.json").write_text(json.dumps(done.boxes), "utf-8")
        self._place(draft, done.round + 1)
        (self.folder / _SUM).unlink()
        return True

    def responses_s(self) -> dict[str, float]:
        """Return after how many seconds each box of the last complete round answered."""
        path = self._start / "responses.json"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def start_file(self) -> dict[str, Any]:
        """Return the newest start for boxes: its files, whose B `sealed` moves."""
        config, weights = self._start / "adapter_config.json", self._start / _WEIGHTS
        files = {"config": config.read_bytes(), "weights": weights.read_bytes()}
        return {"name": self.name, "sealed": self.sealed_start(), **files}

    def sealed_start(self) -> list[bytes]:
        """Return how far B of the newest start is moved, encrypted; nothing of single records, or before a round."""
        path = self._start / _SEALED
        tensors = load_file(path) if path.exists() else {}
        return [tensors[name].tobytes() for name in sorted(tensors)]

    @property
    def _start(self) -> Path:
        return self.folder / f"start-{self.round}"

    def _facts(self) -> dict[str, Any]:
        """Return what the file of the round under way tells beside its tensors; nothing before there is one."""
        path = self.folder / _SUM
        facts: dict[str, Any] = json.loads(safe_open(path, "np").metadata()[_FACTS]) if path.exists() else {}
        return facts if facts.get("round") == self.round else {}

    def _keep(self, running: RunningSum) -> RunningSum:
        facts = json.dumps({name: getattr(running, name) for name in ("round", "nonce", "single", "boxes", "form")})
        tensors = {**running.tensors, **_as_bytes(running.sealed)}
        write_whole(self.folder / _SUM, save(tensors, {_FACTS: facts}))
        return running

    def _weights(self) -> dict[str, np.ndarray]:
        """Return the newest start; nothing before the first round of a new one."""
        return load_file(self._start / _WEIGHTS) if self._start.exists() else {}

    def _place(self, draft: Path, number: int) -> None:
        """Make a draft the start after so many rounds."""
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.rename(self.folder / f"start-{number}")
        sync(self.folder)


class HubCampaign:
    """A campaign at the hub, in `root/NAME`: the rounds of its starts, of which a box takes part in one at a time."""

    def __init__(self, root: Path, job: CampaignFile) -> None:
        """Open the folder, or make it. Raises CampaignRefused where it is of another campaign of this name, OSError."""
        self.job, self.folder = job, root / job.name
        self.rounds = [HubRounds(root, job, start) for start in job.starts or ("",)]
        known = self._json("campaign.json")
        if known and known != job.table():
            raise CampaignRefused(f'campaign "{job.name}" is another one at this hub: give this one a name of its own')
        if not known:
            write_whole(self.folder / "campaign.json", json.dumps(job.table()))

    @property
    def open(self) -> list[HubRounds]:
        """The starts whose rounds are not all complete."""
        return [rounds for rounds in self.rounds if not rounds.is_complete]

    @property
    def is_complete(self) -> bool:
        """Whether all rounds of all starts are complete."""
        return not self.open

    @property
    def round(self) -> int:
        """How many rounds of all starts are complete."""
        return min(rounds.round for rounds in self.rounds)

    @property
    def counted(self) -> list[str]:
        """The boxes whose records are in the rounds under way."""
        return [box for rounds in self.open for box in rounds.boxes]

    @property
    def missing(self) -> int:
        """Records that are wanted by the start that lacks most."""
        return max((self.job.demand - len(rounds.boxes) for rounds in self.open), default=0)

    def take(self, box: str, content: bytes, response_s: float, sealed: Sealed = ()) -> None:
        """Count a box's record for its start.

        Raises RecordRefused, CampaignRefused for what is none of a round under way, OSError, and ValueError, KeyError,
        TypeError for what is no record.
        """
        start = facts_of(content)["start"]
        asked = next((rounds for rounds in self.open if rounds.start == start), None)
        if asked is None:
            raise RecordRefused("it is of a start whose round is not under way")
        asked.take(box, content, response_s, sealed)

    def responses_s(self) -> dict[str, float]:
        """Return after how many seconds boxes answered in the last complete rounds."""
        return {box: took_s for rounds in self.rounds for box, took_s in rounds.responses_s().items()}

    @property
    def told(self) -> list[str]:
        """The boxes that have been given the last starts, whether they took them or not."""
        return list(self._json(_TOLD).get("boxes", []))

    def tell(self, box: str) -> None:
        """Remember that a box has been given the last starts."""
        boxes = sorted({*self.told, box})
        write_whole(self.folder / _TOLD, json.dumps({"boxes": boxes}))

    @property
    def nvflare(self) -> HubJob:
        """The NVFlare job that does the next round, as the scheduler remembers it."""
        return HubJob(**self._json(_JOB))

    def remember(self, job: HubJob) -> None:
        """Write what the scheduler remembers."""
        write_whole(self.folder / _JOB, json.dumps(asdict(job)))

    def _json(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads((self.folder / name).read_text("utf-8")))
        return {}


@dataclass(frozen=True, slots=True)
class HubJob:
    """An NVFlare job of a campaign; `failures` are those in a row that ended with an error, `is_over` ends it all."""

    id: str = ""
    failures: int = 0
    pause_s: float = 0.0
    """Seconds that the next one waits, since boxes gave nothing the last time."""
    is_over: bool = False


def _as_bytes(sealed: Sealed) -> dict[str, np.ndarray]:
    """Return ciphertexts as tensors of a safetensors file, in order of their names."""
    return {f"{_SEALED}.{at:06}": np.frombuffer(piece, np.uint8) for at, piece in enumerate(sealed)}
