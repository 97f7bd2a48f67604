"""What must not leave a box: strings planted in people's names and words, and the numbers of their own adapters."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

USERS, PAIRS, EACH = 20, 12, 5
"""Names; pairs of the first of them, and strings in each of a pair's three texts."""


class Planted:
    """200 strings that nobody writes by chance: users' names, and words of questions and of both answers."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.strings = [f"zq{chance.getrandbits(40):010x}" for _ in range(USERS + 3 * PAIRS * EACH)]
        assert len({*self.strings}) == 200
        left = iter(self.strings)
        self.users = list(islice(left, USERS))
        self.pairs = [(" ".join(islice(left, EACH)), " ".join(islice(left, EACH)), " ".join(islice(left, EACH)))
                      for _ in range(PAIRS)]  # fmt: skip

    def found_in(self, content: bytes) -> list[str]:
        """Return the strings that bytes have, as text, UTF-16, hex digits or base64."""
        return [each for each in self.strings if any(form in content for form in _forms(each.encode()))]


def _forms(text: bytes) -> Iterable[bytes]:
    yield from (text, text.decode().encode("utf-16-le"), text.hex().encode())
    for before in range(3):
        # The digits at both ends have bits of what stands beside the text.
        yield base64.b64encode(bytes(before) + text)[-(-before * 8 // 6) : (before + len(text)) * 8 // 6]


def shared_numbers(content: bytes, weights: Mapping[str, np.ndarray]) -> int:
    """Count the places, at any byte, where content has two neighbouring numbers of weights in float32."""
    two = [each.astype(np.float32).ravel()[: each.size // 2 * 2].view(np.uint64) for each in weights.values()]
    own = np.unique(np.concatenate(two))
    shifted = (np.frombuffer(content[at : len(content) - (len(content) - at) % 8], np.uint64) for at in range(8))
    return sum(int(np.isin(each, own[own != 0]).sum()) for each in shifted)
