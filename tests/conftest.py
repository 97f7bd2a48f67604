"""Settings of all tests."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter. Read when triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No timing assertions: a busy machine must not fail a property.
settings.register_profile("edged", deadline=None)
settings.load_profile("edged")
