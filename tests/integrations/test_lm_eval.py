"""lm_eval measures a served model as transformers measures its files: the same log-likelihoods, the same accuracy.

It has an environment of its own: `EDGED_LM_EVAL` names its Python, which has `lm-eval[api]`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.api.live import running
from tests.api.test_tools import free_port
from tests.models import save_tiny

PYTHON = os.environ.get("EDGED_LM_EVAL", "")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not PYTHON, reason="EDGED_LM_EVAL names no Python that has lm_eval"),
]
OPTIONS = ("yes", "no", "maybe so", "never")
QUESTIONS = [{"question": f"Is {number} more than {7 * number % 10}?", "answer": number % 4} for number in range(10)]
TASK = """
task: ten
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: {options}
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def log_likelihood(model: Any, tokenizer: Any, question: str, option: str) -> float:
    """The log-probability of an answer behind its question, by transformers."""
    before = tokenizer.encode(f"Question: {question}\nAnswer:")
    ids = tokenizer.encode(f"Question: {question}\nAnswer: {option}")
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return float(sum(logprobs[place - 1, ids[place]] for place in range(len(before), len(ids))))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lm_eval_finds_the_models_own_log_likelihoods(tmp_path: Path, batch_size: int) -> None:
    save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    data, port = tmp_path / "ten.jsonl", free_port()
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "ten.yaml").write_text(TASK.format(data=data, options=json.dumps(OPTIONS)))
    url, about = f"http://127.0.0.1:{port}/v1/completions", f"model=tiny,tokenizer={tmp_path / 'tiny'}"
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--tasks", "ten"]
    command += ["--model_args", f"{about},base_url={url},tokenized_requests=True,max_length=256"]
    command += ["--include_path", str(tmp_path), "--batch_size", str(batch_size)]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    with running(tmp_path / "run", tmp_path / "tiny", api__listen=f"127.0.0.1:{port}"):
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("samples_ten_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        found = [float(each[0][0]) for each in sample["resps"]]
        wanted = [log_likelihood(model, tokenizer, sample["doc"]["question"], option) for option in OPTIONS]
        assert found == pytest.approx(wanted, abs=1e-3)
        assert sample["acc"] == float(wanted.index(max(wanted)) == sample["doc"]["answer"])
