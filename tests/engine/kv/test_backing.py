"""What the driver refuses leaves no piece that counts as mapped and is not."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edged.engine.kv.backing import CudaMemory, CudaMemoryError, _Access, _Properties, back


class Driver:
    """Stands in for libcuda, which no test can have fail: counts what is held, and refuses one call."""

    def __init__(self, refused: str) -> None:
        self._refused = refused
        self.handles = 0
        self.mapped: set[int] = set()

    def cuMemCreate(self, *_: Any) -> int:
        self.handles += 1
        return 0

    def cuMemRelease(self, _: Any) -> int:
        self.handles -= 1
        return 0

    def cuMemMap(self, address: ctypes.c_uint64, *_: Any) -> int:
        if self._refused == "cuMemMap":
            return 2
        self.mapped.add(address.value)
        return 0

    def cuMemUnmap(self, address: ctypes.c_uint64, _: Any) -> int:
        self.mapped.remove(address.value)
        return 0

    def cuMemSetAccess(self, *_: Any) -> int:
        return 999 if self._refused == "cuMemSetAccess" else 0

    def cuMemGetAllocationGranularity(self, piece: Any, *_: Any) -> int:
        piece._obj.value = 4096
        return 0

    def cuMemAddressReserve(self, *_: Any) -> int:
        return 2 if self._refused == "cuMemAddressReserve" else 999


def memory_of(driver: Driver) -> CudaMemory:
    memory = CudaMemory.__new__(CudaMemory)
    memory._driver, memory._properties, memory._access = driver, _Properties(), _Access()  # type: ignore[assignment]
    memory._piece, memory._address, memory._handles = 4096, 1 << 20, {}
    return memory


@pytest.mark.parametrize(
    ("refused", "error"), [("", None), ("cuMemMap", MemoryError), ("cuMemSetAccess", CudaMemoryError)]
)
def test_a_piece_that_cannot_be_mapped_to_the_end_is_given_back(refused: str, error: type[Exception] | None) -> None:
    driver = Driver(refused)
    memory = memory_of(driver)
    if error is None:
        memory._map([3])
        assert (driver.handles, driver.mapped, list(memory._handles)) == (1, {(1 << 20) + 3 * 4096}, [3])
        return
    with pytest.raises(error):
        memory._map([3])
    assert (driver.handles, driver.mapped, memory._handles) == (0, set(), {})


def test_whole_pieces_are_given_back_and_touched_ones_come_back_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    driver = Driver("")
    memory = memory_of(driver)
    memory._device, memory._bytes = torch.device("cuda"), torch.ones(6 * 4096, dtype=torch.uint8)
    memory._map(range(6))
    memory.give_back([(1, 3 * 4096), (4 * 4096, 6 * 4096 - 1), (4096, 2 * 4096)])
    assert sorted(memory._handles) == [0, 3, 5]
    assert driver.mapped == {(1 << 20) + piece * 4096 for piece in (0, 3, 5)}
    assert driver.handles == 3
    memory.give_back([(1, 3 * 4096)])
    assert driver.handles == 3, "what is not mapped is not given back again"
    memory.reclaim([(0, 4096 + 1), (4 * 4096 + 7, 5 * 4096)])
    assert sorted(memory._handles) == [0, 1, 3, 4, 5]
    assert driver.handles == 5
    assert memory._bytes.view(6, 4096).amax(1).tolist() == [1, 0, 1, 1, 0, 1]
    assert memory._bytes.view(6, 4096).amin(1).tolist() == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("refused", ["", "cuMemAddressReserve"])
def test_without_room_for_addresses_the_memory_is_torchs_and_the_log_says_so(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.zeros
    monkeypatch.setattr("torch.zeros", lambda shape, dtype, device: real(shape, dtype=dtype))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(is_integrated=True))
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(refused))
    backing = back((2, 3), torch.float32, torch.device("cuda", 0))
    assert not backing.gives_back
    assert backing.tensor.shape == (2, 3)
    reason = "the GPU finds no memory" if refused else "failed with error 999"
    assert reason in caplog.text
    assert "K/V pages cannot be given back to the box: cuMemAddressReserve" in caplog.text
