"""The page that shows and talks to the daemon in a browser: its files."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

INDEX = "index.html"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FOLDER = files(__package__)
NAMES = sorted(file.name for file in _FOLDER.iterdir() if file.name.rpartition(".")[2] in _TYPES)
_COMPRESSION = 6


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent: compressed, with its media type and a tag that changes with its content."""

    body_gzip: bytes
    media_type: str
    tag: str

    def plain(self) -> bytes:
        """Return its content uncompressed."""
        return gzip.decompress(self.body_gzip)


@cache
def page_file(name: str) -> PageFile:
    """Return a file by its name, one of NAMES."""
    content = (_FOLDER / name).read_bytes()
    media_type, tag = _TYPES[name.rpartition(".")[2]], hashlib.sha256(content).hexdigest()[:32]
    return PageFile(gzip.compress(content, _COMPRESSION, mtime=0), media_type, tag)
