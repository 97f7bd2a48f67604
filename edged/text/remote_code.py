"""Checks for code that a model's directory could run while it is loaded.

Two things can: Python files of the model's own, which `auto_map` in its JSON names (they run only where the operator
set `model.trust_remote_code`), and pickled weights, which are never read.
"""

import json
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
WAY_OUT = (
    "use one of a type that transformers knows; or, if you trust whoever wrote it with this box and all that is on it, "
    "set model.trust_remote_code = true"
)


class Untrusted(ValueError):
    """A directory would have to run code to be loaded; the message says which and how to go on."""


def check_weights(directory: Path) -> None:
    """Raise Untrusted where the only weights are pickled ones."""
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        way_out = "convert it where you trust it, with from_pretrained(...).save_pretrained(DIRECTORY)"
        pickled = f"its weights are pickled ({pickles[0]}), and loading a pickle can run any code"
        raise Untrusted(f"{pickled}: only safetensors are read; {way_out}")


def check_code(directory: Path, trusted: bool) -> None:
    """Raise Untrusted where model or tokenizer need Python code of their own, and the operator does not trust it."""
    if trusted:
        return
    config = read_json(directory / "config.json")
    if _maps(config, "AutoConfig", "AutoModelForCausalLM") and config.get("model_type") not in CONFIG_MAPPING:
        raise Untrusted(f"it needs Python code of its own (auto_map in config.json), which is not run: {WAY_OUT}")
    tokenizer = read_json(directory / "tokenizer_config.json")
    if _maps(tokenizer, "AutoTokenizer") and not (directory / "tokenizer.json").is_file():
        needs = "its tokenizer needs Python code of its own (auto_map in tokenizer_config.json)"
        raise Untrusted(f"{needs}, which is not run: {WAY_OUT}")


def _maps(config: dict[str, Any], *names: str) -> bool:
    """Whether a configuration names code for any of these classes."""
    mapped = config.get("auto_map")
    return isinstance(mapped, dict) and any(name in mapped for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where the file has none: its reader raises the error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
