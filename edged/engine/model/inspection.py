"""The inspection of a model at start: a few forwards of few tokens show what its layers ask of attention and cache,
which of its linears LoRA can wrap, and that its answers over pages are its own.

What a layer asks for decides; numbers are compared last, since in 16 bits a layer's lost state can look like rounding.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import eager_mask

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import (
    IMPLEMENTATION,
    CannotPage,
    attention_over,
    attention_pass,
    causal_mask,
    current_pass,
)
from edged.engine.kv.state import StateSize, StateStore
from edged.engine.kv.store import LayerHeads, store_of
from edged.engine.model.loading import ModelRefused
from edged.engine.model.mixers import CACHE_NAMES, StateSpy
from edged.engine.model.quantization import is_linear
from edged.runtime import logs

log = logging.getLogger("edged")

_TOKENS = 16
_LONGEST_WINDOW = 128
"""Numbers are compared over more tokens than the shortest window, up to this one; masks beyond every window."""
_MASKED = "edged_masked"
_ANSWERED = ("update", "get_seq_length", "get_query_offset", "get_mask_sizes", "get_max_length")
"""Methods of transformers' `Cache` that keys and values in pages answer; mixers' calls are answered by `StateSpy`."""


class InspectedModel(Protocol):
    """The part of `ServedModel` that its inspection needs, which comes before the rest is known."""

    model: PreTrainedModel
    config: Any
    device: torch.device
    dtype: torch.dtype
    layers: nn.ModuleList
    norm: nn.Module
    quantized: bool
    states: tuple[StateSize, ...]

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Compute logits of a packed batch: see `ServedModel.forward`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply final norm and head: see `ServedModel.logits`."""
        ...


@dataclass(frozen=True, slots=True)
class Inspection:
    """The findings of an inspection."""

    layer_heads: tuple[LayerHeads | None, ...]
    """The heads of each layer; None for one that does not attend."""
    window: int | None
    """The shortest sliding window; None if there is none."""
    sinks: bool
    """Whether a layer has sinks."""
    tuple_items: int
    """Number of items of the tuples that layers return; 0: they return a tensor."""
    adaptable: tuple[str, ...]
    """Linears in decoder layers that a forward calls once, with all rows, and that give a tensor in its dtype."""
    untrainable: str
    """Why the model is not trained; "" if nothing speaks against it."""


