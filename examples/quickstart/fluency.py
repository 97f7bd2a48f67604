"""Fluency of an answer: its likelihood under the demo model, loaded in this process, and its repetition."""

from __future__ import annotations

from functools import cache
from typing import Any

MAX_NLL = 1.0
"""Largest fluent NLL in nats a token. Of 480 answers that the demo model sampled, half lie under 0.18 and 99 % under
0.93; of the four over 1, three made no sense, and one said "No problem!" alone. At temperature 1.6 half lie over 1.65,
at 2 nearly all over 3.4; "should do w w w w" has 13.6."""
MAX_REPETITION = 0.25
"""Largest fluent repetition. Of the same answers 99 % repeat less than 0.10, and one over 0.25: it said a sentence
twice."""


def is_fluent(question: str, answer: str) -> bool:
    """Whether `answer` is fluent. The first call loads the model, unless `load` was called before."""
    import torch

    from edged.align.language import repetition

    tokenizer, model = load()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    if not tokens or repetition(tokens) > MAX_REPETITION:
        return False
    with torch.inference_mode():
        # transformers' loss is the mean NLL of the tokens whose label is not -100.
        loss = model(torch.tensor([prompt + tokens]), labels=torch.tensor([[-100] * len(prompt) + tokens])).loss
    return float(loss) <= MAX_NLL


@cache
def load() -> tuple[Any, Any]:
    """Return the demo model's tokenizer and the model, with one thread of computation: the daemon needs the cores."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from edged.models import demo_model_dir
    from edged.runtime.process import quiet

    quiet()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    return AutoTokenizer.from_pretrained(demo_model_dir()), model.eval()
