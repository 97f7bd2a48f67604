"""What each decoder layer was given in a fine-tune forward: all that is kept of it besides the K/V pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """Stands for a kept tensor in a layer's recorded call."""

    index: int


class LayerInputs:
    """Hidden states [layers, rows, hidden_size] and, beside them, every per-token tensor of the layers' calls.

    Filled chunk by chunk from packed forwards; `window` gives a layer's call again for some rows.
    """

    def __init__(self, layers: int, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.hidden = torch.empty(layers, rows, hidden_size, dtype=dtype, device=device)
        self._calls: list[dict[str, Any]] = [{} for _ in range(layers)]
        self._banks: list[torch.Tensor] = []
        self._chunk: dict[int, tuple[torch.Tensor, int]] = {}
        """Tensors of the present chunk by identity (kept alive, so that an identity cannot be reused) -> bank."""
        self._chunk_start = -1

    def keep(self, layer: int, start: int, hidden: torch.Tensor, call: Mapping[str, Any], index: torch.Tensor) -> None:
        """Keep packed rows `index` of a layer's call (`hidden` [1, tokens, hidden_size]) as rows from `start` on."""
        if layer == 0 or start != self._chunk_start:
            self._chunk, self._chunk_start = {}, start
        self.hidden[layer, start : start + len(index)] = hidden[0].index_select(0, index)
        known = self._calls[layer]
        for name, value in call.items():
            known[name] = self._keep(known.get(name), value, index, hidden.shape[1])

    def _keep(self, known: Any, value: Any, index: torch.Tensor, tokens: int) -> Any:
        if isinstance(value, tuple):
            parts = known if isinstance(known, tuple) else (None,) * len(value)
            return tuple(self._keep(k, v, index, tokens) for k, v in zip(parts, value, strict=True))
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != tokens:
            return value
        # Most decoders hand one tensor to every layer: one bank serves them all, written once per chunk.
        if id(value) in self._chunk:
            return _KeptTensor(self._chunk[id(value)][1])
        if isinstance(known, _KeptTensor):
            bank = known.index
        else:
            bank = len(self._banks)
            shape = (value.shape[0], self.rows, *value.shape[2:])
            with torch.inference_mode(False):
                self._banks.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        self._banks[bank][:, self._chunk_start : self._chunk_start + len(index)] = value.index_select(1, index)
        self._chunk[id(value)] = (value, bank)
        return _KeptTensor(bank)

    def window(self, layer: int, start: int, stop: int) -> dict[str, Any]:
        """The keyword arguments of `layer` for rows [start, stop)."""
        return {name: self._cut(value, start, stop) for name, value in self._calls[layer].items()}

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut(part, start, stop) for part in value)
        return self._banks[value.index][:, start:stop] if isinstance(value, _KeptTensor) else value
