"""Which models are served and trained: tiny random ones of every architecture, against transformers' own forward.

    python -m benchmarks.models [NAME ...] [--dtype bfloat16] [--results FILE] [--max-s SECONDS] [--write ROUNDED]

Each runs through edged's engine in a process of its own, about three seconds long. Served: greedy answers, with a
prompt longer than every window, one whose beginning is in the cache, and two at once, have transformers' numbers; of a
wrapper with towers those of the whole wrapper.
Trained: three pairs, each one step, have the gradient that autograd gives the weights that LoRA changes, and the
adapter's answers are those of a model with these weights. Results are added to FILE, and models that are in it are not
run again, so that a run can be made in parts of SECONDS; `--write` makes docs/models.md of them and of ROUNDED, a FILE
in bfloat16, once all are there.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.support.architectures import ARCHITECTURES, PLACEHOLDERS, Architecture
from benchmarks.support.checkout import ROOT
from benchmarks.support.local_engine import LocalEngine
from edged.align.adapters import adapter
from edged.align.adapters.adapter import AdapterState
from edged.align.feedback.pair import TokenPair
from edged.engine.model.loading import ModelRefused
from edged.models.wrapper_names import text_name

PAGE = ROOT / "docs" / "models.md"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of a log-probability, in nats, and of a gradient, relative to its norm."""
_TOKENS = 24
_LONGEST_S = 60.0
_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"device": "cpu"},
    "cache": {"page_size": 8, "memory_mb": 16},
    "serving": {"max_batch_tokens": 48},
    "align": {
        "micro_batch_pairs": 1, "replay_share": 0.0, "window_tokens": 32, "loss_threshold": 0.0, "rank": 4,
        "alpha": 8.0, "sft_weight": 0.0, "practice": False,
    },
    "guard": {"held_out_share": 0.0},
    "feedback": {"quarantine": False},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one architecture."""

    name: str
    served: str
    """ "yes", "refused", or what was wrong."""
    trained: str = ""
    """ "yes", "no", or what was wrong."""
    reason: str = ""
    """Why it is refused or not trained, as said at start."""
    adapted: float = 0.0
    """Share of the layers' weights under LoRA."""
    logp_nats: float = 0.0
    gradient: float = 0.0
    """Largest difference of a log-probability, and of a gradient."""
    rounding_nats: float = 0.0
    """Largest difference of a log-probability by transformers' own forward in this dtype."""


def examine(architecture: Architecture, dtype: str = "float32") -> Row:
    """Serve and train an architecture's tiny model in this process."""
    name, exact = architecture.name, TOLERANCE[dtype]
    # What is compared are gradients, not what clipping leaves of them.
    adapter.MAX_GRAD_NORM = 1e9
    settings = copy.deepcopy(_SETTINGS)
    settings["model"]["dtype"] = dtype
    # Threads of transformers may still write when a model is refused.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "model"
        architecture.save(folder)
        gradients: list[_Gradient] = []
        try:
            made = LocalEngine(folder, settings, Path(temporary) / "data", lambda _engine: _keep(gradients))
        except ModelRefused as error:
            return Row(name, "refused", reason=str(error).replace(str(folder), "DIR"))
        try:
            model = made.engine.model
            auto = AutoModelForImageTextToText if architecture.text else AutoModelForCausalLM
            twin = folder.with_name("model-plain")
            folder = twin if twin.exists() else folder
            own = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            own.requires_grad_(False)
            served, rounding = _served(made, own), _rounding(own, folder, dtype)
            told = _told(served, max(exact, 2 * rounding))
            row = Row(name, told, adapted=model.shape.adapted_share, logp_nats=served, rounding_nats=rounding)
            if model.trainable_error:
                return replace(row, trained="no", reason=model.trainable_error)
            try:
                worst, adapted = _trained(made, own, gradients)
            except Exception as error:  # the row says it
                return replace(row, trained=f"{type(error).__name__}: {error}")
            row = replace(row, gradient=worst, logp_nats=max(served, adapted))
            if rounding > exact:
                why = f"rounding alone moves its log-probabilities by {rounding:.2g} nats"
                return replace(row, trained="yes", reason=f"{why}; its gradient was compared at start, in {dtype}")
            return replace(row, trained=_told(max(worst, adapted), exact))
        finally:
            made.close()


def _told(worst: float, exact: float) -> str:
    return "yes" if worst <= exact else f"differs by {worst:.2g}"


def _ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, PLACEHOLDERS[0], count).tolist()


