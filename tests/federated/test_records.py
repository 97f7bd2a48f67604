"""Round files and records: there and back, and refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edged.federated.averaging import A, B
from edged.federated.campaign_file import CampaignRefused, parse_campaign
from edged.federated.records import (
    FederatedRecord,
    HeldOutCounts,
    RecordForm,
    RecordRefused,
    RoundFile,
    check_together,
    check_weights,
    fingerprint,
)

LINEAR = "base_model.model.model.layers.0.mlp.up_proj"
SHAPES = {LINEAR + A: (2, 5), LINEAR + B: (3, 2)}
MODEL = fingerprint("base", 4.0, SHAPES)
TABLE: dict[str, Any] = {"name": "tone", "model": MODEL, "rank": 2, "demand": 3}
JOB = parse_campaign(TABLE)
MOST = 1 << 20


def record(**more: Any) -> FederatedRecord:
    form = RecordForm(alpha=4.0, inputs={LINEAR: 5})
    about = {"job": JOB, "round": 0, "nonce": "ab" * 16, "start": "", "base": MODEL, "mode": "sum", "pairs": 12}
    about |= {"held_out": HeldOutCounts(pairs=4, right=3, right_before=2.5), "epsilon": None, "form": form}
    tensors = {LINEAR + B: np.arange(6, dtype=np.float32).reshape(3, 2)}
    return FederatedRecord(**{**about, "tensors": tensors, **more})  # type: ignore[arg-type]


def asked(**more: Any) -> RoundFile:
    tensors = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    return RoundFile(**{"job": JOB, "round": 2, "nonce": "cd" * 16, "start": "", "tensors": tensors, **more})


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_record_goes_there_and_back(tmp_path: Path) -> None:
    for one in (record(), record(held_out=None, epsilon=4.0)):
        found = FederatedRecord.read(written(tmp_path / "one", one.content()), MOST)
        assert {**vars_of(found), "tensors": None} == {**vars_of(one), "tensors": None}
        np.testing.assert_array_equal(found.tensors[LINEAR + B], one.tensors[LINEAR + B])
        assert found.shapes == SHAPES
        assert found.sha256 == one.sha256


def vars_of(one: FederatedRecord | RoundFile) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_a_record_has_nothing_else_in_it(tmp_path: Path) -> None:
    content = record().content()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.keys() == {"__metadata__", LINEAR + B}
    assert len(content) == 8 + size + 4 * 6
    facts = json.loads(header["__metadata__"]["edged"])
    assert facts.keys() == {"job", "round", "nonce", "start", "base", "mode", "pairs", "held_out", "form"}


def test_a_round_file_goes_there_and_back(tmp_path: Path) -> None:
    for one in (asked(), asked(tensors={})):
        found = RoundFile.read(written(tmp_path / "one", one.content()), MOST)
        assert {**vars_of(found), "tensors": found.tensors.keys()} == {**vars_of(one), "tensors": one.tensors.keys()}


def with_facts(path: Path, tensors: dict[str, np.ndarray], **facts: Any) -> Path:
    told = {"job": TABLE, "round": 0, "nonce": "ab" * 16, "start": "", **facts}
    save_file(tensors, path, {"edged": json.dumps(told)})
    return path


ONE = {LINEAR + A: np.ones((2, 5), np.float32), LINEAR + B: np.ones((3, 2), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "facts", "told"),
    [
        ({LINEAR + B: np.full((3, 2), np.nan, np.float32)}, {}, "not finite"),
        ({LINEAR + B: np.ones((3, 2), np.float16)}, {}, "none of a LoRA's matrices in float32"),
        ({LINEAR + B: np.ones(3, np.float32)}, {}, "none of a LoRA's matrices in float32"),
        ({"model.embed": np.ones((3, 2), np.float32)}, {}, '"model.embed" is none of a LoRA'),
        (ONE, {"more": 1}, "more: Extra inputs are not permitted"),
        (ONE, {"nonce": "x"}, "nonce: "),
        (ONE, {"round": -1}, "round: "),
        (ONE, {"start": "../x"}, "start: "),
        (ONE, {"start": "concise"}, 'campaign "tone" has no start "concise": it has none, but a new one'),
    ],
)
def test_a_round_file_that_is_none_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, np.ndarray], facts: dict[str, Any], told: str
) -> None:
    with pytest.raises(RecordRefused) as refused:
        RoundFile.read(with_facts(tmp_path / "one", tensors, **facts), MOST)
    assert told in str(refused.value)


def test_what_is_no_file_of_a_round_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", b"\x80\x04", (1 << 40).to_bytes(8, "little") + b"{}"):
        with pytest.raises(RecordRefused, match="cannot be read"):
            RoundFile.read(written(tmp_path / "one", content), MOST)
    with pytest.raises(RecordRefused, match="cannot be read"):
        RoundFile.read(tmp_path / "none", MOST)
    save_file(ONE, tmp_path / "plain")
    with pytest.raises(RecordRefused, match="its metadata"):
        RoundFile.read(tmp_path / "plain", MOST)
    with pytest.raises(RecordRefused, match=r"federated\.max_update_mb allows 10"):
        RoundFile.read(written(tmp_path / "one", asked().content()), 10)
    with pytest.raises(CampaignRefused, match='"demand" = 0'):
        RoundFile.read(with_facts(tmp_path / "two", ONE, job={**TABLE, "demand": 0}), MOST)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tensors": ONE}, "B of each linear, and nothing else"),
        ({"tensors": {}}, "B of each linear, and nothing else"),
        ({"form": RecordForm(alpha=4.0, inputs={LINEAR: 5, "x": 3})}, "other linears"),
        ({"mode": "single"}, "another model or mode"),
        ({"base": "12" * 16}, "another model or mode"),
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    with pytest.raises(RecordRefused, match=told):
        FederatedRecord.read(written(tmp_path / "one", record(**more).content()), MOST)


def test_only_records_of_one_sum_are_averaged() -> None:
    other = record(tensors={LINEAR + B: np.zeros((3, 2), np.float32)})
    check_together({"a": record(), "b": other})
    with pytest.raises(RecordRefused, match="b and a are the same record"):
        check_together({"a": record(), "b": record()})
    for field, value in (
        ("round", 1),
        ("job", parse_campaign({**TABLE, "demand": 4})),
        ("form", RecordForm(alpha=8.0, inputs={LINEAR: 5})),
    ):
        with pytest.raises(RecordRefused, match=f"differ in {field}"):
            check_together({"a": record(), "b": replace(other, **{field: value})})


def test_weights_of_another_form_are_named() -> None:
    check_weights(ONE, SHAPES)
    with pytest.raises(RecordRefused, match=r"lora_A\.weight is missing, \(2, 5\) is needed"):
        check_weights({LINEAR + B: ONE[LINEAR + B]}, SHAPES)
    with pytest.raises(RecordRefused, match=r"is \(3, 2\), \(4, 2\) is needed"):
        check_weights(ONE, {**SHAPES, LINEAR + B: (4, 2)})
    with pytest.raises(RecordRefused, match="which this model does not"):
        check_weights({**ONE, "x": ONE[LINEAR + A]}, SHAPES)


def test_a_fingerprint_tells_base_and_form() -> None:
    assert fingerprint("base", 4.0, dict(reversed(SHAPES.items()))) == MODEL
    others = {fingerprint("other", 4.0, SHAPES), fingerprint("base", 8.0, SHAPES), fingerprint("base", 4.0, {})}
    assert len(others - {MODEL}) == 3
