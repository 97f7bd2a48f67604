"""An agent answers no command of NVFlare's that a round does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nvflare", reason="edged[federated] is not installed")

from nvflare.private.admin_defs import Message
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor


def test_nvflare_alone_reads_any_file_for_its_hub() -> None:
    """Why the agent is closed; where this fails, NVFlare has closed it."""
    reply = ShellCommandProcessor().process(Message("shell", "cat /etc/passwd"), None)
    assert "root:" in reply.body


def test_an_agent_with_our_resources_has_no_command_that_reads_files_or_configures() -> None:
    code = (
        "from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors as C\n"
        "from nvflare.private.fed.client.admin_commands import AdminCommands as A\n"
        "from edged.federated_nvflare.executor import RoundExecutor\n"
        "from edged.federated_nvflare.resources import BoxResources\n"
        "before = len(C.request_processors)\n"
        "BoxResources(), RoundExecutor()\n"
        "assert before > len(C.request_processors) > 0\n"
        "print(*(type(each).__name__ for each in (*C.request_processors, *A.commands)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {"CheckResourceProcessor", "StartJobProcessor", "AbortCommand"} <= {*names}
    assert not [name for name in names if "Shell" in name or "Log" in name or "Env" in name or "SysInfo" in name]
