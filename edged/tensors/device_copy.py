"""Upload of index tables to the device, and the kind of its memory."""

from collections.abc import Sequence

import numpy as np
import torch


def upload(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy one-dimensional int64 tables to the device in one transfer; the results are views of one tensor."""
    joined = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        # Without pinned memory the host would wait until the device has caught up.
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.split([part.size for part in parts]))


def has_own_memory(device: torch.device) -> bool:
    """Whether the device is a discrete GPU: an integrated one shares the box's memory, as the CPU does."""
    return device.type == "cuda" and not getattr(torch.cuda.get_device_properties(device), "is_integrated", False)
