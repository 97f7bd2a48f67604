"""Another config, tokenizer or weight makes another base model; files are hashed once; older data folders go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from edged.align.feedback.pair import VersionSaved
from edged.engine.model import base_files
from edged.engine.model.base_files import base_fingerprint, files_digest
from tests.engine.harness import random_pairs, running_engine
from tests.models import save_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_last_weight(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[-1] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})


CHANGES = {
    "config": lambda model: edit_json(model / "config.json", rms_norm_eps=0.5),
    "tokenizer": lambda model: edit_json(model / "tokenizer.json", truncation=None, padding=None),
    "a weight": change_last_weight,
    "code": lambda model: (model / "modeling_own.py").write_text("# new"),
}
SAME = {
    "version of transformers": lambda model: edit_json(model / "config.json", transformers_version="9.9"),
    "order of keys": lambda model: edit_json(
        model / "config.json", **dict(reversed(json.loads((model / "config.json").read_text()).items()))
    ),
    "chat template": lambda model: (model / "chat_template.jinja").write_text("{{ messages }}"),
    "readme": lambda model: (model / "README.md").write_text("new"),
    "time alone": lambda model: os.utime(model / "model.safetensors", (1, 1)),
}


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_what_changes_answers_makes_another_base_and_nothing_else_does(
    tmp_path: Path, model: Path, change: str
) -> None:
    before = files_digest(model, tmp_path / "data")
    {**CHANGES, **SAME}[change](model)
    assert (files_digest(model, tmp_path / "data") == before) is (change in SAME)
    assert files_digest(model, tmp_path / "data") == files_digest(model, tmp_path / "elsewhere")


def test_files_that_did_not_change_are_read_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, hashed = base_files.sha256_of, []
    monkeypatch.setattr(base_files, "sha256_of", lambda path: hashed.append(path.name) or read(path))
    first = files_digest(model, tmp_path)
    assert set(hashed) == {"model.safetensors", "tokenizer.json"}
    assert files_digest(model, tmp_path) == first
    assert len(hashed) == 2
    change_last_weight(model)
    assert files_digest(model, tmp_path) != first
    assert hashed[2:] == ["model.safetensors"]
    (tmp_path / "base_files.json").write_text("{")
    files_digest(model, tmp_path)
    assert len(hashed) == 5, "a file that a power cut left half written is made anew"


def test_the_first_files_of_an_older_data_folder_keep_its_fingerprint(tmp_path: Path, model: Path) -> None:
    (tmp_path / "adapters" / "0123456789abcdef").mkdir(parents=True)
    files = files_digest(model, tmp_path)
    assert base_fingerprint("0123456789abcdef", files, tmp_path) == "0123456789abcdef"
    CHANGES["tokenizer"](model)
    other = base_fingerprint("0123456789abcdef", files_digest(model, tmp_path), tmp_path)
    assert other == base_fingerprint("0123456789abcdef", files_digest(model, tmp_path), tmp_path / "new")
    assert other != "0123456789abcdef"
    assert base_fingerprint("0123456789abcdef", files, tmp_path) == "0123456789abcdef", "the first files are back"


def test_adapters_of_before_are_served_and_those_of_another_tokenizer_are_not(tmp_path: Path) -> None:
    with running_engine(tmp_path, data="first") as (engine, client):
        engine.submit_pairs(random_pairs(8))
        client.wait(lambda: bool(client.of(VersionSaved)))
        new, weights = engine.adapter_files.spec.fingerprint, engine.model.fingerprint
        assert new != weights
    # As edged wrote it when the weights alone made the fingerprint.
    folder = tmp_path / "first" / "adapters"
    (folder / new).rename(folder / weights)
    for manifest in (folder / weights).glob("*/v*/edged.json"):
        edit_json(manifest, base_fingerprint=weights)
    (tmp_path / "first" / "base_files.json").unlink()
    with running_engine(tmp_path, data="first") as (engine, _):
        assert engine.adapters()["ann"] >= 1
        assert engine.status()["model"]["fingerprint"] == weights
    CHANGES["tokenizer"](tmp_path / "model-llama")
    with running_engine(tmp_path, data="first") as (engine, _):
        assert engine.adapters() == {}
        assert engine.status()["model"]["fingerprint"] not in (weights, new)
