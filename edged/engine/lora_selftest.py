"""The self-test of LoRA at start: two adapters in mixed batches against transformers' own forward, and a small DPO
step in both ways of units against autograd. What fails is the reason why the model is not trained."""

import contextlib
import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import edged
from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.decoder import LoraParameters, LoraRows, with_scaling
from edged.align.dpo.loss import answer_logps, preference_loss
from edged.align.dpo.step import DpoStep
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import TokenPair
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import attention_over, attention_pass
from edged.engine.kv.state import ZEROS
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.inspection import like_own, own_logits
from edged.engine.model.layer_access import LayerTap, PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import capture_plan_of, segments_of
from edged.runtime import logs
from edged.runtime.durable import write_whole
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings

log = logging.getLogger("edged.engine")
PASSED = "lora_selftest.json"
"""The file of a data folder that says which self-test was passed last, and what linears it unwrapped."""
_PROMPT, _CHOSEN, _REJECTED = 5, 3, 4
_PAGE, _PAGES = 4, 8
_WINDOW = 8
"""Tokens of a window: fewer than the pair's, so that a layer's units pass gradients to each other."""
_UPDATE = 0.1
"""Standard deviation of the adapters' B, which make updates about half as large as the base's outputs."""
_ROUNDING = 0.25
"""Largest difference of gradients in 16 bits, relative to their norm; a part that is lost makes more."""


def selftest_once(model: ServedModel, align: AlignSettings, slots: int, folder: Path, device: str) -> None:
    """Do as `selftest_lora` does. Where `folder` says that all of it was passed on `device`, only unwrap what it did.

    What was passed is kept in `folder`, unless that cannot be written.
    """
    file, subject, before = folder / PASSED, _subject(model, align, slots, device), model.adaptable
    keeps_lean = model.shape.keeps_lean
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        passed = json.loads(file.read_text("utf-8"))
        if passed["subject"] == subject:
            if passed["unwrapped"]:
                model.adaptable -= set(passed["unwrapped"])
                model.attach_lora(align, slots)
            return
    selftest_lora(model, align, slots)
    if not model.trainable_error and model.shape.keeps_lean == keeps_lean:
        passed = {"subject": subject, "unwrapped": sorted(before - model.adaptable)}
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(passed))


