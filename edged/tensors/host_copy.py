"""Named tensors as they are at one moment, brought to the host later, by whoever has the time.

The thread that changes the tensors only has the device copy them, in one operation; on CUDA neither that thread nor
what it launches waits for their way to the host.
"""

import threading
from collections.abc import Mapping

import torch

from edged.tensors.oom import out_of_memory


class HostCopies:
    """Made on the thread that changes `tensors`; `on_host` may be called on any."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """On CUDA some may be on the host: AdamW's counts of steps are."""
        self._order = list(tensors)
        self._lock = threading.Lock()
        # One by one: for a large tensor the host's heap asks the system for pages, and faults them in.
        self._here = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        there = {name: tensor.detach() for name, tensor in tensors.items() if name not in self._here}
        self._there: Together | None = None
        try:
            self._there = Together(there) if there else None
        except Exception as error:
            if not out_of_memory(error):
                raise
            # The host has room where the device has none, and is worth the wait.
            self._here |= {name: tensor.cpu() for name, tensor in there.items()}

    def on_host(self) -> dict[str, torch.Tensor]:
        """The tensors, in the order that they were given in; from the first time on the device holds none of them."""
        with self._lock:
            if self._there is not None:
                self._here |= self._there.on_host()
                self._there = None
            return {name: self._here[name] for name in self._order}


class Together:
    """Copies of tensors of one dtype and device, one after the other in a single tensor there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        self._made: torch.cuda.Event | None = None
        if self._flat.device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(self._flat.device))

    def on_host(self) -> dict[str, torch.Tensor]:
        """The tensors by name; of one on CUDA, once they are there."""
        flat = self._flat
        if self._made is not None:
            # Beside the engine's stream: what is launched there does not wait for this copy.
            aside = torch.cuda.Stream(flat.device)
            aside.wait_event(self._made)
            with torch.cuda.stream(aside):
                flat = flat.cpu()
        pieces = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}
