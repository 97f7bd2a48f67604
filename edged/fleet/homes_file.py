"""The homes of users on disk: an ingress that starts while a node is away must not give its users another home."""

import json
import logging
import os
import re
from pathlib import Path

from edged.placement.homes import Homes
from edged.store.data_dir import sync

log = logging.getLogger("edged.fleet")


class HomesFile:
    """The file of one ingress in its data folder. A disk that fails is told of, and the ingress goes on."""

    def __init__(self, folder: Path, listen: str) -> None:
        self.path = folder / f"fleet-{re.sub('[^A-Za-z0-9]+', '-', listen).strip('-')}.json"

    def read(self) -> dict[str, str]:
        """Return each user's home as it was when it was last known; nothing where there is no file to read."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            return {user: node for user, node in found.items() if isinstance(node, str)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            log.error("homes of users cannot be read from %s, nodes tell them as they come: %s", self.path, error)
            return {}

    def write(self, homes: Homes) -> None:
        """Write the homes, if they are others than before, so that a power cut leaves the old ones or the new."""
        if not homes.changed:
            return
        draft = self.path.with_suffix(".draft")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(homes.remembered, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
            sync(self.path.parent)
            homes.changed = False
        except OSError as error:
            log.error("homes of users are not kept in %s: %s", self.path, error)
