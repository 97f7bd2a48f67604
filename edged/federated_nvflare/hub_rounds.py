"""A campaign's folder at the hub: its starts, the sum of the round under way, and who has the result. No NVFlare.

Each file is whole at any moment: it is written beside its place, synced, and moved there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edged.federated.averaging import moved, new_start, write_start
from edged.federated.campaign_file import CampaignFile, CampaignRefused, parse_campaign
from edged.federated.privacy import Tensors, norm
from edged.federated.records import FederatedRecord, RecordRefused, RoundFile, lora_shapes
from edged.federated.robust import AGGREGATES
from edged.federated_nvflare.encrypted_sum import Sealed, add
from edged.federated_nvflare.kits import SUM_PUBLIC_KEY

_MAX_BYTES = 1 << 28
_ROUNDING = 1.0 + 1e-4
"""Factor by which float32 may make a clipped record longer."""
_FACTS, _SUM, _JOB, _TOLD, _SEALED = "edged", "sum.safetensors", "job.json", "told.json", "sealed"


def campaign_of(meta: Mapping[str, Any]) -> CampaignFile:
    """Return the campaign that the meta data of an NVFlare job hold. Raises CampaignRefused."""
    props = meta.get("custom_props")
    table = props.get("edged") if isinstance(props, dict) else None
    if not isinstance(table, dict):
        raise CampaignRefused("the job has no campaign: submit it with `edged federated submit`")
    job = parse_campaign(table)
    if job.starts:
        raise CampaignRefused(
            f'campaign "{job.name}": "starts" of boxes are not taught on over a network yet: leave it out'
        )
    return job


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
    """The rounds of one campaign, in `root/NAME`. One process at a time writes it."""

    def __init__(self, root: Path, job: CampaignFile) -> None:
        """Open the folder, or make it. Raises CampaignRefused where it is of another campaign of this name, OSError."""
        self.job, self.folder = job, root / job.name
        self._key = root.parent / "startup" / SUM_PUBLIC_KEY
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._json("campaign.json")
        if known and known != job.table():
            raise CampaignRefused(f'campaign "{job.name}" is another one at this hub: give this one a name of its own')
        if not known:
            self._write("campaign.json", lambda path: path.write_text(json.dumps(job.table()), "utf-8"))

    @property
    def round(self) -> int:
        """The round under way: how many are complete."""
        return max((int(path.name.removeprefix("start-")) for path in self.folder.glob("start-*")), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether all rounds are complete."""
        return self.round >= self.job.rounds

    def sum(self) -> RunningSum:
        """Return what the round under way has; its nonce is kept when the hub starts anew."""
        path = self.folder / _SUM
        if path.exists():
            with safe_open(path, "np") as file:
                facts = json.loads(file.metadata()[_FACTS])
                if facts["round"] == self.round:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    sealed = [tensors.pop(name).tobytes() for name in sorted(tensors) if name.startswith(_SEALED)]
                    return RunningSum(**facts, sealed=sealed, tensors=tensors)
        return self._keep(RunningSum(self.round, secrets.token_hex(16), self.job.aggregation == "single"))

    def round_file(self) -> bytes:
        """Return what boxes are asked in the round under way."""
        start = load_file(self._start / "adapter_model.safetensors") if self.round else {}
        nonce = self.sum().nonce
        return RoundFile(job=self.job, round=self.round, nonce=nonce, start="", tensors=start).content()

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
        asked = (self.job.table(), so_far.round, so_far.nonce, "")
        if (record.job.table(), record.round, record.nonce, record.start) != asked:
            raise RecordRefused("it is of another round than the one under way")
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
        record_shapes = lora_shapes(done.shapes, done.form["inputs"])
        start = (
            load_file(self._start / "adapter_model.safetensors")
            if self.round
            else new_start(self.job.name, record_shapes)
        )
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
        for path in (*draft.iterdir(), draft):
            _sync(path)
        draft.rename(self.folder / f"start-{done.round + 1}")
        _sync(self.folder)
        (self.folder / _SUM).unlink()
        return True

    def responses_s(self) -> dict[str, float]:
        """Return after how many seconds each box of the last complete round answered."""
        path = self._start / "responses.json"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def start_files(self) -> dict[str, bytes]:
        """Return the newest start's files, whose B `sealed_start` moves."""
        config, weights = self._start / "adapter_config.json", self._start / "adapter_model.safetensors"
        return {"config": config.read_bytes(), "weights": weights.read_bytes()}

    def sealed_start(self) -> list[bytes]:
        """Return how far B of the newest start is moved, encrypted; nothing of single records, or before a round."""
        path = self._start / _SEALED
        tensors = load_file(path) if path.exists() else {}
        return [tensors[name].tobytes() for name in sorted(tensors)]

    @property
    def told(self) -> list[str]:
        """The boxes that have been given the last start, whether they took it or not."""
        return list(self._json(_TOLD).get("boxes", []))

    def tell(self, box: str) -> None:
        """Remember that a box has been given the last start."""
        boxes = sorted({*self.told, box})
        self._write(_TOLD, lambda path: path.write_text(json.dumps({"boxes": boxes}), "utf-8"))

    @property
    def nvflare(self) -> HubJob:
        """The NVFlare job that does the next round, as the scheduler remembers it."""
        return HubJob(**self._json(_JOB))

    def remember(self, job: HubJob) -> None:
        """Write what the scheduler remembers."""
        self._write(_JOB, lambda path: path.write_text(json.dumps(asdict(job)), "utf-8"))

    @property
    def _start(self) -> Path:
        return self.folder / f"start-{self.round}"

    def _keep(self, running: RunningSum) -> RunningSum:
        facts = json.dumps({name: getattr(running, name) for name in ("round", "nonce", "single", "boxes", "form")})
        tensors = {**running.tensors, **_as_bytes(running.sealed)}
        self._write(_SUM, lambda path: save_file(tensors, path, {_FACTS: facts}))
        return running

    def _json(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads((self.folder / name).read_text("utf-8")))
        return {}

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        draft = self.folder / f".{name}"
        write(draft)
        _sync(draft)
        os.replace(draft, self.folder / name)
        _sync(self.folder)


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


def _sync(path: Path) -> None:
    """Make a file or folder survive a power cut; that of `store` brings its database along, 70 MB."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