def _served(made: LocalEngine, own: PreTrainedModel) -> float:
    """Return the largest difference of greedy answers: alone, over a cached beginning, and two at once."""
    long = _ids(70, 1)
    first = _asked(made, own, {"alone": long})
    cached = _asked(made, own, {"cached": long[:64] + _ids(11, 2)})
    return max(first, cached, _asked(made, own, {"short": _ids(9, 3), "longest": _ids(150, 4)}))


def _rounding(own: PreTrainedModel, folder: Path, dtype: str) -> float:
    """Return how far transformers' own forward in `dtype` is from the one in float32 at the likeliest tokens."""
    if dtype == "float32":
        return 0.0
    rounded = type(own).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    worst = 0.0
    for seed, count in enumerate((70, 150) * 4):
        with torch.no_grad():
            exact, other = (_logps(model, _ids(1, seed), _ids(count, seed)) for model in (own, rounded))
        worst = max(worst, float((exact.amax(-1) - other.gather(1, exact.argmax(-1)[:, None])[:, 0]).abs().max()))
    return worst


def _asked(made: LocalEngine, own: PreTrainedModel, prompts: dict[str, list[int]], adapter: str | None = None) -> float:
    """Return how far the log-probabilities of answers are from `own`, and its likeliest tokens from theirs."""
    for name, prompt in prompts.items():
        made.ask(name, prompt, _TOKENS, adapter, logprobs=1)
    made.wait(_LONGEST_S)
    worst = 0.0
    for name, prompt in prompts.items():
        events = made.recorder.tokens[name]
        answer = [event.token_id for event in events]
        with torch.no_grad():
            logps = _logps(own, prompt, answer)
        chosen = logps.gather(1, torch.tensor(answer)[:, None])[:, 0]
        said = torch.tensor([event.logprob for event in events])
        worst = max(worst, float((chosen - said).abs().max()), float((logps.amax(-1) - chosen).max()))
    return worst


def _logps(own: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities [answer, vocab] of transformers' own forward."""
    logits = own(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of an adapter's step, and the weights that it is of."""

    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]]
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]


def _keep(into: list[_Gradient]) -> None:
    """Keep the gradient of every step of this process."""
    take = AdapterState.step

    def step(state: AdapterState, gradients: Any, pairs: int, *more: Any, **named: Any) -> float:
        kept = {name: (a / pairs, b / pairs) for name, (a, b) in gradients.items()}
        weights = {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in state.weights.items()}
        into.append(_Gradient(kept, weights))
        return take(state, gradients, pairs, *more, **named)

    AdapterState.step = step  # type: ignore[method-assign, assignment]


