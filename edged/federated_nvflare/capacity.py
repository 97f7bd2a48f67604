"""A box's capacity as the hub is told it: classes, in the token by which NVFlare reserves a place. No NVFlare."""

from __future__ import annotations

import json
import re
import uuid

from edged.federated.signature import Capacity

_CLASSES = {0, *(1 << bit for bit in range(41))}
"""Powers of two: what a box has exactly it tells nobody."""
_MODEL = re.compile(r"[0-9a-f]{16,64}")


def capacity_token(capacity: Capacity) -> str:
    """Return a token, another one each time, that says a box's classes."""
    return json.dumps({"id": uuid.uuid4().hex, **capacity._asdict()})


def read_capacity(token: str) -> Capacity | None:
    """Return what a token says, None where a box writes anything else."""
    try:
        told = json.loads(token)
        sizes = [told[name] for name in ("memory_mb", "tokens_per_s", "participants")]
        if not _CLASSES.issuperset(sizes) or not _MODEL.fullmatch(told["model"]):
            return None
        return Capacity(int(sizes[0]), float(sizes[1]), int(sizes[2]), told["model"])
    except (ValueError, TypeError, KeyError):
        return None
