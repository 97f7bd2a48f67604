"""The import of PEFT adapters: safetensors files, checked against the served model before they are used.

Pickles are never opened: a file that is not safetensors is refused by its name, before any of it is read as data.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from edged.align.adapters.form import AdapterForm, LoraSpec, lora_config, measured, peft_name, served
from edged.models.whole_files import why_not_whole
from edged.models.wrapper_names import text_name
from edged.runtime import bounded_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 8 << 20
"""Most bytes that a safetensors file may hold beside its tensors."""
_DTYPES = ("F32", "F16", "BF16")
_INITIAL = ("gaussian", "eva", "orthogonal")
"""PEFT's ways to begin that leave the base model as it is, beside its default."""
_KEY, _MAX_KEYS, _LARGEST = re.compile(r"\^?(\w|\\?\.){1,200}"), 1024, 1e6
"""Keys of patterns, and the largest rank or alpha."""
_BY_HAND = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:lora_(A|B|magnitude_vector)|ia3_l)(?:\.(?!weight$)[^.]+)?(?:\.weight)?"
)
"""Names of an adapter's weights as they are in memory, with the adapter's name, or without PEFT's beginning."""


class ImportRefused(ValueError):
    """An adapter that cannot be imported; the message gives the problem and the way out."""


def read_adapter(folder: Path, spec: LoraSpec) -> tuple[dict[str, torch.Tensor], AdapterForm]:
    """Read a PEFT folder's weights by PEFT's names, in fp32, all finite, and the form that they have.

    Raises ImportRefused.
    """
    for name in _PICKLES:
        if (folder / name).exists() and not (folder / WEIGHTS).exists():
            way_out = "convert it where you trust it, with peft's model.save_pretrained(DIRECTORY)"
            pickle = f"{name} is a pickle, which can run any code when it is loaded"
            raise ImportRefused(f"{pickle}: only {WEIGHTS} is read; {way_out}")
    config = _config(folder / CONFIG)
    _check_config(config)
    if config.get("use_dora") and spec.row_norms is None:
        why = "its outputs are scaled by norms of the base's weights, which are quantized"
        way_out = 'train one without use_dora, or serve the plain checkpoint with model.quantize = ""'
        raise ImportRefused(f"use_dora = true is not supported here: {why}; {way_out}")
    weights, form = _weights(folder / WEIGHTS, config, spec)
    for name, tensor in (*weights.items(), *zip(form.shapes, _held(weights, form, spec), strict=True)):
        if not bool(tensor.isfinite().all()):
            limit = f"too large for {spec.dtype} as they are served (with its lora_alpha, DoRA also with its norms)"
            raise ImportRefused(f"{name} holds values that are not finite, or are {limit}")
    return weights, form


def _held(weights: Mapping[str, torch.Tensor], form: AdapterForm, spec: LoraSpec) -> Iterator[torch.Tensor]:
    """Yield what a slot would hold, in the order of the weights."""
    own = form.by_linear(list(weights.values()))
    norms = {linear: norm.cpu() for linear, norm in measured(own, form.scalings, spec.row_norms).items()}
    for linear, parts in served(own, norms).items():
        yield from (part.to(spec.dtype) for part in (*parts[:-1], parts[-1] * form.scalings[linear]))


