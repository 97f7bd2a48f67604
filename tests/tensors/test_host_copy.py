"""Copies of tensors are what the tensors were, whatever becomes of them."""

from __future__ import annotations

import pytest
import torch

from edged.tensors import host_copy
from edged.tensors.host_copy import HostCopies, Together

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {"a": torch.randn(3, 5), "wide": torch.randn(7, 2).t(), "one": torch.tensor(4.0)}
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


@pytest.mark.parametrize("kind", [HostCopies, Together])
def test_copies_are_what_the_tensors_were(kind: type[HostCopies] | type[Together]) -> None:
    wanted, given = tensors(), tensors() | {"step": torch.tensor(2.0)}
    if kind is Together:
        del given["step"]
    copied = kind(given)
    for tensor in given.values():
        tensor.zero_()
    found = copied.on_host()
    assert list(found) == list(given)
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in wanted.items())


def test_what_the_device_has_no_memory_for_is_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(host_copy, "Together", full)
    given = {"step": torch.tensor(2.0), "there": torch.empty(3, device="meta"), "a": torch.ones(2)}
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.full(tensor.shape, 7.0))
    found = HostCopies(given).on_host()
    assert list(found) == ["step", "there", "a"]
    assert found["there"].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there is nothing but the host")
def test_copies_that_were_brought_to_the_host_leave_the_device() -> None:
    copied = HostCopies(tensors())
    assert copied._there is not None
    first = copied.on_host()
    assert copied._there is None
    again = copied.on_host()
    assert all(again[name] is tensor for name, tensor in first.items())
