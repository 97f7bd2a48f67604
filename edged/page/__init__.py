"""The page that shows and talks to the daemon in a browser: its files, and the chart library's."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

INDEX = "index.html"
CHARTS = "plotly.js"
"""The chart library's name here; its file comes with its own package."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FOLDER = files(__package__)
NAMES = (CHARTS, *sorted(file.name for file in _FOLDER.iterdir() if file.name.rpartition(".")[2] in _TYPES))
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
    """Return a file by its name, one of NAMES; the chart library takes a fraction of a second the first time."""
    content = _content(name)
    media_type, tag = _TYPES[name.rpartition(".")[2]], hashlib.sha256(content).hexdigest()[:32]
    return PageFile(gzip.compress(content, _COMPRESSION, mtime=0), media_type, tag)


def _content(name: str) -> bytes:
    if name == CHARTS:
        # The package is found without importing it: only this file of it is of use.
        package = find_spec("plotly")
        assert package is not None
        return (Path(package.origin or "").parent / "package_data" / "plotly.min.js").read_bytes()
    return (_FOLDER / name).read_bytes()
