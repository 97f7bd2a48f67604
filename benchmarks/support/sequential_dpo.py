"""Plain DPO as a script would do it: a transformers model, LoRA by peft, autograd, one pair after the other.

The engine's alignment is compared with it: a loop that tests each pair before it trains on it, and scores of pairs
under an adapter's file. It is a side of `benchmarks.support.interleave`, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.report.arrivals import answer_logp
from benchmarks.support.interleave import Conversation, Side, sides_of
from edged.align.adapters import adapter
from edged.align.feedback.pair import TokenPair
from edged.lab.rebuild.scores import BASE, answer_logps
from edged.settings.load import AlignSettings

_ADAPTER = "default"
"""peft's default adapter name."""
_FEW_PARAMETERS = 16_000_000
"""Parameters below which one thread is faster: operations are shorter than a hand-over to another thread."""
Logps = tuple[torch.Tensor, torch.Tensor]
"""Summed log-probabilities of the chosen and of the rejected answer, in nats."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The loop's model and hyperparameters; `pairs` in questions are lists [prompt ids, chosen ids, rejected ids]."""

    model: str
    device: str = "cpu"
    rank: int = 16
    alpha: float = 32.0
    beta: float = 0.1
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    pairs_per_step: int = 4
    sft_weight: float = 0.0


class Reference:
    """A client of the side's process, which trains and scores; the process is stopped while it has no question."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def learn(self, pairs: Sequence[TokenPair], seed: int) -> list[list[float]]:
        """Train a new adapter on the pairs, in one pass.

        Returns [chosen, rejected, reference chosen, reference rejected] of each pair, before it was trained on.
        """
        return self._ask({"do": "learn", "pairs": _plain(pairs), "seed": seed})

    def score(self, pairs: Sequence[TokenPair], adapter_file: str | None = None) -> list[list[float]]:
        """Return the same four sums under an adapter's weights in PEFT's format; None: under those of the last
        `learn`."""
        return self._ask({"do": "score", "pairs": _plain(pairs), "adapter": adapter_file})

    def base(self, pairs: Sequence[TokenPair]) -> list[list[float]]:
        """Return the same four sums under the base model, which are the reference's own."""
        return self._ask({"do": "base", "pairs": _plain(pairs)})

    def language(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], adapter_file: str, keep: bool = False
    ) -> list[list[float]]:
        """Return [NLL, the base model's NLL, KL(policy || base)] of each (prompt, answer), in nats, summed over its
        tokens.

        `keep`: cache the base model's log-probabilities, for texts that come again with other adapters.
        """
        return self._ask({"do": "language", "texts": texts, "adapter": adapter_file, "keep": keep})

    def save(self, adapter_file: str) -> None:
        """Write the weights of the last `learn`, in PEFT's format."""
        self._ask({"do": "save", "adapter": adapter_file})

    def _ask(self, question: dict[str, Any]) -> list[list[float]]:
        found: list[list[float]] = self._side.ask(question)["logps"]
        return found


def recipe_of(model: str, align: AlignSettings, device: str = "cpu") -> Recipe:
    """Return the loop's recipe at the same settings as the engine's."""
    return Recipe(
        model,
        device,
        align.rank,
        align.alpha,
        align.beta,
        align.learning_rate,
        adapter.MAX_GRAD_NORM,
        align.micro_batch_pairs,
        align.sft_weight,
    )


def side_of(recipe: Recipe) -> tuple[str, str, list[str]]:
    """Return name, module and arguments of the side's process."""
    return sides_of(__name__, ["reference loop"], recipe)[0]


def _plain(pairs: Sequence[TokenPair]) -> list[list[tuple[int, ...]]]:
    return [[pair.prompt, pair.chosen, pair.rejected] for pair in pairs]


