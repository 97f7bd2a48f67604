"""Files that survive a power cut."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file or folder itself survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file so that a power cut, and a reader meanwhile, finds the old content or the new. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)
