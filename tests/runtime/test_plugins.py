"""Other packages bring policies and commands: one of ten lines is installed, and used by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import clean_environment, edged

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "theirs"
version = "1"
[project.entry-points."edged.policies"]
longest-first = "theirs:LONGEST"
not-a-row = "theirs:greet"
ekya = "theirs:LONGEST"
[project.entry-points."edged.commands"]
greet = "theirs:greet"
gone = "theirs:nothing"
status = "theirs:greet"
bench = "theirs:greet"
"""
MODULE = """
from dataclasses import replace
import click
from edged.scheduler.policies.base import Order
from edged.scheduler.policies.phased import FCFS
class Longest(Order):
    key = staticmethod(lambda task: (-task.num_tokens, task.task_id))
LONGEST = replace(FCFS, name="longest-first", summary="the longest prompt goes first", order=Longest)
@click.command()
def greet(): print("hello from theirs")
"""
DEVICE = ("-d", "agx-orin-32gb-maxn", "-m", "mistral-3b")
SIMULATE = ("bench", "simulate", "--trace", "lognormal:50:10", *DEVICE, "--rate", "2", "--seconds", "2")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the installed package."""
    source, site = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "theirs.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=120)
    return str(site)


def test_a_policy_of_another_package_is_chosen_by_its_name(theirs: str) -> None:
    done = edged(*SIMULATE, "--policy", "longest-first", "--json", PYTHONPATH=theirs)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["policy"] == "longest-first"
    assert report["requests"]["finished"] > 0
    assert '"not-a-row" of the package theirs is a Command, no Row' in done.stderr
    unknown = edged(*SIMULATE, "--policy", "longest-firts", PYTHONPATH=theirs)
    assert 'did you mean "longest-first"?' in unknown.stderr


def test_a_policy_of_another_package_takes_no_name_of_edgeds_own(theirs: str) -> None:
    code = "from edged.scheduler.policies.registry import ROWS; print(ROWS['ekya'].name, *list(ROWS)[-1:])"
    environment = clean_environment(PYTHONPATH=theirs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "ekya longest-first\n", done.stderr


def test_a_command_of_another_package_is_run_and_takes_no_name_of_edgeds_own(theirs: str) -> None:
    assert edged("greet", PYTHONPATH=theirs).stdout == "hello from theirs\n"
    assert "greet" not in edged("--help").stdout
    listed = edged("--help", PYTHONPATH=theirs)
    assert listed.returncode == 0, listed.stderr
    assert "greet" in listed.stdout
    assert listed.stdout.count(" status ") == 1
    assert "What the daemon does now" in edged("status", "--help", PYTHONPATH=theirs).stdout
    assert "Measure this machine" in edged("bench", "--help", PYTHONPATH=theirs).stdout


def test_a_command_that_cannot_be_loaded_says_of_which_package_it_is(theirs: str) -> None:
    done = edged("gone", "--option", "argument", PYTHONPATH=theirs)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'edged: "gone" of the package theirs cannot be loaded' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tree_that_was_installed_before_it_had_entry_points_says_how_to_get_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder of a checkout has what setuptools wrote of it, and comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edged-0.dist-info").mkdir()
    (tmp_path / "edged-0.dist-info" / "METADATA").write_text("Name: edged\nVersion: 0\n")
    told = edged("bench", "simulate", PYTHONPATH=str(tmp_path)).stderr
    assert '"bench" was not installed: install edged again (from a checkout: tools/env)' in told
    assert "  status " in edged("--help", PYTHONPATH=str(tmp_path)).stdout
