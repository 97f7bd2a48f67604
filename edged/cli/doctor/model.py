"""Checks of the model's files and of its cost profile.

No weight is read; must not import torch.
"""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine
from edged.cli.output import size
from edged.models import ModelMissing, demo_model_dir, name_of
from edged.models.gguf import is_gguf, why_not_served
from edged.models.hub import downloaded, name_and_revision
from edged.models.whole_files import TEXTS, demand_whole
from edged.settings.load import ModelSettings

_AGAIN = "download it again, or write it again with save_pretrained"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tensors_of(path: Path) -> dict[str, int]:
    """Return the number of elements by tensor name of a safetensors file.

    Raises ValueError if it cannot be read or its length differs from its header.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    except SafetensorError as error:
        length = f"{path.stat().st_size:,} bytes"
        raise ValueError(f"{path.name} has {length}, and they are not what its header says: {error}") from None


def find(settings: ModelSettings) -> tuple[Path | None, Finding | None]:
    """Return (directory of the model, None), or (None, the problem); nothing is downloaded."""
    path = Path(settings.path).expanduser()
    if settings.path == "demo":
        try:
            return demo_model_dir(), None
        except ModelMissing as error:
            return None, broken(str(error), "reinstall edged")
    if path.is_dir():
        return path, None
    if is_gguf(path):
        seen, _, way_out = why_not_served(path).rpartition(": ")
        return None, broken(f'model.path = "{settings.path}" {seen}', way_out)
    if path.exists() or settings.path.count("/") != 1 or settings.path.startswith((".", "~", "/")):
        way_out = 'set model.path to one that save_pretrained wrote, a hub name, or "demo"'
        return None, broken(f'model.path = "{settings.path}" is not a directory', way_out)
    if (found := downloaded(settings)) is not None:
        return found, None
    name = name_and_revision(settings)
    way_out = f"`edged models pull {name}`, or nothing where the service has a network: it downloads it"
    return None, doubtful(f"{name} was not downloaded yet", way_out)


def place(it: Examination) -> Finding | None:
    """Check that the model is on this machine, its texts are whole, and its directory has a config.json."""
    if it.model_dir is None:
        return find(it.settings.model)[1]
    try:
        demand_whole(it.model_dir, TEXTS)
    except (OSError, ValueError) as error:
        return broken(f"{it.model_dir}: {error}", _AGAIN)
    if _config(it) is None:
        seen = f"{it.model_dir}: no config.json that can be read"
        return broken(seen, "give a directory that save_pretrained wrote")
    return None


def code(it: Examination) -> Finding | None:
    """Check whether the model needs Python code of its own (trust_remote_code)."""
    config = _config(it) or {}
    if "auto_map" not in config:
        return None
    if it.settings.model.trust_remote_code:
        seen = f"{it.model_dir} brings code of its own ({_kind(config)}), which runs with all of edged's rights"
        return doubtful(seen, "if you do not trust it with this box, set model.trust_remote_code = false")
    unless = "edged runs no code from a model's directory unless model.trust_remote_code is on"
    seen = f"{it.model_dir} wants code of its own to run ({_kind(config)})"
    return doubtful(seen, f"use a model whose architecture transformers has: {unless}")


def _config(it: Examination) -> dict[str, Any] | None:
    return _json(it.model_dir / "config.json") if it.model_dir else None


def _kind(config: dict[str, Any]) -> str:
    return ", ".join(config.get("architectures") or ["of no named architecture"])


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def weights(it: Examination) -> Finding | None:
    """Check that all weight files exist and have the length that their headers say; no weight is read."""
    folder, config = it.model_dir, _config(it)
    if folder is None or config is None:
        return None
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        other = [path.name for path in sorted(folder.glob("*.bin"))[:1]]
        seen = f"only {other[0]}, a pickle, which may run code" if other else "no *.safetensors"
        return broken(f"{folder}: {seen}", "save it with save_pretrained(safe_serialization=True)")
    try:
        demand_whole(folder, ("*.safetensors",))
        held = {path.name: tensors_of(path) for path in found}
    except (OSError, ValueError) as error:
        return broken(f"{folder}: {error}", _AGAIN)
    if problem := _index_problem(folder, held):
        return broken(f"{folder}: {problem}", _AGAIN)
    elements = sum(sum(tensors.values()) for tensors in held.values())
    on_disk = size(sum(path.stat().st_size for path in found))
    return fine(f"{folder}: {_kind(config)}, {elements:,} weights in {len(found)} files of {on_disk}, whole")


def _index_problem(folder: Path, held: dict[str, dict[str, int]]) -> str:
    """Return how the index of a sharded model and its files differ, or ""."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return ""
    index = _json(path)
    if index is None or not isinstance(index.get("weight_map"), dict):
        return f"{path.name} cannot be read"
    if missing := sorted(set(index["weight_map"].values()) - held.keys()):
        return f"{missing[0]} is missing ({len(missing)} of the files in {path.name})"
    absent = [tensor for tensor, file in index["weight_map"].items() if tensor not in held[file]]
    return f"{absent[0]} is not in the file that {path.name} names" if absent else ""


