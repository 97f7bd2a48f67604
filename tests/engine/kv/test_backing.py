"""What the driver refuses leaves no piece that counts as mapped and is not."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from edged.engine.kv.backing import CudaMemory, CudaMemoryError, _Access, _Properties


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


@pytest.mark.parametrize(
    ("refused", "error"), [("", None), ("cuMemMap", MemoryError), ("cuMemSetAccess", CudaMemoryError)]
)
def test_a_piece_that_cannot_be_mapped_to_the_end_is_given_back(refused: str, error: type[Exception] | None) -> None:
    memory, driver = CudaMemory.__new__(CudaMemory), Driver(refused)
    memory._driver, memory._properties, memory._access = driver, _Properties(), _Access()  # type: ignore[assignment]
    memory._piece, memory._address, memory._handles = 4096, 1 << 20, {}
    if error is None:
        memory._map([3])
        assert (driver.handles, driver.mapped, list(memory._handles)) == (1, {(1 << 20) + 3 * 4096}, [3])
        return
    with pytest.raises(error):
        memory._map([3])
    assert (driver.handles, driver.mapped, memory._handles) == (0, set(), {})
