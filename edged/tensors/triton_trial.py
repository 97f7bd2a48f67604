"""One Triton kernel: whether such can be compiled and started here. Only for where Triton is installed."""

import torch
import triton
import triton.language as tl

_COUNT = 64


@triton.jit
def _double(numbers, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Double `COUNT` numbers in place."""
    places = numbers + tl.arange(0, COUNT)
    tl.store(places, 2.0 * tl.load(places))


def try_triton(device: str) -> None:
    """Compile and run the kernel. Raises what Triton, its compiler or the device raise, or ArithmeticError."""
    numbers = torch.ones(_COUNT, device=device)
    _double[(1,)](numbers, _COUNT)
    if (total := float(numbers.sum())) != 2.0 * _COUNT:
        raise ArithmeticError(f"a kernel that doubles {_COUNT} ones gives {total:g}")
