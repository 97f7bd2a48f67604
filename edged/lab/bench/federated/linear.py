"""DPO linearised at the base: what members would learn, where real steps of so many would take too long.

At the base B is zero. So an answer's log-probability changes by the inner product of B with its gradient, and A has
no gradient. Besides, many answers are scored here at once.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from edged.align.adapters.adapter import MAX_GRAD_NORM
from edged.align.adapters.form import AdapterForm, peft_name
from edged.align.feedback.pair import TokenPair
from edged.lab.bench.federated.kept import Kept
from edged.settings.load import AlignSettings

Weights = Mapping[str, torch.Tensor]
"""Weights of an adapter by PEFT's names."""
TASTES = ("concise", "elaborate")
"""The tastes: the shorter answer, the longer one."""
_TEXTS = 16
_CHUNK = 32
"""Texts of a forward; pairs whose gradients are computed before they are kept."""


def by_taste(pair: TokenPair, taste: str) -> TokenPair:
    """Return a pair as this taste prefers its answers."""
    short, long = sorted((pair.chosen, pair.rejected), key=len)
    chosen, rejected = (short, long) if taste == TASTES[0] else (long, short)
    return TokenPair(pair.pair_id, "", pair.prompt, chosen, rejected)


class AnswerModel:
    """The base model, with any adapter of one form: scores and gradients of many answers at once."""

    def __init__(self, model_dir: Path, form: AdapterForm, first: Weights) -> None:
        """`first` are the weights that members begin with; their A is that of the gradients."""
        self._form, self._first = form, first
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval().requires_grad_(False)
        self._weights: Weights | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._base: dict[TokenPair, float] = {}
        for linear in form.scalings:
            self._model.get_submodule(linear).register_forward_hook(partial(self._hear, linear))

    def _hear(self, linear: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        """Add an adapter's part to a linear's output, or note what its B's gradient is made of."""
        if self._weights is not None:
            a, b = (self._weights[peft_name(linear, part)] for part in "AB")
            return output + self._form.scalings[linear] * (inputs[0] @ a.T) @ b.T
        if output.requires_grad:
            self._inputs[linear] = inputs[0].detach()
            output.register_hook(partial(self._gradients.__setitem__, linear))
        return None

    def _logps(self, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> torch.Tensor:
        """Return the log-probability of each answer after its prompt, in nats."""
        ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)
        embedded = self._model.get_input_embeddings()(ids).requires_grad_(torch.is_grad_enabled())
        # Padding comes last, where no earlier token sees it.
        logps = self._model(inputs_embeds=embedded, use_cache=False).logits[:, :-1].log_softmax(-1)
        scored = logps.gather(2, ids[:, 1:, None])[..., 0]
        places = torch.arange(1, ids.shape[1])
        bounds = torch.tensor([(len(prompt), len(prompt) + len(answer)) for prompt, answer in texts])
        return (scored * ((places >= bounds[:, :1]) & (places < bounds[:, 1:]))).sum(1)

    def _each(
        self, pairs: Sequence[TokenPair], find: Callable[[list[tuple[tuple[int, ...], tuple[int, ...]]]], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `find` finds of each pair's two answers: [pairs, 2, ...]."""
        texts = list(chain.from_iterable([(each.prompt, each.chosen), (each.prompt, each.rejected)] for each in pairs))
        order = sorted(range(len(texts)), key=lambda at: sum(map(len, texts[at])))
        found = [find([texts[at] for at in order[begin : begin + _TEXTS]]) for begin in range(0, len(order), _TEXTS)]
        rows = torch.cat(found)[torch.tensor(order).argsort()]
        return rows.view(len(pairs), 2, *rows.shape[1:])

    @torch.no_grad()
    def margins(self, weights: Weights, pairs: Sequence[TokenPair]) -> torch.Tensor:
        """Return how much more, in nats, the adapter than the base prefers the chosen answers: [pairs]."""
        new = [pair for pair in pairs if pair not in self._base]
        if new:
            self._base.update(zip(new, self._apart(new).tolist(), strict=True))
        self._weights = weights
        try:
            return self._apart(pairs) - torch.tensor([self._base[pair] for pair in pairs])
        finally:
            self._weights = None

    def _apart(self, pairs: Sequence[TokenPair]) -> torch.Tensor:
        logps = self._each(pairs, self._logps)
        return logps[:, 0] - logps[:, 1]

    def gradients(self, pairs: Sequence[TokenPair]) -> torch.Tensor:
        """Return the gradients by B of both answers' log-probabilities at the base: [pairs, 2, numbers of B]."""
        return self._each(pairs, self._gradients_of)

    def _gradients_of(self, texts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> torch.Tensor:
        self._logps(texts).sum().backward()
        rows = []
        for linear, scaling in self._form.scalings.items():
            inner = self._inputs[linear] @ self._first[peft_name(linear, "A")].T
            rows.append(scaling * torch.einsum("sto,str->sor", self._gradients[linear], inner).flatten(1))
        self._inputs.clear()
        self._gradients.clear()
        return torch.cat(rows, 1)

    def flat(self, weights: Weights) -> torch.Tensor:
        """Return an adapter's B as one vector, in the order of `gradients`."""
        return torch.cat([weights[peft_name(linear, "B")].flatten() for linear in self._form.scalings])

    def weights(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the adapter that has this B, and A as all began."""
        made, begin = dict(self._first), 0
        for linear in self._form.scalings:
            own = self._first[peft_name(linear, "B")]
            made[peft_name(linear, "B")] = flat[begin : begin + own.numel()].view_as(own).contiguous()
            begin += own.numel()
        return made


class LinearMembers:
    """Members whose steps are linearised: by edged's recipe but for its guard, on gradients that are kept."""

    def __init__(self, model: AnswerModel, kept: Kept, align: AlignSettings, say: Callable[[str], None]) -> None:
        self._model, self._kept, self._align, self._say = model, kept, align, say
        self.beta = align.beta
        self._rows: dict[int, int] = {}
        self._gradients: list[torch.Tensor] = []
        self._lengths: list[tuple[int, int]] = []

    def add(self, pairs: Sequence[TokenPair]) -> None:
        """Compute, or take from what is kept, the gradients of these pairs' answers, the shorter first."""
        unique = {pair.pair_id: by_taste(pair, TASTES[0]) for pair in pairs if pair.pair_id not in self._rows}
        new = list(unique.values())
        for begin in range(0, len(new), _CHUNK):
            some = new[begin : begin + _CHUNK]
            known = [self._kept.tensor(f"gradient-{pair.pair_id}") for pair in some]
            missing = [pair for pair, gradient in zip(some, known, strict=True) if gradient is None]
            if missing:
                self._say(f"gradients: {begin} of {len(new)} pairs")
            found = iter(self._model.gradients(missing).half() if missing else ())
            for pair, gradient in zip(some, known, strict=True):
                if gradient is None:
                    gradient = self._kept.keep_tensor(f"gradient-{pair.pair_id}", next(found).clone())
                self.take(pair.pair_id, gradient, (len(pair.chosen), len(pair.rejected)))

    def take(self, pair_id: int, gradient: torch.Tensor, lengths: tuple[int, int]) -> None:
        """Take in the gradients of a pair's answers [2, numbers of B], and their lengths; the shorter first."""
        self._rows[pair_id] = len(self._rows)
        self._gradients.append(gradient)
        self._lengths.append(lengths)

    def _sides(self, taste: str, pairs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of chosen and rejected answers, and the chosen ones' lengths in tokens."""
        rows, chosen = [self._rows[pair] for pair in pairs], TASTES.index(taste)
        both = torch.stack([self._gradients[row] for row in rows]).float()
        lengths = torch.tensor([float(self._lengths[row][chosen]) for row in rows])
        return both[:, chosen], both[:, 1 - chosen], lengths

    def margins(self, flat: torch.Tensor, taste: str, pairs: Sequence[int]) -> torch.Tensor:
        """Return how much more than the base B prefers the chosen answers, in nats: [pairs]."""
        chosen, rejected, _ = self._sides(taste, pairs)
        return (chosen - rejected) @ flat

    def learn(self, taste: str, pairs: Sequence[int], begin: torch.Tensor | None = None) -> torch.Tensor:
        """Return how far B moves in one pass over the pairs, by default from zero: DPO with the chosen answer's NLL."""
        align, chance = self._align, random.Random(f"{pairs}")
        size = self._gradients[0].shape[1]
        flat = torch.zeros(size) if begin is None else begin.clone()
        optimizer = torch.optim.AdamW([flat.requires_grad_(True)], align.learning_rate, weight_decay=0.0)
        for at in range(0, len(pairs), align.micro_batch_pairs):
            fresh = list(pairs[at : at + align.micro_batch_pairs])
            again = chance.sample(list(pairs[:at]), min(at, round(len(fresh) * align.replay_share)))
            chosen, rejected, lengths = self._sides(taste, fresh + again)
            with torch.no_grad():
                apart = chosen - rejected
                slopes = align.beta * torch.sigmoid(-align.beta * (apart @ flat))
                sums = slopes @ apart + (align.sft_weight / lengths) @ chosen
                flat.grad = -sums / len(lengths)
                torch.nn.utils.clip_grad_norm_([flat], MAX_GRAD_NORM)
                optimizer.param_groups[0]["lr"] = align.learning_rate * min(1.0, len(lengths) / align.micro_batch_pairs)
            optimizer.step()
        moved = flat.detach() if begin is None else flat.detach() - begin
        return moved