class _Loop:
    """The loop inside the side's process."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._known: dict[str, Logps] = {}
        self._kept: dict[str, torch.Tensor] = {}
        """The base model's log-probabilities of texts that come again."""
        base = AutoModelForCausalLM.from_pretrained(
            recipe.model, trust_remote_code=False, dtype=torch.float32, local_files_only=True
        )
        if base.num_parameters() < _FEW_PARAMETERS:
            torch.set_num_threads(1)
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model: Any = get_peft_model(base.to(recipe.device).eval(), config)
        self._leaves = [leaf for leaf in self._model.parameters() if leaf.requires_grad]

    def learn(self, pairs: list[list[list[int]]], seed: int) -> list[list[float]]:
        """See `Reference.learn`."""
        recipe = self._recipe
        torch.manual_seed(seed)
        for module in self._model.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", init_lora_weights=True)
        optimizer = torch.optim.AdamW(self._leaves, lr=recipe.learning_rate, weight_decay=0.0)
        found = []
        for first in range(0, len(pairs), recipe.pairs_per_step):
            batch = pairs[first : first + recipe.pairs_per_step]
            for pair in batch:
                chosen, rejected = self._logps(pair)
                known = self._reference(pair)
                margin = recipe.beta * ((chosen - known[0]) - (rejected - known[1]))
                loss = -functional.logsigmoid(margin) - recipe.sft_weight * chosen / max(len(pair[1]), 1)
                (loss / len(batch)).backward()
                found.append(_row((chosen, rejected), known))
            torch.nn.utils.clip_grad_norm_(self._leaves, recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return found

    @torch.no_grad()
    def score(self, pairs: list[list[list[int]]], adapter: str | None) -> list[list[float]]:
        """See `Reference.score`."""
        if adapter is not None:
            set_peft_model_state_dict(self._model, load_file(adapter))
        return [_row(self._logps(pair), self._reference(pair)) for pair in pairs]

    @torch.no_grad()
    def language(self, texts: list[list[list[int]]], adapter: str, keep: bool) -> list[list[float]]:
        """See `Reference.language`."""
        set_peft_model_state_dict(self._model, load_file(adapter))
        found = []
        for prompt, answer in texts:
            policy = answer_logps(self._model, _ADAPTER, prompt, answer)
            base = self._kept.get(key := json.dumps([prompt, answer]))
            if base is None:
                base = answer_logps(self._model, BASE, prompt, answer)
            if keep:
                self._kept[key] = base
            targets = torch.tensor(answer, device=policy.device)[:, None]
            kl = float((policy.exp() * (policy - base)).sum())
            found.append([-float(policy.gather(1, targets).sum()), -float(base.gather(1, targets).sum()), kl])
        return found

    def save(self, adapter: str) -> list[list[float]]:
        """See `Reference.save`."""
        save_file({name: value.contiguous() for name, value in get_peft_model_state_dict(self._model).items()}, adapter)
        return []

    def base(self, pairs: list[list[list[int]]]) -> list[list[float]]:
        """See `Reference.base`."""
        return [_row(known, known) for known in map(self._reference, pairs)]

    def _logps(self, pair: list[list[int]], adapter: str | None = _ADAPTER) -> Logps:
        prompt, *answers = pair
        chosen, rejected = (answer_logp(self._model, adapter, prompt, answer) for answer in answers)
        return chosen, rejected

    @torch.no_grad()
    def _reference(self, pair: list[list[int]]) -> Logps:
        """Return the base model's log-probabilities of a pair; computed once for a pair."""
        key = json.dumps(pair)
        if key not in self._known:
            self._known[key] = self._logps(pair, BASE)
        return self._known[key]


def _row(policy: Logps, reference: Logps) -> list[float]:
    return [float(value.detach()) for value in (*policy, *reference)]


def be_side(_name: str, told: str) -> None:
    """Run as a side: each question names one of `Reference`'s methods."""
    loop, conversation = _Loop(Recipe(**json.loads(told))), Conversation()
    while True:
        question = conversation.question()
        conversation.answer({"logps": getattr(loop, question.pop("do"))(**question)})
