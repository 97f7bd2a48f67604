"""Clients that people have, each run as it is installed, against a model that calls a tool.

They pin packages of their own, so that they have environments of their own: `EDGED_CLIENTS` names their Pythons, as
`PATH` names folders: with openai-agents, langchain-openai, pydantic-ai-slim[openai] and llm; with instructor; with
litellm; with llama-index-llms-openai-like and smolagents[openai]. A client is run by the first that has what it
imports. `EDGED_NODE_MODULES` is a folder `node_modules` with openai, ai, @ai-sdk/openai, @ai-sdk/openai-compatible and
zod. `tests/api/client_bodies.json` has what they sent.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.live import running
from tests.api.test_tools import AFTER, QWEN3, SCRIPT, free_port
from tests.scripted import save_scripted

PYTHONS = os.environ.get("EDGED_CLIENTS", "").split(os.pathsep)
MODULES = os.environ.get("EDGED_NODE_MODULES", "")
STRICT = {
    *("agents_sdk", "agents_responses", "pydantic_agent", "pydantic_responses"),
    *("smolagents_tools", "instructor_modes"),
}
"""Clients whose tools are strict, or whose calls are required."""
CLIENTS = Path(__file__).parent / "clients"
IMPORTED = re.compile(r"^(?:import|from) ([a-z_.]+)", re.MULTILINE)
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not (any(PYTHONS) or MODULES), reason="neither setting names an environment of clients"),
]


def python_of(code: str) -> str:
    """The first Python that has what a script imports, or begins by itself; skips the test where none has."""
    names = {*IMPORTED.findall(code), *(["llm"] if '"llm"' in code else [])}
    for python in filter(None, PYTHONS):
        found = f"import importlib.util as u; assert all(map(u.find_spec, {sorted(names)}))"
        if not subprocess.run([python, "-c", found], capture_output=True).returncode:
            return python
    pytest.skip(f"EDGED_CLIENTS names no Python that has {', '.join(sorted(names))}")


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("clients")
    save_scripted(root / "qwen", QWEN3.read_text(), SCRIPT, AFTER)
    port = free_port()
    with running(root / "run", root / "qwen", api__listen=f"127.0.0.1:{port}"):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("name", [path.stem for path in sorted(CLIENTS.glob("*.py"))])
def test_a_client_calls_the_tool_and_gets_the_answer(base_url: str, name: str) -> None:
    script = CLIENTS / f"{name}.py"
    told = told_by([python_of(script.read_text()), str(script), base_url])
    assert set(told.get("answers", [AFTER])) == {AFTER}
    if name in STRICT:
        # What must come next is written in one way, and the script has another.
        assert {*told["asked"]} <= {"Paris", "Rome"}
        assert len(told["asked"]) >= len(told.get("answers", [AFTER]))
    else:
        assert told["asked"] == ["Paris", "Rome"] * len(told["answers"])


@pytest.mark.skipif(not MODULES, reason="EDGED_NODE_MODULES names no folder with the clients")
@pytest.mark.parametrize("script", sorted(Path(__file__).parent.glob("clients-js/*.mjs")), ids=lambda path: path.stem)
def test_a_client_of_javascript_does_so_too_and_gets_its_objects(base_url: str, script: Path, tmp_path: Path) -> None:
    # A module is looked for beside the file that imports it.
    (tmp_path / "node_modules").symlink_to(MODULES)
    copy = tmp_path / script.name
    copy.write_text(script.read_text())
    told = told_by(["node", str(copy), base_url])
    assert set(told["answers"]) == {AFTER}
    assert told["asked"] == ["Paris", "Rome"] * len(told["answers"])
    assert {*told["parsed"]} <= {"Paris", "Rome"}
    assert len(told["parsed"]) > 2


def told_by(command: list[str]) -> dict[str, Any]:
    """What a client's script prints in its last line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


DOCUMENT = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
BLOCKS = re.findall(r"### (.+)\n(?:(?!###)[\s\S])*?```python\n([\s\S]*?)```", DOCUMENT)


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_block_of_the_documentation_runs(base_url: str, name: str, code: str) -> None:
    command = [python_of(code), "-c", code.replace("http://127.0.0.1:8137/v1", base_url).replace('"demo"', '"qwen"')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
