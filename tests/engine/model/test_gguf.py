"""A GGUF file is refused with the name of its plain checkpoint, whose memory is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.gguf_file import write_gguf
from edged.cli.doctor.model import find
from edged.models import ModelMissing, find_model
from edged.profiler.memory import ModelSizes
from edged.settings.load import ModelSettings, Settings
from tests.models import save_tiny

gguf = pytest.importorskip("gguf")


def test_the_memory_of_the_plain_checkpoint_is_known_from_the_file(tmp_path: Path) -> None:
    file = write_gguf(save_tiny(tmp_path / "plain", rms_norm_eps=1e-5), tmp_path / "tiny.gguf")
    settings = Settings(model=ModelSettings(quantize="int4"))
    there, plain = (ModelSizes.read(path, settings, True) for path in (file, tmp_path / "plain"))
    for size in ("layers", "layer_heads", "linears", "plain_weights", "vocab_size", "max_positions"):
        assert getattr(there.shape, size) == getattr(plain.shape, size)
    assert there.linear_bytes == plain.linear_bytes


@pytest.mark.parametrize("url", ["https://huggingface.co/Qwen/Qwen3-0.6B", ""])
def test_a_start_names_the_plain_checkpoint(url: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    if url:
        writer.add_base_model_count(1)
        writer.add_base_model_repo_url(0, url)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    settings = ModelSettings(path=str(tmp_path / "model.gguf"))
    named = '"Qwen/Qwen3-0.6B"' if url else "the checkpoint that it was made of"
    with pytest.raises(ModelMissing, match=rf"is a GGUF file \(qwen3\), .*: give {named} as safetensors, and model"):
        find_model(settings)
    _, found = find(settings)
    assert found is not None
    assert found.way_out.startswith(f"give {named} as safetensors")


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + b"\xff" * 40, b"GGUF\3\0\0\0" + b"\0" * 8 + b"\1" + b"\0" * 7])
def test_a_broken_file_is_refused_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelMissing, match=r"a GGUF file whose metadata cannot be read .*: download it again"):
        find_model(ModelSettings(path=str(tmp_path / "model.gguf")))
