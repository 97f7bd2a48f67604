"""Lossless 16-bit copies of float32 weights.

Checkpoints are mostly in bfloat16 or float16, and the CPU computes in float32, of which such numbers need half the
bits. A step of few rows takes as long as reading the weights: from a copy of these bits it reads half, and gets the
same sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_LANES = 8
"""Numbers in a vector of the kernels."""
_ROWS = 256
"""Rows of a weight that are converted at once."""
_LEAST, _MOST = 127 - 24, 127 + 6
"""Exponents of the float16 form: five bits from float16's smallest, 2**-24, on, so that no number is subnormal."""


@dataclass(frozen=True, slots=True)
class Fp16Weights:
    """A weight [out, in] in 16 bits a number."""

    words: torch.Tensor
    """int32 [out, in / 2]: of 16 numbers the first 8 are the low halves of 8 words, the others the high ones."""
    form: int
    """Encoding as in `layers.c`: 1 is bfloat16; 2 is sign, five bits of exponent from 2**-24 on, ten of mantissa."""


def narrow(weight: torch.Tensor) -> Fp16Weights | None:
    """Encode `weight` [out, in], float32, in 16 bits a number; None if that changes a number, or has no kernel.

    A float16 weight with numbers of 128 or more cannot be encoded.
    """
    outputs, inputs = weight.shape
    if inputs % (2 * _LANES):
        return None
    bits = weight.detach().view(torch.int32)
    words = torch.empty(outputs, inputs // 2, dtype=torch.int32)
    return next((Fp16Weights(words, form) for form, encode in _ENCODERS.items() if _fill(words, bits, encode)), None)


def _fill(words: torch.Tensor, bits: torch.Tensor, encode: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
    """Write `bits` [out, in] as `words` [out, in / 2]; return False if `encode` cannot."""
    for own, part in zip(words.split(_ROWS), bits.split(_ROWS), strict=True):
        halves = encode(part)
        if halves is None:
            return False
        low, high = halves.view(len(own), -1, 2, _LANES).unbind(2)
        own.copy_((low | high << 16).view(own.shape))
    return True


def _bfloat16(bits: torch.Tensor) -> torch.Tensor | None:
    """Return the upper halves if the lower ones are empty, else None."""
    return None if bool((bits & 0xFFFF).any()) else bits >> 16 & 0xFFFF


def _float16(bits: torch.Tensor) -> torch.Tensor | None:
    """Return sign, exponent less than 32 and ten bits of mantissa if no number needs more, else None."""
    size = bits & 0x7FFFFFFF
    exponent, zero = size >> 23, size == 0
    if not bool((((bits & 0x1FFF) == 0) & (zero | ((exponent >= _LEAST) & (exponent <= _MOST)))).all()):
        return None
    return (bits >> 16 & 0x8000) | (size - (_LEAST - 1 << 23) >> 13).masked_fill_(zero, 0)


_ENCODERS = {1: _bfloat16, 2: _float16}
