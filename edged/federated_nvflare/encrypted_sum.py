"""The encrypted sum: boxes encrypt how B moved, the hub adds up what it cannot read, and boxes decrypt the mean.

CKKS (Cheon, Kim, Kim, Song 2017) by TenSEAL, with the parameters of NVFlare's own builder: 4,096 numbers a ciphertext
of 235 KB, at an error of some 1e-8. All boxes have one secret key, and the hub the public one. So the hub alone learns
nothing of a record or a start; a hub in league with a box does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from edged.federated.averaging import B, moved
from edged.federated.campaign_file import parse_campaign
from edged.federated.privacy import Tensors
from edged.federated.records import RoundFile
from edged.federated_nvflare.box_daemon import facts_of
from edged.federated_nvflare.kits import SUM_KEY, KitError

_SLOTS = 4096
_DEGREE, _BITS, _SCALE = 2 * _SLOTS, [60, 40, 40], 2.0**40
Sealed = Sequence[bytes]
"""Ciphertexts of a vector of B's numbers, by the tensors' names in order."""


def _tenseal() -> Any:
    try:
        import tenseal
    except ImportError:
        raise KitError("TenSEAL is not installed, which encrypts sums: pip install 'edged[federated]'") from None
    return tenseal


def make_keys() -> tuple[bytes, bytes]:
    """Return a new key for boxes, and one for the hub, which cannot decrypt. Raises KitError without TenSEAL."""
    tenseal = _tenseal()
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, _DEGREE, coeff_mod_bit_sizes=_BITS)
    context.global_scale = _SCALE
    secret: bytes = context.serialize(save_secret_key=True)
    context.make_context_public()
    return secret, context.serialize()


def box_key() -> bytes:
    """Return the key of this box's kit. Raises KitError, OSError."""
    kit = os.environ.get("EDGED_KIT")
    if not kit:
        raise KitError("EDGED_KIT names no kit: start the agent by `edged federated agent`")
    return (Path(kit) / "startup" / SUM_KEY).read_bytes()


def encrypt(values: np.ndarray, key: bytes) -> list[bytes]:
    """Encrypt a vector."""
    tenseal = _tenseal()
    context = tenseal.context_from(key)
    pieces = (values[first : first + _SLOTS] for first in range(0, len(values), _SLOTS))
    return [tenseal.ckks_vector(context, piece.tolist()).serialize() for piece in pieces]


def add(sealed: Sequence[Sealed], key: bytes, factor: float = 1.0) -> list[bytes]:
    """Return the sum of encrypted vectors, times `factor`, once at most. Raises ValueError for unlike lengths."""
    tenseal = _tenseal()
    context, total = tenseal.context_from(key), []
    for pieces in zip(*sealed, strict=True):
        first, *others = (tenseal.ckks_vector_from(context, piece) for piece in pieces)
        for other in others:
            if other.size() != first.size():
                raise ValueError("encrypted records differ in length")
            first += other
        total.append((first if factor == 1.0 else first * factor).serialize())
    return total


def decrypt(sealed: Sealed, key: bytes) -> np.ndarray:
    """Decrypt a vector: float64."""
    tenseal = _tenseal()
    context = tenseal.context_from(key)
    return np.concatenate([np.array(tenseal.ckks_vector_from(context, piece).decrypt()) for piece in sealed])


def sealed_record(content: bytes, key: bytes) -> dict[str, Any]:
    """Return a record for the hub: its facts with zeros for its numbers, and these encrypted."""
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = load(content)
    values = np.concatenate([tensors[name].ravel() for name in sorted(tensors)])
    return {"record": content[:begin] + bytes(len(content) - begin), "sealed": encrypt(values, key)}


def opened(start: Tensors, sealed: Sealed, key: bytes) -> dict[str, np.ndarray]:
    """Return a start whose B is moved by an encrypted mean. Raises ValueError where that is of another form."""
    values, names = decrypt(sealed, key), sorted(name for name in start if name.endswith(B))
    ends = np.cumsum([start[name].size for name in names])
    if len(values) != ends[-1] or not np.isfinite(values).all():
        raise ValueError("the mean of the boxes is of another form than the start")
    pieces = zip(names, np.split(values.astype(np.float32), ends[:-1]), strict=True)
    return moved(start, {name: piece.reshape(start[name].shape) for name, piece in pieces})


def opened_round(content: bytes, sealed: Sealed, key: bytes) -> bytes:
    """Return a round file whose start is moved by an encrypted mean. Raises ValueError, CampaignRefused."""
    facts: Mapping[str, Any] = facts_of(content)
    tensors = opened(load(content), sealed, key)
    job, asked = parse_campaign(facts["job"]), {name: facts[name] for name in ("round", "nonce", "start")}
    return RoundFile(job=job, tensors=tensors, **asked).content()


def opened_weights(content: bytes, sealed: Sealed, key: bytes) -> bytes:
    """Return a start's weights, a safetensors file, moved by an encrypted mean. Raises ValueError."""
    return save(opened(load(content), sealed, key), {"format": "pt"})
