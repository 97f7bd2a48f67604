"""A GGUF file is refused with ways out: its plain checkpoint by name, and one that is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.support.gguf_file import interleaved, write_gguf
from edged.cli.doctor.model import find
from edged.engine.model.gguf_checkpoint import convert
from edged.engine.model.loading import ModelRefused
from edged.models import ModelMissing, find_model
from edged.profiler.memory import ModelSizes
from edged.settings.load import ModelSettings, Settings
from tests.api.live import running
from tests.cli.conftest import edged
from tests.models import SPECIALS, byte_tokenizer, save_tiny, tiny_model

VOCABULARY = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of which files are made."""
    return save_tiny(tmp_path_factory.mktemp("plain") / "plain", rms_norm_eps=1e-5)


def written(plain: Path, folder: Path, **how: Any) -> Path:
    return write_gguf(plain, folder / "tiny.gguf", vocabulary=VOCABULARY, **how)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_a_file_of_floats_becomes_the_checkpoint_that_it_was_made_of(plain: Path, tmp_path: Path) -> None:
    made = convert(written(plain, tmp_path), tmp_path / "made")
    assert (made["class"], made["dtype"], made["blocks"]) == ("LlamaForCausalLM", "float32", ["F32"])
    before, after = weights(plain), weights(tmp_path / "made")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    text = "12 cafés, 3.5 °C\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "made").encode(text) == byte_tokenizer().encode(text)


@pytest.mark.parametrize("blocks", ["Q8_0", "Q4_0"])
def test_blocks_become_the_numbers_that_they_stand_for(blocks: str, plain: Path, tmp_path: Path) -> None:
    made = convert(written(plain, tmp_path, blocks=blocks), tmp_path / "made")
    assert (made["dtype"], made["blocks"]) == ("bfloat16", sorted(["F32", blocks]))
    before, after, kind = weights(plain), weights(tmp_path / "made"), gguf.GGMLQuantizationType[blocks]
    for name, tensor in before.items():
        stored = tensor.numpy()
        if tensor.ndim == 2 and name.startswith("model.layers."):
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            rows = interleaved(stored, heads) if heads else stored
            stored = gguf.dequantize(gguf.quantize(rows, kind), kind)
            if heads:
                # A head's rows lie two by two in the file.
                stored = stored.reshape(heads, -1, 2, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        assert torch.equal(torch.from_numpy(stored).bfloat16(), after[name]), name


KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_other_architectures_become_what_they_were(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind.replace("gemma3", "gemma3_text"), rms_norm_eps=1e-6, query_pre_attn_scalar=256)
    config, writer = model.config, gguf.GGUFWriter(tmp_path / "file.gguf", kind)
    rope = getattr(config, "rope_parameters", {})
    writer.add_float32(f"{kind}.rope.freq_base", rope.get("full_attention", rope)["rope_theta"])
    if beside := rope.get("sliding_attention"):
        writer.add_float32(f"{kind}.rope.freq_base_swa", beside["rope_theta"])
    for key, name in KEYS.items():
        value = getattr(config, name, None)
        if value is not None and not (kind == "qwen2" and name in ("head_dim", "sliding_window")):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{kind}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([0.0] * len(VOCABULARY))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    weights = model.state_dict()
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        del weights["lm_head.weight"]
    for name, tensor in weights.items():
        more = 1.0 if kind.startswith("gemma") and name.endswith("norm.weight") else 0.0
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), (tensor + more).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "file.gguf", tmp_path / "made")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = torch.randint(3, 259, (1, 60), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(ids).logits, made(ids).logits, atol=1e-4)


def test_it_is_served(plain: Path, tmp_path: Path) -> None:
    done = edged("models", "convert", str(written(plain, tmp_path)), str(tmp_path / "made"))
    assert done.returncode == 0, done.stderr
    assert f"edged serve --model {tmp_path / 'made'}" in done.stdout
    asked: Any = {"model": "made", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    with running(tmp_path / "run", tmp_path / "made", align__enabled=False) as live, live.openai() as client:
        assert client.completions.create(**asked).usage.completion_tokens == 4  # type: ignore[union-attr]
    again = edged("models", "convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "made"))
    assert (again.returncode, again.stderr.count("\n")) == (1, 2)
    assert "is there already: name a new folder" in again.stderr


def test_the_positions_of_llama_3_are_kept(plain: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(plain, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    convert(written(plain, tmp_path, rope_factors=(unscaled / scaled).numpy()), tmp_path / "made")
    before = AutoModelForCausalLM.from_pretrained(plain, config=config, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = torch.randint(3, 259, (1, 60), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(before(ids).logits, after(ids).logits, atol=1e-5)
    others = np.linspace(1.0, 7.0, 8, dtype=np.float32)
    with pytest.raises(ModelRefused, match=r"its rope_freqs\.weight are not those of Llama 3; or take the checkpoint"):
        convert(written(plain, tmp_path, rope_factors=others), tmp_path / "other")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"llama.attention.scale": 0.25}, r'transformers does not read its "attention\.scale" of 0\.25'),
        ({"llama.attention.sliding_window": 16.0}, r'does not read its "attention\.sliding_window" of 16'),
        ({"split.count": 3.0}, "it is one of 3 parts: join them"),
        ({"llama.rope.scaling.yarn_beta_fast": 32.0}, r'does not read its "rope\.scaling\.yarn_beta_fast"'),
        ({"llama.rope.scaling.factor": 4.0}, "its positions are scaled, and it does not say how"),
    ],
)
def test_a_number_that_nothing_reads_is_no_detail(
    numbers: dict[str, float], reason: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        convert(written(plain, tmp_path, numbers=numbers), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_that_lies_beside_the_file_is_not_its_own(plain: Path, tmp_path: Path) -> None:
    file = written(plain, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (plain / name).read_text()
        (tmp_path / name).write_text(text.replace('"H"', '"@H"'))
    convert(file, tmp_path / "made")
    assert AutoTokenizer.from_pretrained(tmp_path / "made").encode("HI") == byte_tokenizer().encode("HI")


def test_a_file_that_is_not_whole_is_refused(plain: Path, tmp_path: Path) -> None:
    file = written(plain, tmp_path)
    for length in (30, 2000, file.stat().st_size - 5000):
        (tmp_path / "part.gguf").write_bytes(file.read_bytes()[:length])
        with pytest.raises(ModelRefused, match=r"is no whole GGUF file .*: download it again"):
            convert(tmp_path / "part.gguf", tmp_path / "made")


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_where_memory_or_disk_is_short_nothing_is_begun(
    what: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "memory":
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ModelRefused, match=rf"GiB of {what} are needed and 0\.0 GiB are free; do it on a larger"):
        convert(written(plain, tmp_path), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


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
    with pytest.raises(ModelMissing, match=rf"is a GGUF file \(qwen3\), .*convert .*; or give {named} as safetensors"):
        find_model(settings)
    _, found = find(settings)
    assert found is not None
    assert f"give {named} as safetensors" in found.way_out


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + b"\xff" * 40, b"GGUF\3\0\0\0" + b"\0" * 8 + b"\1" + b"\0" * 7])
def test_a_broken_file_is_refused_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelMissing, match=r"a GGUF file whose metadata cannot be read .*: download it again"):
        find_model(ModelSettings(path=str(tmp_path / "model.gguf")))