class AttentionSpy:
    """An attention backend that records every call with its query, key and value, and returns the query."""

    def __init__(
        self, states: Mapping[nn.Module, StateSize] = MappingProxyType({}), updated: Sequence[int] = ()
    ) -> None:
        self.states, self.updated = states, updated
        """Modules with a state and its sizes, in the order of their layers, and the layers that keep K/V."""
        self.seen: list[tuple[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.masks: list[torch.Tensor | None] = []
        """The masks that the model made for its own attention, where `_MASKED` asks for them."""

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ModelRefused for keys and values that cannot be paged."""
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise ModelRefused(
                f"layer {call.layer} has values of {list(value.shape[::2])} heads and numbers for keys of "
                f"{list(key.shape[::2])}: values may be shorter than keys, not longer or of other heads"
            )
        self.seen.append((call, query, key, value))
        return query.transpose(0, 1).clone()


class CacheSpy(StateSpy, Cache):
    """A cache that claims `past` tokens and keeps nothing.

    Calls that neither pages nor slots for states answer raise ModelRefused.
    """

    def __init__(self, past: int = 0, before: Mapping[nn.Module, StateSize] | None = None) -> None:
        super().__init__(layers=[], before=before)
        self._past = past
        self._updated: list[int] = []
        """Layers that keep keys and values."""

    def __getattribute__(self, name: str) -> Any:
        """Raise ModelRefused for a method that is answered neither to attention nor to mixers."""
        answered = name in _ANSWERED or name.startswith("_") or hasattr(StateSpy, name)
        if not answered and callable(getattr(Cache, name, None)):
            raise ModelRefused(
                f'its layers call "{name}" of their cache: beside keys and values they keep something of their own '
                "from token to token (the state of a convolution or recurrence, an index), which edged does not keep"
            )
        return super().__getattribute__(name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what came."""
        self._updated.append(layer_idx)
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return the claimed tokens."""
        return self._past

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys, and the first one."""
        return self._past + query_length, 0


def _masked_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Record the mask that the model made for its own attention."""
    current_pass().masks.append(attention_mask)  # type: ignore[attr-defined]
    return query.transpose(1, 2)[..., : value.shape[-1]].clone(), None


AttentionInterface.register(_MASKED, _masked_attention)
AttentionMaskInterface.register(_MASKED, eager_mask)


@contextmanager
def _attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model attend by `implementation`, afterwards by the paged one again."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def own_logits(model: PreTrainedModel, ids: torch.Tensor, attention: str) -> torch.Tensor:
    """Return the logits [n, vocab] in fp32 that an attention of transformers' own gives the tokens `ids` [n]."""
    with _attention_of(model, attention):
        positions = torch.arange(len(ids), device=ids.device)
        out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return out.logits[0].float()


def spy_on(model: PreTrainedModel, past: int = 0, before: Mapping[nn.Module, StateSize] | None = None) -> AttentionSpy:
    """Run a forward with an attention that attends to nothing and a cache that claims `past` tokens.

    Modules whose sizes of states are known from `before` must go on from these.

    Raises ModelRefused, with the call's name, for what pages do not answer, and whatever the model raises.
    """
    cache, named = CacheSpy(past, before), inspect.signature(type(model).forward).parameters
    spy = AttentionSpy(cache._states, cache._updated)
    # Where there are several, the others are deprecated names of the first.
    names = [name for name in CACHE_NAMES if name in named][:1]
    ids, positions = tokens_for(model, _TOKENS)
    with torch.inference_mode(), attention_pass(spy), cache._following(model):
        given = dict.fromkeys(names, cache)
        model(input_ids=ids[None], position_ids=past + positions[None], use_cache=bool(names), **given)
    return spy


def tokens_for(model: PreTrainedModel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` token ids and their positions, on the model's device."""
    positions = torch.arange(count, device=model.device)
    return (positions + 7) % int(model.config.get_text_config().vocab_size), positions


_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "embedding_norm")


def find_decoder(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module, Mapping[nn.Module, StateSize]]:
    """Return the list of decoder layers and the final norm, by the names that transformers' decoders use, and the
    modules that keep a state.

    Raises ModelRefused where there is none, or where the cache is asked for what pages do not answer.
    """
    body, name, failed, states = model.base_model, type(model).__name__, "", AttentionSpy().states
    try:
        states = spy_on(model).states
        if states:
            spy_on(model, before=states)
    except ModelRefused as error:
        raise ModelRefused(f"{name} cannot be served: {error}") from None
    except Exception as error:
        log.debug("%s: %s", name, error)
        # What a model on "meta" cannot compute is no reason: see `BaseShape.of_config`.
        told = isinstance(error, CannotPage) or "meta tensor" in str(error)
        own = "its layers need a mask or a cache of their own: docs/models.md has models that are served"
        failed = f"{name} cannot be served: {logs.first_line(error) if told else own}"
    layers = next((found for n in _LAYERS if isinstance(found := getattr(body, n, None), nn.ModuleList)), None)
    norm = next((getattr(body, n) for n in _NORMS if hasattr(body, n)), None)
    if layers is None or norm is None:
        raise ModelRefused(
            f"{type(body).__name__} cannot be served: no list of decoder layers with a final norm was found in it (it "
            "is not a decoder-only model that edged knows how to page, or wraps one: give the text decoder alone)"
        )
    if failed:
        raise ModelRefused(failed)
    return layers, norm, states


def fix_frequencies(model: nn.Module) -> None:
    """Fix rotary embeddings to their first frequencies, which never change within `max_positions`.

    Dynamic ones would ask the device, in every forward, for the largest position, which no capture may do.
    """
    for module in model.modules():
        found = getattr(module, "rope_type", "")
        kinds = found.values() if isinstance(found, dict) else [found]
        if any(kind == "longrope" or "dynamic" in kind for kind in kinds):
            plain = inspect.unwrap(type(module).forward)
            module.forward = torch.no_grad()(partial(plain, module))


def sizes_of(model: PreTrainedModel) -> tuple[tuple[LayerHeads | None, ...], tuple[StateSize, ...]]:
    """Return the heads of each layer of a model, which may be on "meta", and the states that it keeps.

    Raises ModelRefused for all that a start refuses, but for what shows in numbers alone.
    """
    fix_frequencies(model)
    layers, _, states = find_decoder(model)
    try:
        return _heads_of(layers, spy_on(model)), tuple(states.values())
    except ModelRefused as error:
        raise ModelRefused(f"{type(model).__name__} cannot be served: {error}") from None


def inspect_model(model: InspectedModel) -> Inspection:
    """Inspect a model whose layers and norm are known. Raises ModelRefused with the reason."""
    name = type(model.model).__name__
    spy, adaptable, hidden, out = _call_layers(model)
    try:
        heads = _heads_of(model.layers, spy)
        windows = {call.window for call, *_ in spy.seen if call.window is not None}
        _check_masks(model, spy, windows)
        window = min(windows, default=None)
        why = "its head does more than norm, linear and soft cap" if _compare(model, heads, window) else ""
    except ModelRefused as error:
        raise ModelRefused(f"{name} cannot be served: {error}") from None
    if hidden.shape != (1, _TOKENS, model.config.hidden_size):
        why = f"its layers pass on several streams of hidden states ({list(hidden.shape)})"
    sinks = any(call.sinks is not None for call, *_ in spy.seen)
    items, untrainable = len(out) if isinstance(out, tuple) else 0, why and f"{name} is served, not trained: {why}"
    return Inspection(heads, window, sinks, items, adaptable, untrainable)


def _call_layers(model: InspectedModel) -> tuple[AttentionSpy, tuple[str, ...], torch.Tensor, Any]:
    """Run a forward with spies; return also `Inspection.adaptable`, and input and output of the first layer."""
    fits: defaultdict[str, list[bool]] = defaultdict(list)
    first: list[tuple[torch.Tensor, Any]] = []

    def see(name: str, _module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        plain = isinstance(out, torch.Tensor) and out.dtype == args[0].dtype == model.dtype
        fits[name].append(plain and args[0].numel() == _TOKENS * args[0].shape[-1])

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first.append((args[0] if args else kwargs["hidden_states"], out))

    inside = {module for layer in model.layers for module in layer.modules() if is_linear(module)}
    handles = [
        module.register_forward_hook(partial(see, name))
        for name, module in model.model.named_modules()
        if module in inside
    ]
    handles.append(model.layers[0].register_forward_hook(keep, with_kwargs=True))
    spy = spy_on(model.model)
    for handle in handles:
        handle.remove()
    return spy, tuple(name for name, calls in fits.items() if calls == [True]), *first[0]


def _heads_of(layers: nn.ModuleList, spy: AttentionSpy) -> tuple[LayerHeads | None, ...]:
    """Return the heads of each layer; None, in a model with states, for one that keeps a state, or nothing at all.

    Raises ModelRefused.
    """
    seen: dict[int, LayerHeads] = {}
    sources: dict[tuple[Any, ...], int] = {}
    for call, query, key, value in spy.seen:
        # What the spy holds stays alive: the same memory is the same keys.
        if call.sinks is not None and call.sinks.device.type != "meta" and call.sinks.isnan().any():
            raise ModelRefused(f"the sinks of layer {call.layer} are not numbers: download the checkpoint again")
        place = (*(part.untyped_storage()._cdata for part in (key, value)), key.storage_offset(), key.shape)
        seen[call.layer] = LayerHeads(query.shape[0], key.shape[0], key.shape[2], sources.setdefault(place, call.layer))
    if spy.states and not seen:
        raise ModelRefused(
            "none of its layers attends: edged serves layers with a state beside some with keys and values"
        )
    if sorted(seen) != (sorted(set(spy.updated)) if spy.states else list(range(len(layers)))):
        raise ModelRefused(
            f"{len(seen)} of its {len(layers)} layers use the attention interface "
            "(layers without attention, or with their own, need a cache that edged does not page)"
        )
    return tuple(seen.get(layer) for layer in range(len(layers)))


def _check_masks(model: InspectedModel, spy: AttentionSpy, windows: set[int]) -> None:
    """Check that the masks of the model's own attention are those of its windows, where each ends to see all tokens.

    Nothing is attended to, so that long windows cost as little as short ones. Raises ModelRefused.
    """
    if "chunked_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise ModelRefused("its chunked attention is not causal over all that precedes")
    longest = max_positions(model.config)
    for window in sorted(windows):
        past = window - _TOKENS // 2
        if not 0 < past <= longest - _TOKENS:
            continue
        with _attention_of(model.model, _MASKED):
            masks = spy_on(model.model, past).masks
        for (call, *_), mask in zip(spy.seen, masks, strict=True):
            own = torch.arange(past, past + _TOKENS, device=model.device)
            wanted = causal_mask(past + _TOKENS, own, call.window, model.dtype) == 0
            if mask is None or not torch.equal((mask == 0).expand(1, 1, *wanted.shape)[0, 0], wanted):
                raise ModelRefused(
                    f"layer {call.layer} does not attend causally to its latest {call.window or 'tokens'}, as it says"
                )


def _compare(model: InspectedModel, heads: tuple[LayerHeads | None, ...], window: int | None) -> bool:
    """Compare answers over pages, in one chunk and in two, with the model's own; return whether its head, computed
    alone, differs. Raises ModelRefused."""
    beyond = window + _TOKENS // 2 if window is not None and window <= _LONGEST_WINDOW else 0
    count = min(max(_TOKENS, beyond), max_positions(model.config)) // 2 * 2
    ids, _ = tokens_for(model.model, count)
    states = StateStore(2, model.states, model.dtype, model.device) if model.states else None
    kv = store_of(heads, 2, count, model.dtype, model.device, states)
    last: list[torch.Tensor] = []
    with torch.inference_mode():
        own = cache(partial(own_logits, model.model, ids))
        handle = model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0][0]))
        try:
            for size in (count, count // 2):
                got, ends = [], []
                for first in range(0, count, size):
                    token_ids = ids[first : first + size].tolist()
                    slots = (min(first, 1), 1)
                    segment = Segment(token_ids, first, np.array([1]), position=first, states=slots)
                    batch = pack([segment], kv, model.device)
                    rows = torch.arange(size, device=model.device)
                    with attention_pass(attention_over(batch, kv)):
                        got.append(model.forward(batch.input_ids, batch.position_ids, rows).float())
                    # Some models use their norm elsewhere, too: the head is given its last result.
                    ends.append(last[-1])
                if not like_own(model, torch.cat(got), own):
                    raise ModelRefused(
                        "over paged K/V it answers differently from its own attention "
                        "(its attention is not plainly causal, or its positions are not rotary)"
                    )
        finally:
            handle.remove()
        return not like_own(model, model.logits(torch.cat(ends)), own)


def like_own(
    model: InspectedModel, got: torch.Tensor, own: Callable[[str], torch.Tensor], rounding: float = 0.1
) -> bool:
    """Whether numbers are what `own` computes by one of transformers' attentions, but for rounding: in 16 bits, or
    quantized, up to the share `rounding` of their norm.

    The two may be further apart: where they round differently a model may choose other experts.
    """
    # Some quantized products round their input: a last bit of it can move them by a step.
    exact = model.dtype == torch.float32 and not model.quantized
    share = 1e-3 if exact else rounding
    attentions = ("eager", "sdpa") if model.model._supports_sdpa else ("eager",)
    # Not "above": a NaN is above nothing.
    return any(bool((got - wanted).norm() <= share * (wanted.norm() + 1e-6)) for wanted in map(own, attentions))


def max_positions(config: Any) -> int:
    """Return the longest context. LongRoPE changes the frequencies of the whole batch when one position passes the
    original context: up to there a sequence's K/V do not depend on the rest of the batch, so the context ends there."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            longest = min(longest, int(part.get("original_max_position_embeddings") or longest))
    return longest
