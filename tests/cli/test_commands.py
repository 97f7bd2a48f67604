"""The command line itself: help, start-up, and that the documents name only what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from tests.cli.conftest import clean_environment, edged

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]
SLOW_MODULES = {"torch", "transformers", "pydantic", "aiohttp", "rich", "numpy", "sqlite_utils"}


def all_commands() -> Iterator[tuple[str, ...]]:
    """Every command's words: ("adapters", "list"), ..."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield (name,)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.list_commands(context))


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` name, and the words after its name."""
    context = click.Context(cli)
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"`edged {shlex.join(words)}`: there is no command {rest[0]}"
        command, rest = inner, rest[1:]
    return command, rest


def documented_commands() -> Iterator[tuple[str, str]]:
    """(document, command line) of every `edged ...` in a code block or code span of the documents."""
    for path in DOCUMENTS:
        text = path.read_text()
        blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL)
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans
        for line in lines:
            match = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:sudo )?edged( .*)?$", line)
            if match:
                yield path.name, match.group(1) or ""


def test_a_command_that_is_nearly_one_is_recognised() -> None:
    assert 'did you mean "edged status"?' in edged("statsu").stderr
    assert "No such command" in edged("xyzzy").stderr


def test_a_command_that_used_torch_ends_without_what_libraries_print_at_the_interpreters_end() -> None:
    program = """if True:
        import atexit, os, sys, types

        class Late:
            def __del__(self, write=os.write):
                write(2, b"leaked")

        late, sys.modules["torch"], sys.argv = Late(), types.ModuleType("torch"), ["edged", "--version"]
        atexit.register(print, "tidied")
        from edged.cli.main import main
        main()"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment())
    assert (told.returncode, told.stderr) == (0, "")
    assert re.fullmatch(r"edged, version .+\ntidied\n", told.stdout)


def test_a_model_that_is_not_there_is_named_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "edged.cli", "serve", "--model", "/no/such/model"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert told.returncode == 1
    assert 'model "/no/such/model" is not a directory' in told.stderr
    assert not re.search(r"\| +torch$", told.stderr, re.MULTILINE)


@pytest.mark.parametrize("words", list(all_commands()), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: ")
    assert len(result.output.splitlines()) > 4


@pytest.mark.parametrize(("document", "line"), sorted(set(documented_commands())))
def test_documented_commands_and_options_exist(document: str, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word not in ("...", "…")]
    for mark in ("|", ">", "&", "&&", ";"):
        words = words[: words.index(mark)] if mark in words else words
    command, rest = command_of([word.strip("[]") for word in words])
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h", "--version"}
    used = {word.split("=")[0] for word in rest if word.startswith("-") and word != "-" and not word[1:2].isdigit()}
    assert used <= known, f"{document}: `edged{line}` uses {sorted(used - known)}"


def test_no_slow_module_is_imported_for_help() -> None:
    code = (
        "import sys, click; from edged.cli.main import cli\n"
        "context = click.Context(cli)\n"
        "for name in cli.list_commands(context): cli.get_command(context, name)\n"
        f"print(sorted({SLOW_MODULES!r} & set(sys.modules)), len(sys.modules) < 260)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[] True", result.stdout + result.stderr


@pytest.mark.parametrize("words", [("stauts",), ("bench", "report", "runs")], ids=" ".join)
def test_an_unknown_command_is_refused_with_usage(words: tuple[str, ...]) -> None:
    result = edged(*words)
    assert result.returncode == 2
    assert "No such command" in result.stderr


def test_a_terminal_without_unicode_gets_replacements_instead_of_a_traceback() -> None:
    code = "import sys; from edged.cli.main import main; sys.argv = ['edged', 'config', 'init', '-o', '-']; main()"
    environment = clean_environment(PYTHONIOENCODING="ascii", EDGED_MODEL__PATH="modèle")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
