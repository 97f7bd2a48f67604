"""The container's files, as far as they can be read and run without Docker: no image is built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from edged.http.access import Access
from edged.http.checks import PROBES
from edged.settings.load import load_settings

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "Dockerfile", ROOT / "packages/llm/edged/Dockerfile"]
KNOWN = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER"),
    *("VOLUME", "WORKDIR"),
}


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, what follows) of each, continued lines joined."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def every(name: str, file: Path = FILES[0]) -> list[str]:
    return [rest for found, rest in instructions(file) if found == name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_dockerfile_is_well_formed_and_takes_its_base_from_outside(file: Path) -> None:
    names = [name for name, _ in instructions(file)]
    assert set(names) <= KNOWN
    assert names[:2] == ["ARG", "FROM"]
    (base,) = every("FROM", file)
    assert base == "${" + every("ARG", file)[0].partition("=")[0] + "}"
    for script in every("RUN", file):
        subprocess.run(["sh", "-n", "-c", script], check=True)
    for name in ("CMD", "ENTRYPOINT", "VOLUME"):
        assert all(isinstance(json.loads(words), list) for words in every(name, file))


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert all((ROOT / name).exists() for name in kept)
    # What setuptools reads for the package.
    assert {"edged", "configs", "LICENSE", "README.md", "pyproject.toml"} <= kept
    for words in map(shlex.split, every("COPY")):
        *sources, _ = [word for word in words if not word.startswith("--")]
        assert all((ROOT / source).exists() and (source == "." or source.split("/")[0] in kept) for source in sources)


def test_a_container_runs_as_a_user_is_asked_whether_it_is_ready_and_stops_by_a_signal() -> None:
    assert every("USER")[-1] == "edged"
    assert every("STOPSIGNAL") == ["SIGTERM"]
    check = every("HEALTHCHECK")[0]
    command = json.loads(check[check.index("[") :])
    compile(command[-1], "healthcheck", "exec")
    port = every("EXPOSE")[0]
    assert f"http://127.0.0.1:{port}/readyz" in command[-1]
    assert "/readyz" in PROBES, "no token is needed for it"
    service = yaml.safe_load((ROOT / "compose.yml").read_text())["services"]["edged"]
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert {volume.partition(":")[2] for volume in service["volumes"]} == set(json.loads(every("VOLUME")[0]))
    assert service["build"]["args"].keys() == {"BASE"}


def test_the_first_start_makes_a_token_and_later_ones_keep_it(tmp_path: Path) -> None:
    named = dict(pair.split("=", 1) for each in every("ENV") for pair in shlex.split(each))
    named["EDGED_CONFIG"] = str(tmp_path / "edged.toml")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(ROOT / "docker/entrypoint"), "cat", named["EDGED_CONFIG"]]
    first, second = (
        subprocess.run(command, env={**named, "PATH": path}, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert first.stdout == second.stdout
    token = (tmp_path / "token").read_text().strip()
    assert token not in first.stdout + first.stderr
    assert (second.stderr, "has a token for the role admin" in first.stderr) == ("", True)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    settings = load_settings(named["EDGED_CONFIG"], {name: value for name, value in named.items() if name != "PATH"})
    assert settings.api.listen == f"0.0.0.0:{every('EXPOSE')[0]}"
    assert Access(settings.access, settings.api.token).has_tokens, "else it may not listen beyond loopback"
