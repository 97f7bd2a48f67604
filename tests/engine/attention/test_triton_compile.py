"""The Triton kernels compile for GPUs that are not here, fit them, and are compiled at start alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SMALLEST_SHARED_BYTES = 99 << 10
"""What a program may have on sm_86 and sm_89, the least since sm_80 (CUDA C++ Programming Guide)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "group"),
    [
        (87, "bfloat16", 64, 3),
        (80, "bfloat16", 256, 8),
        (86, "float16", 96, 7),
        (90, "float32", 256, 4),
        (87, "bfloat16", 512, 8),
        (90, "bfloat16", 512, 2),
        (90, "bfloat16", 128, 4),
    ],
)
def test_the_trials_at_start_compile_all_that_iterations_need(
    capability: int, dtype: str, head_dim: int, group: int
) -> None:
    pytest.importorskip("triton")
    # Not in the interpreter, which the other tests of this process have chosen.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.engine.attention.compile_kernels",
        *map(str, (capability, dtype, head_dim, group)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name for name, _ in report["shared_bytes"]} == {
        "_attend_tile",
        "_attend_part",
        "_join_parts",
        "_shrink",
        "_expand",
        "_add_and_norm",
        "_rotate_and_store",
        "_activate",
        "_delta_rule",
        "_convolve",
    }
    assert max(size for _, size in report["shared_bytes"]) <= SMALLEST_SHARED_BYTES
    assert report["compiled_later"] == []
