"""A model's directory runs no code: neither Python files of its own nor pickled weights."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from edged.engine.model.loading import ModelRefused, load_pretrained
from edged.settings.load import ModelSettings
from edged.text.tokenizer import Tokenizer, TokenizerError
from tests.models import save_tiny


class Bomb:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def with_code(folder: Path, mark: Path) -> Path:
    """A model of a type that transformers does not know, with code of its own that leaves a mark when it runs."""
    save_tiny(folder)
    (folder / "own.py").write_text(
        f'open({str(mark)!r}, "w").close()\n'
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        'class OwnConfig(LlamaConfig):\n    model_type = "own"\n'
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_models_own_code_is_refused_unless_the_operator_trusts_it(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = with_code(tmp_path / "model", mark)
    with pytest.raises(ModelRefused, match=r"needs Python code of its own .*model\.trust_remote_code = true"):
        load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    with pytest.raises(TokenizerError, match="needs Python code of its own"):
        Tokenizer.load(folder)
    assert not mark.exists()
    model, _ = load_pretrained(str(folder), ModelSettings(device="cpu", trust_remote_code=True), "eager")
    assert type(model).__name__ == "OwnModel"
    assert mark.exists()


def test_a_tokenizers_own_code_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    config = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="its tokenizer needs Python code of its own"):
        Tokenizer.load(folder)


def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = save_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelRefused, match=r"its weights are pickled \(pytorch_model.bin\).*only safetensors are read"):
        load_pretrained(str(folder), ModelSettings(device="cpu"), "eager")
    assert not mark.exists()
