"""The embedded demo model and the dialogues it was trained on. Must not import torch: only names and text are here."""

from importlib.resources import files
from pathlib import Path


def demo_model_dir() -> Path:
    """The directory of the embedded demo model, as `save_pretrained` writes it.

    Raises FileNotFoundError when the package was installed without its data.
    """
    directory = Path(str(files(__package__))) / "demo"
    if not (directory / "model.safetensors").is_file():
        raise FileNotFoundError(
            f'the demo model is missing from "{directory}": reinstall edged or run tools/train_demo_model.py'
        )
    return directory
