"""The recipes of CONTRIBUTING.md work: their blocks are applied to a copy of the tree, and their commands run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TREE = ("edged", "tests", "docs", "configs", "benchmarks", "examples", "tools", "systemd", "docker", "integrations")
FILES = ("pyproject.toml", "README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
RECIPES = dict(
    re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", TEXT.partition("\n## Recipes\n")[2], re.DOTALL | re.MULTILINE)
)
recipe = pytest.mark.parametrize("recipe", RECIPES)


def change(text: str, hunk: str) -> str:
    """The text with one place changed: lines of " " and "-" stand there once, and become those of " " and "+"."""
    marked = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
    former, now = ([line for mark, line in marked if mark in marks] for marks in (" -", " +"))
    lines = text.split("\n")
    places = [at for at in range(len(lines)) if lines[at : at + len(former)] == former]
    assert len(places) == 1, "stands there no longer, or more than once:\n" + "\n".join(former)
    return "\n".join([*lines[: places[0]], *now, *lines[places[0] + len(former) :]])


def applied(recipe: str) -> tuple[dict[str, str], list[str]]:
    """The files that a recipe writes, with their texts, and its commands."""
    files: dict[str, str] = {}
    for diff in re.findall(r"^```diff\n(.*?)^```$", RECIPES[recipe], re.DOTALL | re.MULTILINE):
        for file, hunk in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", diff, re.DOTALL | re.MULTILINE):
            files[file] = change(files.get(file) or (ROOT / file).read_text(), hunk)
    for file, text in re.findall(r"`([\w/.]+)`:\n\n```python\n(.*?)^```$", RECIPES[recipe], re.DOTALL | re.MULTILINE):
        assert not (ROOT / file).exists(), f"{file} is no new file"
        files[file] = text
    blocks = re.findall(r"^```sh\n(.*?)^```$", RECIPES[recipe], re.DOTALL | re.MULTILINE)
    return files, [line for block in blocks for line in block.splitlines()]


def test_there_is_a_recipe_for_what_people_add() -> None:
    assert list(RECIPES) == ["A policy", "An API field", "A loss", "A setting", "A command", "A migration"]


def test_a_change_is_made_in_the_one_place_that_it_names() -> None:
    assert change("a\nb\nc\n", " a\n-b\n+B\n+D") == "a\nB\nD\nc\n"
    for hunk in (" b\n+x", " d\n+x"):
        with pytest.raises(AssertionError, match="stands there"):
            change("b\nb\nc\n", hunk)


@recipe
def test_a_recipe_fits_the_code_and_is_formatted(recipe: str) -> None:
    files, commands = applied(recipe)
    assert any("pytest" in command for command in commands)
    for file, text in files.items():
        for check in (("format", "--diff"), ("check",)) if file.endswith(".py") else ():
            command = [sys.executable, "-m", "ruff", *check, "--stdin-filename", file, "-"]
            done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@recipe
def test_a_recipe_works_in_a_copy_of_the_tree(recipe: str, tmp_path: Path) -> None:
    files, commands = applied(recipe)
    for name in TREE:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
