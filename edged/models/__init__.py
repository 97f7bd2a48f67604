"""The model that the settings name: a directory here, the embedded demo model, or one from the hub.

Must not import torch.
"""

from importlib.resources import files
from pathlib import Path

from edged.models.gguf import is_gguf, why_not_served
from edged.models.hub import ModelMissing as ModelMissing
from edged.models.hub import download
from edged.models.whole_files import demand_whole
from edged.settings.load import ModelSettings


def demo_model_dir() -> Path:
    """Return the directory of the embedded demo model, as `save_pretrained` writes it.

    Raises ModelMissing when the package was installed without its data.
    """
    directory = Path(str(files(__package__))) / "demo"
    if not (directory / "model.safetensors").is_file():
        way_out = "reinstall edged or run tools/train_demo_model.py"
        raise ModelMissing(f'the demo model is missing from "{directory}": {way_out}')
    return directory


def name_of(settings: ModelSettings) -> str:
    """Return the model's name in the API: the setting, else that of its directory or on the hub."""
    return settings.name or ("demo" if settings.path == "demo" else Path(settings.path).expanduser().resolve().name)


def local_model(settings: ModelSettings) -> Path | None:
    """Return the model's directory on this box; None for a hub name. Raises ModelMissing."""
    if settings.path == "demo":
        return demo_model_dir()
    path = Path(settings.path).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        raise ModelMissing(f'model "{settings.path}" {why_not_served(path)}')
    if path.exists() or settings.path.count("/") != 1 or settings.path.startswith((".", "~", "/")):
        way_out = 'give one that save_pretrained wrote, a hub name, or "demo"'
        raise ModelMissing(f'model "{settings.path}" is not a directory: {way_out}')
    return None


def source_of(settings: ModelSettings, folder: Path) -> str:
    """Return the base model in `folder` as PEFT finds it again: the hub name that it came by, else the folder."""
    return settings.path if folder.parent.name == "snapshots" else str(folder.resolve())


def find_model(settings: ModelSettings) -> tuple[Path, str]:
    """Return (directory, name in the API) of the model. A hub name is downloaded.

    Raises ModelMissing, also for a file that is not whole.
    """
    if (folder := local_model(settings)) is not None:
        try:
            demand_whole(folder)
        except (OSError, ValueError) as error:
            raise ModelMissing(f'model "{folder}": {error}') from None
        return folder, name_of(settings)
    return download(settings), name_of(settings)
