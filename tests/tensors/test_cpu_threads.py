"""The number of CPU threads follows what other programs leave free, and packed linears meet once per input."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from edged.engine.model.packed_linear import PackedLinear, pack_linears, tiles
from edged.tensors.cpu_threads import CpuThreads

CORES = len(os.sched_getaffinity(0))
LARGE = 100_000_000
several_cores = pytest.mark.skipif(CORES < 2, reason="one core has nothing to share")


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Box:
    """Seconds of this process and of idleness, as a test makes them pass."""

    def __init__(self) -> None:
        self.now = self.used_s = self.idle_s = 0.0

    def usage(self) -> tuple[float, float]:
        return self.used_s, self.idle_s

    def passes(self, threads: CpuThreads, others: float, seconds: float = 0.5) -> int:
        """Others use so many cores, this process half of the rest."""
        self.now += seconds
        self.used_s += 0.5 * (CORES - others) * seconds
        self.idle_s += 0.5 * (CORES - others) * seconds
        threads.follow(self.now)
        return torch.get_num_threads()


@several_cores
def test_threads_follow_the_cores_that_others_leave() -> None:
    box = Box()
    threads = CpuThreads(0, LARGE, box.usage)
    assert box.passes(threads, 0.0) == CORES
    assert box.passes(threads, 1.0) == CORES - 1
    assert box.passes(threads, float(CORES)) == 1
    assert box.passes(threads, 0.3) == CORES


@several_cores
def test_the_box_is_not_looked_at_in_every_iteration() -> None:
    box = Box()
    threads = CpuThreads(0, LARGE, box.usage)
    box.passes(threads, 0.0)
    assert box.passes(threads, float(CORES), seconds=0.01) == CORES


@several_cores
def test_what_happened_during_a_long_rest_says_nothing() -> None:
    box = Box()
    threads = CpuThreads(0, LARGE, box.usage)
    box.passes(threads, 0.0)
    assert box.passes(threads, float(CORES), seconds=60.0) == CORES


def test_a_number_that_was_set_stays() -> None:
    box = Box()
    threads = CpuThreads(3, LARGE, box.usage)
    assert [box.passes(threads, others) for others in (0.0, float(CORES))] == [3, 3]


def test_small_models_use_one() -> None:
    box = Box()
    threads = CpuThreads(0, 1_000_000, box.usage)
    assert [box.passes(threads, others) for others in (0.0, float(CORES))] == [1, 1]


@several_cores
def test_busy_neighbours_are_seen() -> None:
    threads = CpuThreads(0, LARGE)
    threads.follow(time.monotonic())
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        time.sleep(0.7)
        threads.follow(time.monotonic())
        assert torch.get_num_threads() < CORES
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Layer(nn.Module):
    """Linears by the names that decoders use."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias=bias) for n in (64, 32, 32))
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=bias), nn.Linear(64, 96, bias=bias)
        self.down_proj = nn.Linear(96, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return (
            parts[..., :64] + parts[..., 64:] @ torch.ones(64, 64) + self.down_proj(self.gate_proj(x) * self.up_proj(x))
        )


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_siblings_give_what_each_would_alone(bias: bool, native: bool) -> None:
    torch.manual_seed(0)
    layer = Layer(bias)
    inputs = [torch.randn(1, rows, 64) for rows in (1, 3, 16, 333, 0)]
    wanted = [layer(x).detach() for x in inputs]
    pack_linears(layer, native, in_16_bits=False)
    assert isinstance(layer.q_proj, PackedLinear)
    with torch.inference_mode():
        for x, y in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(layer(x), y, atol=1e-4, rtol=1e-5)
        # Another order, another input in between, the same input twice: each is given its own.
        a, b = inputs[1], inputs[3]
        for linear, x in ((layer.v_proj, a), (layer.q_proj, b), (layer.q_proj, a), (layer.q_proj, a)):
            torch.testing.assert_close(linear(x), linear.base(x), atol=1e-4, rtol=1e-5)


def test_prompts_of_all_lengths_are_multiplied_in_few_sizes() -> None:
    """Each size that oneDNN meets costs memory for ever."""
    cut = {rows: tiles(rows) for rows in range(1, 4000)}
    assert all(sum(pieces) == rows and min(pieces) > 0 for rows, pieces in cut.items())
    assert len({size for pieces in cut.values() for size in pieces}) <= 22
    assert max(len(pieces) for rows, pieces in cut.items() if rows <= 1024) <= 7
