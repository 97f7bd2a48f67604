"""Real inputs that tests read where they are there: `EDGED_TEST_DATA`, or the folder `shared` beside the checkout.

What they are, and where they come from: docs/results/README.md. A test that finds none is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(os.environ.get("EDGED_TEST_DATA", Path(__file__).parents[2] / "shared"))
DATA = _FOLDER / "data"
HH_FILE = DATA / "hh-harmless.jsonl.gz"
HH_LM = _FOLDER / "models" / "hh-lm"
