"""Snapshots of named tensors, copied to the host later, on any thread.

The thread that changes the tensors only queues a copy on the device, in one operation; on CUDA neither that thread nor
the work that it launches waits for the copy to the host.
"""

import threading
from collections.abc import Mapping

import torch

from edged.tensors.oom import out_of_memory


class HostCopies:
    """A snapshot of `tensors`, made on the thread that changes them; `on_host` may be called on any thread."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors`; some may be on the host."""
        self._order = list(tensors)
        self._lock = threading.Lock()
        # One by one: a single large tensor would make the host's heap ask the system for pages, and fault them in.
        self._here = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        there = {name: tensor.detach() for name, tensor in tensors.items() if name not in self._here}
        self._there: Together | None = None
        try:
            self._there = Together(there) if there else None
        except Exception as error:
            if not out_of_memory(error):
                raise
            # If the device has no room the host has, and the wait is worth it.
            self._here |= {name: tensor.cpu() for name, tensor in there.items()}

    def on_host(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the given order; after the first call the device holds no copies."""
        with self._lock:
            if self._there is not None:
                self._here |= self._there.on_host()
                self._there = None
            return {name: self._here[name] for name in self._order}


class Together:
    """Copies of tensors of one dtype and device, concatenated in a single tensor there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        self._made: torch.cuda.Event | None = None
        if self._flat.device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(self._flat.device))

    def on_host(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; on CUDA this waits for the copy."""
        flat = self._flat
        if self._made is not None:
            # Beside the engine's stream: what is launched there does not wait for this copy.
            aside = torch.cuda.Stream(flat.device)
            aside.wait_event(self._made)
            with torch.cuda.stream(aside):
                flat = flat.cpu()
        pieces = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}