def _trained(made: LocalEngine, own: PreTrainedModel, steps: list[_Gradient]) -> tuple[float, float]:
    """Learn three pairs; return the largest difference of a gradient, and of the adapter's answers."""
    lengths = ((30, 25, 40), (21, 33, 12), (9, 8, 10))
    pairs = [
        TokenPair(index, "ann", *((*_ids(count, 10 * index + part),) for part, count in enumerate(parts)))  # type: ignore[arg-type]
        for index, parts in enumerate(lengths)
    ]
    for pair in pairs:
        made.submit_pairs([pair])
        made.recorder.wait_for(lambda: pair.pair_id in made.recorder.outcomes, "a pair's step", _LONGEST_S)  # noqa: B023
        if (found := made.recorder.outcomes[pair.pair_id]).state != "trained":
            raise RuntimeError(f"a pair was {found.state}: {found.reason}")
    align = made.engine.settings.align
    worst = max(
        _difference(own, step, pair, align.beta, align.alpha / align.rank)
        for step, pair in zip(steps, pairs, strict=True)
    )
    _, weights = made.engine.weights("ann").result(_LONGEST_S)
    names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in weights}
    newest = {name: tuple(weights[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB") for name in names}
    return worst, _asked(made, _merged(own, newest, align.alpha / align.rank), {"adapted": _ids(70, 1)}, "ann")


def _merged(own: PreTrainedModel, weights: Any, scaling: float) -> PreTrainedModel:
    """Return a copy whose linears hold W + scaling * B A, with a gradient, whatever they do with it."""
    merged = copy.deepcopy(own).requires_grad_(False)
    for name, (a, b) in weights.items():
        weight = _linear(merged, name).weight
        weight.data += scaling * b.float() @ a.float()
        weight.requires_grad_()
    return merged


def _linear(own: PreTrainedModel, name: str) -> Any:
    """Return a linear by the text decoder's name, also of a wrapper with towers."""
    return next(module for path, module in own.named_modules() if text_name(path) == name)


@torch.enable_grad()
def _difference(own: PreTrainedModel, step: _Gradient, pair: TokenPair, beta: float, scaling: float) -> float:
    """Return how far a step's gradient is from autograd's, relative to its norm: where G is the gradient of a merged
    weight, that of A is scaling * B^T G and that of B scaling * G A^T."""
    merged = _merged(own, step.weights, scaling)
    answers = [list(pair.chosen), list(pair.rejected)]
    margin = torch.zeros(())
    for sign, answer in zip((1, -1), answers, strict=True):
        index = torch.tensor(answer)[:, None]
        for model, part in ((merged, sign), (own, -sign)):
            margin = margin + part * _logps(model, list(pair.prompt), answer).gather(1, index).sum()
    names = list(step.weights)
    loss = -torch.nn.functional.logsigmoid(beta * margin)
    found = torch.autograd.grad(loss, [_linear(merged, name).weight for name in names])
    apart, size = 0.0, 0.0
    for name, gradient in zip(names, found, strict=True):
        (a, b), got = step.weights[name], step.gradients[name]
        for mine, right in zip(got, (scaling * b.t() @ gradient, scaling * gradient @ a.t()), strict=True):
            apart, size = apart + float((mine - right).norm()) ** 2, size + float(right.norm()) ** 2
    return (apart / size) ** 0.5


# -- the command -------------------------------------------------------------------------------------------------------


def _in_child(architecture: Architecture, dtype: str) -> Row:
    """Examine in a process of its own, which leaves nothing behind in this one."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, architecture, dtype))
    child.start()
    there.close()
    try:
        row = here.recv() if here.poll(2 * _LONGEST_S) else Row(architecture.name, "took too long")
    except EOFError:
        row = Row(architecture.name, "its process ended")
    child.kill()
    child.join()
    return row


def _send(to: Connection, architecture: Architecture, dtype: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    try:
        row = examine(architecture, dtype)
    except Exception as error:  # the row says it
        row = Row(architecture.name, f"{type(error).__name__}: {error}")
    to.send(row)


def page(rows: dict[str, Row], rounded: dict[str, Row]) -> str:
    """Return docs/models.md, from rows in float32 and in bfloat16."""
    import transformers

    run = [known for known in ARCHITECTURES if known.checkpoints]
    others = [known for known in ARCHITECTURES if not known.checkpoints and known.stored is None]
    forms = [known for known in ARCHITECTURES if known.stored is not None]
    told = rows.values()
    served = sum(row.served == "yes" for row in told)
    trained = sum(row.trained == "yes" for row in told)
    refused = sum(row.served == "refused" for row in told)
    return "\n".join((
        "# Models",
        "",
        "Which models edged serves and trains. A model shows at start what its layers ask of attention and cache, and",
        "two adapters and a small DPO step are tried on it. What does not work is refused, or served and not trained,",
        'with the reason: in the log, in `edged status` ("not learning") and in what a feedback waits for.',
        "",
        "Written by `python -m benchmarks.models` from tiny random models (float32 on the CPU, transformers",
        f"{transformers.__version__}): of {len(rows)} architectures and forms {served} are served and {trained}",
        f"trained exactly, {refused} are refused. Served: greedy answers have the log-probabilities of transformers'",
        "own forward within 1e-3 nats. Trained: the DPO gradient is autograd's within 1e-3 of its norm. *LoRA* is the",
        "share of the layers' weights that adapters change (of these tiny models); fused experts are not changed.",
        "",
        "Of a multimodal checkpoint the text decoder alone is loaded, served and trained; the towers take no memory,",
        "and a message with an image is refused. It is compared with the whole checkpoint by its own class. An",
        "exported adapter has that class's names, so that PEFT loads it over the released model; an import takes",
        "either's.",
        "",
        "Where layers keep a state from token to token (a convolution, a gated delta rule, Mamba-2), each running",
        "sequence has a slot for it, and a next turn goes on from a copy, one after each 64 tokens. Of such models",
        "drafts are not used, K/V is not pruned, and their backward units cover whole pairs.",
        "",
        "By architecture these are 48 of the 53 language-model pages of NVIDIA's Jetson AI Lab, 12 without multimodal",
        "ones and states. Many of those pages run packed checkpoints: the last table has the formats.",
        "",
        *_in_16_bits(rows, rounded),
        "## What people run on Jetsons",
        "",
        "| checkpoints | `model_type` | served | trained | LoRA | reason |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {known.checkpoints} | {known.name} | {_cells(rows[known.name])}" for known in run),
        "",
        "## Other decoders",
        "",
        "| `model_type` | served | trained | LoRA | reason |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {known.name} | {_cells(rows[known.name])}" for known in others),
        "",
        "## Quantized checkpoints",
        "",
        "bitsandbytes and torchao checkpoints are served and trained, and `model.quantize` makes them of plain ones",
        "([configuration](configuration.md)). Others are read without the packages that wrote them, and compared with",
        "dequantized twins. Weights of 4 bits (W4A16 of compressed-tensors, GPTQ, AWQ) stay packed, as torchao's int4",
        "with the checkpoint's numbers; columns in an order of their own (`desc_act`, `actorder`) are refused. FP8,",
        "MXFP4 and NVFP4 (also ModelOpt's) are dequantized tensor by tensor while loading, into what `model.quantize`",
        "makes if it is set. On a GPU the int4 of such checkpoints has not run yet: a product of each weight is",
        "compared there while loading.",
        "The experts of a mixture are packed, too, by `model.quantize` = int4 or int8, one tensor at a time; a token's",
        "experts are multiplied one after the other. In W4A16, GPTQ and AWQ they stay as they are stored, where",
        "checkpoints have each expert's matrices apart (Qwen, GLM, DeepSeek, Mixtral and most others; not GPT-OSS,",
        "Granite, Gemma 4 and Qwen3-VL-MoE). bitsandbytes leaves them plain. A model is refused where such plain ones",
        "are most of it.",
        "A GGUF file is no checkpoint: `edged models convert FILE FOLDER` makes one of it, in bfloat16, where every",
        "number of the file is understood. `edged bench memory -m FILE` says the memory.",
        "",
        "| `quantization_config` | served | trained | LoRA | reason |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {known.name.removeprefix('stored as ')} | {_cells(rows[known.name])}" for known in forms),
        "",
    ))  # fmt: skip


def _in_16_bits(rows: dict[str, Row], rounded: dict[str, Row]) -> list[str]:
    """Return the section on bfloat16: how many are as in float32, and which are not."""
    same = [
        name for name, row in rows.items() if (row.served, row.trained) == (rounded[name].served, rounded[name].trained)
    ]
    moved = sum(row.rounding_nats > TOLERANCE["bfloat16"] for row in rounded.values())
    others = [f"- {name}: {_cells(rounded[name])}".rstrip(" |") for name in rows if name not in same]
    return [
        "## In bfloat16",
        "",
        "Compared in bfloat16, by 0.1 nats and 0.1 of a gradient's norm to the model in float32, or by twice what",
        "transformers' own bfloat16 is away from it where that is more, as in mixtures of experts whose routers choose",
        f"others ({moved} models; there the start alone compares gradients, in bfloat16). As in float32 are",
        f"{len(same)} of {len(rows)}" + ("; the others:" if others else "."),
        "",
        *others,
        *([""] if others else []),
    ]  # fmt: skip


def _cells(row: Row) -> str:
    share = f"{row.adapted:.0%}" if row.served == "yes" else ""
    return f"{row.served} | {row.trained} | {share} | {row.reason.replace('|', '/')} |"


def _read(results: Path) -> dict[str, Row]:
    rows = (Row(**json.loads(line)) for line in results.read_text().splitlines())
    return {row.name: row for row in rows}


def main() -> int:
    """Run the architectures that are named, or all that FILE lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures (default all)")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--results", type=Path, help="JSON lines that rows are added to, and whose rows are not run")
    parser.add_argument("--max-s", type=float, default=float("inf"), help="begin no further one after so many seconds")
    write = f"write {PAGE.relative_to(ROOT)}, with these results in bfloat16, once all rows are there"
    parser.add_argument("--write", type=Path, metavar="ROUNDED", help=write)
    options = parser.parse_args()
    known = {architecture.name: architecture for architecture in ARCHITECTURES}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such architecture: {', '.join(unknown)}; there are {', '.join(known)}")
    rows = _read(options.results) if options.results and options.results.exists() else {}
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    ends_s = time.monotonic() + options.max_s
    for name in options.names or known:
        if name in rows or time.monotonic() > ends_s:
            continue
        row = rows[name] = _in_child(known[name], options.dtype)
        print(f"{name}: served {row.served}, trained {row.trained or 'no'} "
              f"({row.logp_nats:.1e} nats, gradient {row.gradient:.1e}) {row.reason}", flush=True)  # fmt: skip
        if options.results:
            with options.results.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")
    if options.write and rows.keys() >= known.keys():
        PAGE.write_text(page(rows, _read(options.write)))
    fine = {"yes", "no", "refused", ""}
    return int(any(row.served not in fine or row.trained not in fine for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
