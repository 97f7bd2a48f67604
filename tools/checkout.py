"""Imported first by the tools: `benchmarks` and `examples` are not installed, and are found in the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