def _subject(model: ServedModel, align: AlignSettings, slots: int, device: str) -> str:
    """Return a hash of what the self-test computes with: model, device, adapters, edged's and the model's code, and the
    versions of all that is installed. Of weights it has `ServedModel.fingerprint`."""
    about = (
        *(model.fingerprint, model.config.to_json_string(), model.dtype, device, min(slots, 2)),
        *(align.rank, align.alpha, align.target_modules, _installed(), _code(Path(edged.__file__).parent)),
        _code(Path(inspect.getfile(type(model.model))).parent),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _installed() -> list[str]:
    """Return the names of installed packages with their versions."""
    return sorted(found.name for place in sys.path for found in Path(place).glob("*.dist-info"))


@cache
def _code(folder: Path) -> str:
    """Return a hash of the code below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def selftest_lora(model: ServedModel, align: AlignSettings, slots: int) -> None:
    """Try a model with LoRA attached. Linears that get no gradient are unwrapped; `trainable_error` says what fails.

    Where adapters do not even answer right, all linears are: the base alone is served.
    """
    if not model.lora.linears:
        return
    # No pair may end for its loss; the units are the same for any loss.
    align = align.model_copy(update={"loss_threshold": 0.0, "loss": "sigmoid"})
    name, states = model.shape.architecture, [_adapter(model, align, index) for index in range(min(slots, 2))]
    if why := _failure(partial(_mixed_batches, model, states)):
        model.adaptable = frozenset()
        model.attach_lora(align, slots)
        model.trainable_error = f"{name} is served without adapters, and not trained: with them {why}"
    elif not model.trainable_error:
        ids = _tokens(model, _PROMPT + _CHOSEN + _REJECTED, 0)
        prompt, chosen, rejected = (tuple(part.tolist()) for part in np.split(ids, [_PROMPT, _PROMPT + _CHOSEN]))
        pair = TokenPair(0, states[0].name, prompt, chosen, rejected)
        dead: list[str] = []
        if why := _failure(partial(_dpo_steps, model, align, states[0], pair, dead)):
            model.trainable_error = f"{name} is served, not trained: {why}"
        elif dead:
            model.adaptable -= set(dead)
            model.attach_lora(align, slots)
            selftest_lora(model, align, slots)


def _failure(check: Callable[[], str]) -> str:
    """Return what `check` says; an error that it ends with is the reason, as it would be every request's or step's."""
    try:
        return check()
    except Exception as error:
        return f"the self-test ended with {type(error).__name__}: {logs.first_line(error)}"


def _adapter(model: ServedModel, align: AlignSettings, index: int) -> AdapterState:
    """Return an adapter whose A and B are random."""
    shapes = {name: (linear.in_features, linear.out_features) for name, linear in model.lora.linears.items()}
    spec = LoraSpec(shapes, align.rank, align.alpha, "", model.fingerprint, ())
    # The name seeds the weights: with others, rounding in 16 bits may choose other experts.
    state = AdapterState(f"trial {index}", spec.form, Live(Settings(align=align)), model.device)
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for _, b in state.weights.values():
            b.copy_(torch.empty(b.shape).normal_(0.0, _UPDATE, generator=generator))
    return state


def _tokens(model: ServedModel, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.shape.vocab_size, count)


def _adapted(model: ServedModel, state: AdapterState | None, ids: np.ndarray, attention: str) -> torch.Tensor:
    """Return the logits of transformers' own forward, with an adapter's leaves."""
    token_ids = torch.as_tensor(ids, device=model.device)
    if state is None:
        return own_logits(model.model, token_ids, attention)
    weights = with_scaling(state.weights, state.form.scalings, model.dtype)
    with model.lora.training([LoraRows(0, len(ids), LoraParameters(weights, state.form.scalings, {}))]):
        return own_logits(model.model, token_ids, attention)


def _mixed_batches(model: ServedModel, states: list[AdapterState]) -> str:
    """Answer for all adapters and the base at once, in chunks and decodes; return what is wrong, or ""."""
    every = [*states, None]
    kv = model.new_kv(len(every) * _PAGES + 1, _PAGE, len(every))
    texts = [_tokens(model, 9, seed) for seed in range(len(every))]
    got: list[list[torch.Tensor]] = [[] for _ in every]
    for slot, adapter in enumerate(states):
        model.lora.load(slot, adapter.weights, adapter.form.scalings)
    with torch.inference_mode():
        for stops in ([5, 8, 3], [9, 9, 9]):
            segments = []
            for index, (state, ids, stop) in enumerate(zip(every, texts, stops, strict=False)):
                first = sum(map(len, got[index]))
                pages = np.arange(_PAGES) + index * _PAGES + 1
                slot = NO_SLOT if state is None else index
                kept = (index + 1 if first else ZEROS, index + 1)
                segments.append(Segment(ids[first:stop], first, pages, slot, position=first, states=kept))
            batch = pack(segments, kv, model.device)
            rows = torch.arange(batch.input_ids.shape[1], device=model.device)
            with attention_pass(attention_over(batch, kv)), model.lora.packed(batch.runs):
                logits = model.forward(batch.input_ids, batch.position_ids, rows).float()
            for own, segment in zip(got, segments, strict=True):
                own.append(logits[segment.rows])
        right = [
            like_own(model, torch.cat(own), partial(_adapted, model, state, ids))
            for own, state, ids in zip(got, every, texts, strict=True)
        ]
    return "" if all(right) else "a mixed batch answers differently from its own attention"


def _dpo_steps(model: ServedModel, align: AlignSettings, state: AdapterState, pair: TokenPair, dead: list[str]) -> str:
    """Compute a step's gradient by both ways of units; return what is wrong, or "".

    Where linears get no gradient by autograd, their names are put into `dead`, and no step is computed.
    """
    # The reference's log-probabilities are the policy's own, so that the loss is far from flat.
    answered = cache(partial(_answer_logps, model, state, pair))
    known = [float(logp.detach()) for logp in answered("eager")]
    pair = replace(pair, ref_chosen_logp=known[0], ref_rejected_logp=known[1])
    towards, away = preference_loss(answer_logps(known, known, (_CHOSEN, _REJECTED)), align).coefficients

    @cache
    def own(attention: str) -> torch.Tensor:
        chosen, rejected = answered(attention)
        found = torch.autograd.grad(towards * chosen + away * rejected, state.parameters(), allow_unused=True)
        dead[:] = [name for name, a in zip(state.weights, found[::2], strict=True) if a is None]
        return torch.cat([gradient.flatten() for gradient in found if gradient is not None])

    wanted = own("eager")
    if dead:
        return ""

    def check(recompute: Recompute) -> str:
        settings = align.model_copy(update={"window_tokens": _WINDOW if recompute == "full" else pair.num_tokens})
        got = _gradients(model, settings, AdapterStep(state, [pair], []), recompute)
        if like_own(model, got, own, _ROUNDING):
            return ""
        return (
            f"a DPO step's gradient differs from autograd's by {(got - wanted).norm() / wanted.norm():.2g} of its norm"
        )

    if why := check("full") or check("none"):
        return why
    # align.recompute can be changed later.
    if why := _failure(partial(check, "selective")):
        log.warning('steps do not keep what align.recompute = "selective" does: %s', why)
        model.shape = replace(model.shape, keeps_lean=False)
    return ""


def _answer_logps(model: ServedModel, state: AdapterState, pair: TokenPair, attention: str) -> list[torch.Tensor]:
    """Return the log-probabilities of a pair's answers by transformers' own forward, with a graph."""
    logps = []
    with torch.enable_grad():
        for answer in (pair.chosen, pair.rejected):
            logits = _adapted(model, state, np.array((*pair.prompt, *answer)), attention)
            targets = torch.tensor(answer, device=model.device)[:, None]
            logps.append(logits[_PROMPT - 1 : -1].log_softmax(-1).gather(1, targets).sum())
    return logps


def _gradients(
    model: ServedModel, align: AlignSettings, adapter_step: AdapterStep, recompute: Recompute
) -> torch.Tensor:
    """Run a step's forward and units up to the optimizer's; return the gradients of all A and B in one row."""
    kv, free = model.new_kv(_PAGES, _PAGE, steps=1), iter(range(1, _PAGES))
    tap = LayerTap(model)
    step = DpoStep([adapter_step], PagedDecoder(model, kv), align, lambda _pages: None, _PAGE * _PAGES, recompute)
    model.lora.load(0, adapter_step.state.weights, adapter_step.state.form.scalings)
    try:
        while step.micro_batch.tokens_left or step.units_left()[0][0] != "step":
            if not step.micro_batch.tokens_left:
                step.run_unit()
                continue
            size = min(step.micro_batch.tokens_left, _WINDOW)
            pieces = step.micro_batch.next_pieces(size)
            slots, states = {adapter_step.adapter: 0}, (1, 2)
            segments = segments_of(pieces, slots, _PAGE, lambda count: list(islice(free, count)), states)
            with torch.inference_mode():
                batch = pack(segments, kv, model.device)
                tap.arm([capture_plan_of(step.micro_batch, pieces, segments, model.device)])
                with attention_pass(attention_over(batch, kv)), model.lora.packed(batch.runs):
                    model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
                tap.disarm()
            step.micro_batch.advance(size)
    finally:
        tap.remove()
    return torch.cat([gradient.flatten() for both in adapter_step.gradients.values() for gradient in both])
