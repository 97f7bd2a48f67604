"""llama.cpp answers from our GGUF file as transformers does from the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.gguf_file import write_gguf
from benchmarks.support.random_llama import SHAPES, write_random_llama

pytest.importorskip("gguf", reason="gguf is not installed: it comes with the extra [peers]")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is in the extra [peers]")
PROMPT = [5, 900, 42, 7000, 13, 13, 256, 4095]


# llama.cpp rounds what it multiplies by matrices in F16 to F16, too.
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-5), (True, 2e-3)])
def test_llama_cpp_computes_the_same_logits(tmp_path: Path, half: bool, tolerance: float) -> None:
    directory = write_random_llama(tmp_path, SHAPES["4m"], "float16" if half else "float32")
    path = write_gguf(directory, tmp_path / "model.gguf", half)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    kv = llama_cpp.GGML_TYPE_F32
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=kv, type_v=kv)
    llama.eval(PROMPT)
    found = torch.from_numpy(llama.scores[: len(PROMPT)].copy())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)
