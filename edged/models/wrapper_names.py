"""Names of weights and modules in multimodal checkpoints, whose text decoder is served alone.

Must not import torch.
"""

import re

TEXT_KEYS = {
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Beginnings of names in wrappers of 2024 to 2026 -> those in the text decoder alone."""


def text_name(name: str) -> str:
    """Return the text decoder's own name of what a wrapper names so; other names as they are."""
    for pattern, own in TEXT_KEYS.items():
        name = re.sub(pattern, own, name)
    return name
