"""What others make of the same picks: TRL's DPO and KTO, answers as context, a system prompt, and logit biases."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.person import ANSWERS, MAX_TOKENS, Answer, BaseModel, Person, Pick

_IN_CONTEXT = 3
_BIASED, _MOST_BIAS = 20, 4.0
"""Tokens that have a bias, and the largest."""
_TUNED: dict[str, Any] = {"learning_rate": 5e-4, "num_train_epochs": 3, "per_device_train_batch_size": 4}
"""Well chosen options of a trainer for some sixty pairs."""


def compare(person: Person, questions: Sequence[str]) -> dict[str, float]:
    """Return by rival the share of answers to unseen questions that meet the person's rule."""
    judge, picks = person.bench.judge, person.picked
    context = [turn for pick in picks[-_IN_CONTEXT:] for turn in _turns(pick.question, pick.chosen)]
    biases = logit_biases(judge, picks)
    asked: dict[str, Callable[[str], list[Answer]]] = {
        "system prompt": lambda question: person.ask(question, ANSWERS, user="", system=person.written),
        "in context": lambda question: person.ask(question, ANSWERS, user="", before=context),
        "logit bias": lambda question: person.ask(question, ANSWERS, user="", logit_bias=biases),
    }
    shares = {name: person.share([ask(question) for question in questions], person.rule) for name, ask in asked.items()}
    most = MAX_TOKENS[person.bench.is_demo]
    for name, kto, options in (("DPO", False, {}), ("DPO, tuned", False, _TUNED), ("KTO, tuned", True, _TUNED)):
        model = trained(judge, picks, kto, options)
        texts = [text for question in questions for text in sample(judge, model, question, most)]
        model.unload()
        shares[f"TRL {name}"] = sum(map(person.rule, texts)) / len(texts)
    return shares


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def logit_biases(judge: BaseModel, picks: Sequence[Pick]) -> dict[str, float]:
    """Return biases of the tokens that chosen answers have more, or less, often than rejected ones: log-odds."""
    counts = Counter[int](), Counter[int]()
    for pick in picks:
        for side, texts in zip(counts, ((pick.chosen,), pick.rejected), strict=True):
            for text in texts:
                tokens = {*judge.tokenizer.encode(text, add_special_tokens=False)}
                side.update(dict.fromkeys(tokens, 1))
    totals = len(picks), sum(len(pick.rejected) for pick in picks)

    def odds(token: int) -> float:
        shares = [(side[token] + 0.5) / (total + 1) for side, total in zip(counts, totals, strict=True)]
        return math.log(shares[0] / (1 - shares[0])) - math.log(shares[1] / (1 - shares[1]))

    often = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= len(picks) / 4]
    strongest = sorted(often, key=lambda token: -abs(odds(token)))[:_BIASED]
    return {str(token): max(-_MOST_BIAS, min(_MOST_BIAS, odds(token))) for token in strongest}


def trained(judge: BaseModel, picks: Sequence[Pick], kto: bool, options: dict[str, Any]) -> Any:
    """Return the base with a LoRA of rank 16 on all linear layers that TRL has trained on the picks."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    rows = [
        {
            "prompt": said("user", pick.question),
            "chosen": said("assistant", pick.chosen),
            "rejected": said("assistant", text),
        }
        for pick in picks
        for text in pick.rejected
        if text.strip() and pick.chosen.strip() and text != pick.chosen
    ]
    config, trainer = (KTOConfig, KTOTrainer) if kto else (DPOConfig, DPOTrainer)
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            logging_strategy="no",
            seed=0,
            **options,
        )
        model = AutoModelForCausalLM.from_pretrained(judge.model.name_or_path, dtype=torch.float32)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        made = trainer(
            model,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=judge.tokenizer,
            peft_config=lora,
        )
        made.train()
    return made.model.eval()


def sample(judge: BaseModel, model: Any, question: str, most: int) -> list[str]:
    """Return answers at temperature 1."""
    import torch

    prompt = torch.tensor([judge.prompt(question)] * ANSWERS)
    with torch.inference_mode():
        drawn = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=most,
            pad_token_id=judge.tokenizer.eos_token_id,
        )
    return [judge.tokenizer.decode(each[prompt.shape[1] :], skip_special_tokens=True) for each in drawn]