def form_of(config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], spec: LoraSpec) -> AdapterForm:
    """Return the form of an adapter with PEFT's `config` and weights of the shapes `found`, by PEFT's names.

    Raises ImportRefused where it does not fit the model or the settings.
    """
    if config["peft_type"] == "IA3":
        return _ia3_form(found, spec)
    parts = ("A", "magnitude", "B") if config.get("use_dora") else ("A", "B")
    wanted = {linear: [peft_name(linear, part) for part in parts] for linear in spec.shapes}
    _check_names(set(found), {name for names in wanted.values() for name in names})
    begun = [names for names in wanted.values() if not found.keys().isdisjoint(names)]
    if missing := sorted({name for names in begun for name in names} - set(found)):
        raise ImportRefused(f"{missing[0]} is missing: {', '.join(parts[:-1])} and B of a linear belong together")
    ranks, alphas = _by_linear(config, "r", "rank_pattern"), _by_linear(config, "lora_alpha", "alpha_pattern")
    shapes: dict[str, tuple[int, ...]] = {}
    scalings = {}
    for linear, (fan_in, fan_out) in spec.shapes.items():
        names = wanted[linear]
        if names[0] not in found:
            continue
        rank = (*found[names[0]], 0)[0]
        if not 0 < rank <= spec.rank:
            way_out = f"raise align.rank, or train one of at most {spec.rank}"
            raise ImportRefused(f"its rank is {rank}, align.rank is {spec.rank}: {way_out}")
        needs = ((rank, fan_in), *[(fan_out,)] * (len(names) - 2), (fan_out, rank))
        for name, needed in zip(names, needs, strict=True):
            if found[name] != needed:
                way_out = f"this model needs {needed}: it was trained for another model"
                raise ImportRefused(f"{name} has the shape {found[name]}, {way_out}")
            shapes[name] = needed
        if rank != (said := ranks(linear)):
            raise ImportRefused(f"{linear} has the rank {rank}, and {CONFIG} says {said:g}")
        # rsLoRA's factor: Kalajdzievski 2023.
        scalings[linear] = alphas(linear) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    more = {name: config.get(name) for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")}
    own = lora_config(config["r"], config["lora_alpha"], _targets(spec, list(scalings))[0], **more)
    return AdapterForm(scalings, shapes, own, imported=own != spec.form.config)


def _ia3_form(found: Mapping[str, tuple[int, ...]], spec: LoraSpec) -> AdapterForm:
    """Return the form of an IA3 adapter, as `form_of`."""
    _check_names(set(found), {peft_name(linear) for linear in spec.shapes})
    own = {linear: found[peft_name(linear)] for linear in spec.shapes if peft_name(linear) in found}
    for linear, shape in own.items():
        fan_in, fan_out = spec.shapes[linear]
        if shape not in ((1, fan_in), (fan_out, 1)):
            needed = (
                f"this model needs {(fan_out, 1)}, or {(1, fan_in)} to scale inputs: it was trained for another model"
            )
            raise ImportRefused(f"{peft_name(linear)} has the shape {shape}, {needed}")
    linears, inputs = list(own), [linear for linear, shape in own.items() if shape == (1, spec.shapes[linear][0])]
    shapes = {peft_name(linear): shape for linear, shape in own.items()}
    targets = dict(zip(("target_modules", "feedforward_modules"), _targets(spec, linears, inputs), strict=True))
    return AdapterForm(dict.fromkeys(linears, 1.0), shapes, {"peft_type": "IA3", **targets}, imported=True)


def _targets(spec: LoraSpec, *groups: Sequence[str]) -> list[list[str]]:
    """Return PEFT's names of each group of the model's linears: the ends of their names, if these fit no others."""
    ends = [sorted({linear.rpartition(".")[2] for linear in linears}) for linears in groups]
    fitting = [[linear for linear in spec.shapes if linear.rpartition(".")[2] in own] for own in ends]
    return ends if fitting == list(groups) else [sorted(linears) for linears in groups]


def max_bytes(spec: LoraSpec) -> int:
    """Size in bytes of the largest weights file that fits `spec`: all weights in fp32, and a header."""
    values = sum(spec.rank * (fan_in + fan_out) + fan_out for fan_in, fan_out in spec.shapes.values())
    return 4 * values + _HEADER_BYTES


def _config(path: Path) -> dict[str, Any]:
    try:
        if problem := why_not_whole(path):
            raise ImportRefused(problem)
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ImportRefused(f"{path.name} has {path.stat().st_size} bytes: that is no adapter's configuration")
        config = bounded_json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ImportRefused(f"there is no {path.name}: give what peft's save_pretrained wrote") from None
    except ImportRefused:
        raise
    except (OSError, ValueError) as error:
        raise ImportRefused(f"{path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ImportRefused(f"{path.name} is not a JSON object")
    return config


def _check_config(config: dict[str, Any]) -> None:
    """Raise ImportRefused for an adapter of another kind than the served ones."""
    if (kind := config.get("peft_type")) not in ("LORA", "IA3"):
        raise ImportRefused(f"peft_type is {str(kind)[:40]!r}: only LORA and IA3 are served, train one of these")
    for name in ("use_rslora", "use_dora"):
        if not isinstance(config.get(name) or False, bool):
            raise ImportRefused(f"{name} = {json.dumps(config[name])[:80]} is neither true nor false")
    for name in ("modules_to_save", "fan_in_fan_out", "alora_invocation_tokens", "layer_replication"):
        if config.get(name):
            raise ImportRefused(f"{name} = {json.dumps(config[name])[:80]} is not supported: train one without it")
    if config.get("bias", "none") != "none":
        raise ImportRefused(f"bias = {config['bias']!r} is not supported: train one with bias none")
    if isinstance(way := config.get("init_lora_weights"), str) and way not in _INITIAL:
        raise ImportRefused(
            f"init_lora_weights = {way[:40]!r} changes the base model: convert it with peft when saving it"
        )


def _by_linear(config: Mapping[str, Any], name: str, pattern: str) -> Callable[[str], float]:
    """Return a function from a linear's name to its number `name`, which the first key of `pattern` that fits says.

    Raises ImportRefused. As in PEFT a key fits the end of a name from a dot on, or with ^ all of it; of regular
    expressions it may have dots alone, each of which fits any character, since any other could take for ever.
    """
    keys = config.get(pattern) or {}
    if not isinstance(keys, dict) or len(keys) > _MAX_KEYS or any(not _KEY.fullmatch(key) for key in keys):
        only = f"at most {_MAX_KEYS} names of linears, or their ends, of letters, digits, dots and _"
        raise ImportRefused(f"{pattern} is {json.dumps(keys)[:80]}: only {only} are taken")
    for number in (config.get(name), *keys.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= _LARGEST:
            raise ImportRefused(f"its {name} is {str(number)[:40]!r}: give a number from 0 to {_LARGEST:g}")
    known = [(re.compile(rf"(.*\.)?({_own_key(key)})"), float(number)) for key, number in keys.items()]
    default = float(config[name])
    return lambda linear: next((number for key, number in known if key.fullmatch(linear)), default)


def plain_key(key: str) -> str:
    """Return a pattern's key as the name, or the end of one, that it stands for."""
    return key.removeprefix("^").replace("\\.", ".")


def _own_key(key: str) -> str:
    """Return a key without the beginning of a wrapper's names."""
    plain = plain_key(key)
    return key if text_name(plain) == plain else text_name(plain)


def _weights(path: Path, config: Mapping[str, Any], spec: LoraSpec) -> tuple[dict[str, torch.Tensor], AdapterForm]:
    try:
        if problem := why_not_whole(path):
            raise ImportRefused(problem)
        size = path.stat().st_size
        if size > max_bytes(spec):
            raise ImportRefused(f"{path.name} has {size} bytes, at most {max_bytes(spec)} can fit this model")
        with safe_open(path, "pt") as file:
            saved = _saved_names(file.keys(), spec)
            parts = {name: file.get_slice(own) for name, own in saved.items()}
            form = form_of(config, {name: tuple(part.get_shape()) for name, part in parts.items()}, spec)
            for name, part in parts.items():
                if (dtype := part.get_dtype()) not in _DTYPES:
                    raise ImportRefused(f"{name} is of the type {dtype}: give one of {', '.join(_DTYPES)}")
            tensors = {name: file.get_tensor(saved[name]).float() for name in form.shapes}
    except FileNotFoundError:
        raise ImportRefused(f"there is no {path.name}: give what peft's save_pretrained wrote") from None
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path.name} is not a safetensors file: {error}") from None
    return tensors, form


def _saved_names(names: Iterable[str], spec: LoraSpec) -> dict[str, str]:
    """Return the names in a file by those that save_pretrained writes of the text decoder alone, also where they are a
    wrapper's. Raises ImportRefused for two of one weight."""
    found: dict[str, str] = {}
    for name in names:
        made = _BY_HAND.fullmatch(name)
        part = "" if made is None else {"magnitude_vector": "magnitude"}.get(made[2], made[2] or "")
        linear = "" if made is None else text_name(made[1])
        saved = name if made is None else peft_name(linear if linear in spec.shapes else made[1], part)
        if saved in found:
            both = f"{found[saved][:200]} and {name[:200]} are one weight of two adapters"
            raise ImportRefused(f"{both}: write one of them with peft's save_pretrained(DIRECTORY)")
        found[saved] = name
    return found


def _check_names(found: set[str], wanted: set[str]) -> None:
    if more := sorted(found - wanted):
        if not _BY_HAND.fullmatch(more[0]):
            along = "the base's weights, as an embedding or head that was saved along, are not served from an adapter"
            way_out = "write the adapter alone, with peft's save_pretrained(DIRECTORY, save_embedding_layers=False)"
            raise ImportRefused(f"{more[0][:200]} is no weight of an adapter's linear: {along}; {way_out}")
        raise ImportRefused(f"{more[0][:200]} is no part of this model's adapters (align.target_modules)")
    if not found:
        raise ImportRefused("it has no tensors: it was trained for another model")
