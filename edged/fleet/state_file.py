"""Files of an ingress: homes of users, which a restart must not change, boxes that registered, and its lock."""

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edged.runtime.durable import write_whole
from edged.settings.load import Settings
from edged.store.data_dir import data_folder

log = logging.getLogger("edged.fleet")


class StateFile:
    """A JSON object that one ingress reads again after a restart. A disk that fails is told of, and it goes on."""

    def __init__(self, folder: Path, listen: str, what: str) -> None:
        """`what` begins the file's name: "fleet" for homes by user, "members" for URLs by box."""
        self.path = folder / f"{what}-{re.sub('[^A-Za-z0-9]+', '-', listen).strip('-')}.json"

    def read(self) -> dict[str, Any]:
        """Return what was last written; nothing where there is no file to read."""
        try:
            return dict(json.loads(self.path.read_text("utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            log.error("%s cannot be read, boxes tell it as they come: %s", self.path, error)
            return {}

    def write(self, state: Mapping[str, Any]) -> bool:
        """Write so that a power cut leaves the old state or the new one; returns whether that was possible."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.path, json.dumps(state), 0o600)
        except OSError as error:
            log.error("%s is not kept: %s", self.path, error)
            return False
        return True


def lock_file(settings: Settings) -> Path:
    """Return the file that a running ingress of these settings holds locked."""
    folder = data_folder(settings.store.data_dir, os.environ)
    return StateFile(folder, settings.fleet.listen, "fleet").path.with_suffix(".lock")
