"""Open WebUI whole: `EDGED_OPEN_WEBUI` names its environment, which `tools/try-open-webui` makes where it is empty."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = os.environ.get("EDGED_OPEN_WEBUI", "")
TOOL = Path(__file__).parents[2] / "tools/try-open-webui"
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not FOLDER, reason="EDGED_OPEN_WEBUI names no environment for Open WebUI"),
]


def test_thumbs_over_its_rest_api_are_a_pair_and_so_is_its_export() -> None:
    done = subprocess.run([TOOL, FOLDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same pair from its export"