def tokenizer(it: Examination) -> Finding | None:
    """Check that there is a tokenizer, and that it has a chat template."""
    folder = it.model_dir
    if folder is None or _config(it) is None:
        return None
    found = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not found:
        return broken(f"{folder} has none", "write one there with tokenizer.save_pretrained")
    settings = _json(folder / "tokenizer_config.json") or {}
    if found[0].endswith(".json") and _json(folder / found[0]) is None:
        return broken(f"{folder / found[0]} cannot be read", _AGAIN)
    of_processor = (_json(folder / "chat_template.json") or {}).get("chat_template")
    if (folder / "chat_template.jinja").is_file() or settings.get("chat_template") or of_processor:
        return fine(f"{found[0]}, with a chat template")
    way_out = f"put a chat_template.jinja into {folder}: without one only /v1/completions answers"
    return doubtful(f"{found[0]}, without a chat template", way_out)


def tokens(it: Examination) -> Finding | None:
    """Check that the tokenizer, its chat template and its end tokens fit the model."""
    if refused := it.tokens.get("refused"):
        return broken(refused, _AGAIN)
    if problems := it.tokens.get("problems"):
        return doubtful("; ".join(problems), f"tokenizer and model belong together: {_AGAIN}")
    return None


def served(it: Examination) -> Finding | None:
    """Check that a model of this architecture and these sizes can be served."""
    if problem := it.needs.get("problem"):
        return broken(problem, "serve another model, or change what it names")
    if not it.needs:
        return None
    return fine(f"{it.needs['architecture']}, {it.needs['parameters']:,} weights, in {it.needs['dtype']}")


def trained(it: Examination) -> Finding | None:
    """Check that the model has linears for adapters."""
    if (linears := it.needs.get("lora_linears")) is None:
        return None
    if not linears:
        return doubtful(
            "it has no linear layers for LoRA: it is served, not trained", "serve another one to be learned"
        )
    return fine(f"adapters of {linears} linears")


def tools(it: Examination) -> Finding | None:
    """Check whether chats may offer tools, and whether calls of them are read."""
    if "tools" not in it.tokens:
        return None
    if not it.tokens["tools"]:
        return fine("its chat template writes no tools: chats that offer some are answered without")
    return fine("its chat template writes them, " + ("and calls are read" if it.tokens["calls"] else "calls stay text"))


def reasoning(it: Examination) -> Finding | None:
    """Check whether a response template is known, and whether reasoning is told apart by it."""
    if "response_template" not in it.tokens:
        return None
    if it.tokens["reasoning"]:
        return fine("a response template is known: reasoning is told apart from the answer")
    known = "the response template that is known has none" if it.tokens["response_template"] else "no response template"
    return fine(f"{known}: answers are given as they are")


def profile(it: Examination) -> Finding:
    """Check that there is a cost profile for this model on this device."""
    from edged.scheduler.cost.profile import FOLDER, Profile, ProfileError

    gpu = it.torch.get("gpu") if it.settings.model.device != "cpu" else None
    measure = "`edged profile`, with nothing else running: until then latencies are guessed and learned"
    setting, name = it.settings.scheduler.profile, name_of(it.settings.model)
    others, problems = [], []
    for path in [Path(setting).expanduser()] if setting else sorted((it.data_dir / FOLDER).glob("*.json")):
        try:
            found = Profile.read(path)
        except ProfileError as error:
            problems.append(str(error))
            continue
        if found.subject.model == name and (gpu is None or found.subject.device == gpu):
            return fine(f"{path.name}, of {found.created_at[:10]}")
        others.append(f"only of {found.subject.model} on {found.subject.device}, not of {name} on {gpu or 'this box'}")
    return doubtful((problems or others or [f"none of {name}"])[0], measure)
