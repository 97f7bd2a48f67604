"""The hub's process of a round."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nvflare", reason="edged[federated] is not installed")


def test_a_round_ends_without_torch_which_takes_seconds_to_import() -> None:
    code = (
        "import sys\n"
        "import edged.federated_nvflare.controller\n"
        "from nvflare.apis.impl.wf_comm_server import WFCommServer\n"
        "WFCommServer._cleanup_inflight_tensor_downloads(None, None)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
