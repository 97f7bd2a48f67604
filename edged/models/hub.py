"""Models from the Hugging Face hub: found on this box, downloaded, listed and removed.

They lie in the cache of the hub's own client (HF_HOME), where other programs find them, too. Must not import torch.
"""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged.models.whole_files import READ, TEXTS
from edged.runtime import logs
from edged.settings.load import ModelSettings

Progress = Callable[[int, int | None, str], None]
"""Told of bytes done, of bytes in all, and what is being done."""

_ROOM = "make room there, or set HF_HOME to a folder on a larger disk"


class ModelMissing(RuntimeError):
    """The model cannot be found or had; the message says where it was looked for, and the way out."""


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """One revision of a model in the cache."""

    name: str
    revision: str
    """The commit."""
    refs: tuple[str, ...]
    """Branches and tags that were asked for and meant this commit, such as "main"."""
    folder: str
    size_bytes: int
    whole: bool
    """Whether every file that edged reads is there."""


def name_and_revision(settings: ModelSettings) -> str:
    """Return NAME, or NAME@REVISION."""
    return f"{settings.path}@{settings.revision}" if settings.revision else settings.path


def downloaded(settings: ModelSettings) -> Path | None:
    """Return the directory of the model on this box; None where it, or a file of it, is not there."""
    try:
        return _snapshot(settings, local_files_only=True)
    except Exception:  # any error of the hub's client means that the model is not on this machine
        return None


def download(settings: ModelSettings, progress: Progress | None = None) -> Path:
    """Return the model's directory, once every file that edged reads is in it. Raises ModelMissing."""
    return _told(settings, **({"tqdm_class": _bar_of(progress)} if progress else {}))


def download_texts(settings: ModelSettings, folder: Path) -> dict[str, int]:
    """Put a model's files but its weights into `folder`; return the bytes of its weights by file. Raises ModelMissing.

    The cache is left as it is.
    """
    elsewhere = {"cache_dir": folder / "cache"}
    _told(settings, local_dir=folder, allow_patterns=TEXTS, **elsewhere)
    files = _files(settings, **elsewhere)
    return {file.filename: file.file_size or 0 for file in files if file.filename.endswith(".safetensors")}


def demand_room(settings: ModelSettings) -> int | None:
    """Return the bytes that a download still needs; None where the hub does not say: `download` tells why.

    Raises ModelMissing where the disk has fewer.
    """
    from huggingface_hub import constants

    try:
        needed = sum(file.file_size or 0 for file in _files(settings) if file.will_download)
    except ModelMissing:
        return None
    folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        seen = f"{needed / 2**30:.1f} GiB are to be downloaded, {free / 2**30:.1f} GiB are free in {folder}"
        raise ModelMissing(f'model "{settings.path}": {seen}; {_ROOM}')
    return needed


def downloaded_models() -> list[DownloadedModel]:
    """Return all models in the cache, by name; also those that edged cannot serve."""
    return [
        DownloadedModel(
            repo.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            str(revision.snapshot_path),
            revision.size_on_disk,
            _is_whole(downloaded(ModelSettings(path=repo.repo_id, revision=revision.commit_hash))),
        )
        for repo in sorted(_cached(), key=lambda repo: repo.repo_id)
        for revision in sorted(repo.revisions, key=lambda revision: (revision.last_modified, revision.commit_hash))
    ]


def revisions_of(settings: ModelSettings) -> list[DownloadedModel]:
    """Return what the cache has of a model: all, or the revision that the settings name. Raises ModelMissing."""
    named = [found for found in downloaded_models() if found.name == settings.path]
    wanted = settings.revision
    meant = [each for each in named if not wanted or wanted in each.refs or each.revision.startswith(wanted)]
    if not meant:
        known = "`edged models list` names those that are"
        raise ModelMissing(f'model "{name_and_revision(settings)}" is not on this box: {known}')
    return meant


def remove(models: list[DownloadedModel]) -> int:
    """Delete these revisions and return the bytes that are free then. Raises OSError."""
    from huggingface_hub import constants, scan_cache_dir

    plan = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*(each.revision for each in models))
    plan.execute()
    if left := [each.folder for each in models if Path(each.folder).exists()]:
        # The client logs what it cannot delete.
        raise OSError(errno.EACCES, "Permission denied", left[0])
    return plan.expected_freed_size


def _is_whole(folder: Path | None) -> bool:
    # Of what other programs put there, the client does not know how many files there are.
    return folder is not None and (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def _snapshot(settings: ModelSettings, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    patterns = [*READ, *(["*.py"] if settings.trust_remote_code else [])]
    silent = _bar_of(lambda *_: None)
    wanted = {"revision": settings.revision or None, "allow_patterns": patterns, "tqdm_class": silent}
    found: Any = snapshot_download(settings.path, **{**wanted, **options})
    return Path(found) if isinstance(found, str) else found


def _told(settings: ModelSettings, **options: Any) -> Any:
    """Ask the hub. Raises ModelMissing for its client's errors: network, names, permissions, the disk."""
    try:
        return _snapshot(settings, **options)
    except Exception as error:
        raise ModelMissing(_why(settings, error)) from error


def _files(settings: ModelSettings, **options: Any) -> list[Any]:
    """Return the files that a download needs, as the hub's client describes them. Raises ModelMissing."""
    found: list[Any] = _told(settings, dry_run=True, **options)
    return found


def _why(settings: ModelSettings, error: Exception) -> str:
    """Return what a failed download means, and the way out."""
    from huggingface_hub import constants, errors

    name, revision = settings.path, settings.revision
    causes = [*_causes(error)]
    if any(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in causes):
        return f'model "{name}": the disk of {constants.HF_HUB_CACHE} is full; {_ROOM}'
    for each in causes:
        if isinstance(each, errors.GatedRepoError):
            page = f"{constants.ENDPOINT}/{name}"
            return f'model "{name}" is gated: accept its terms at {page}, and set HF_TOKEN to that account\'s token'
        if isinstance(each, errors.RepositoryNotFoundError):
            unless = "check the name; a private one needs HF_TOKEN"
            return f'model "{name}" is not a directory here, and the hub has none of that name: {unless}'
        if isinstance(each, errors.RevisionNotFoundError):
            return f'model "{name}" has no revision "{revision}": give a branch, a tag or a whole commit of it'
        if isinstance(each, errors.HFValidationError):
            return f'model "{name}" is not a directory here, and no name on the hub is written so: OWNER/NAME is one'
        if isinstance(each, PermissionError) and each.filename:
            return f'model "{name}": {each.filename} may not be opened: run this as its owner, or set HF_HOME'
    reason = logs.first_line(causes[-1])
    unless = "check the network, or copy the folder of HF_HOME from a box that has one"
    return f'model "{name_and_revision(settings)}" is not on this box and could not be downloaded ({reason}): {unless}'


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _cached() -> Iterator[Any]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        yield from (repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model")
    except CacheNotFound:
        return


def _bar_of(progress: Progress) -> type:
    """Return a progress bar's class, as the hub's client wants one, that draws nothing and tells `progress`."""
    from tqdm import tqdm

    done = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal done
            # One bar counts files, others bytes: those from the network, and those on the disk.
            if self.unit == "B" and self.total:
                done = max(done, int(self.n))
                progress(done, int(self.total), "downloading")
            return True

    return Bar
