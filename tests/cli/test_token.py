"""`edged token`: a token is shown once, and what the settings keep of it is enough to know it by."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.settings.access import token_hash
from edged.settings.load import load_settings


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["token", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_what_new_prints_goes_into_the_settings_and_does_not_hold_the_token(tmp_path: Path) -> None:
    output = run("new", "web", "--roles", "use,train", "--users", "ann,bo*")
    secret = next(word for word in output.split() if word.startswith("edged_"))
    lines = output[output.index("[access]") :]
    assert secret not in lines
    assert tomllib.loads(lines)["access"]["tokens"][0]["sha256"] == token_hash(secret)
    (tmp_path / "edged.toml").write_text(lines)
    token = load_settings(tmp_path / "edged.toml", environ={}).access.tokens[0]
    assert (token.name, token.roles, token.users) == ("web", ["use", "train"], ["ann", "bo*"])


@pytest.mark.parametrize(
    ("given", "kept"), [("name", "name:ann"), ("header:X-User", "header:X-User"), ("field", "field")]
)
def test_a_token_says_where_its_users_come_from(tmp_path: Path, given: str, kept: str) -> None:
    made = json.loads(run("new", "tablet", "--users", "ann", "--identity", given, "--json"))
    (tmp_path / "edged.toml").write_text(made["toml"])
    assert load_settings(tmp_path / "edged.toml", environ={}).access.tokens[0].identity == kept


def test_tokens_are_never_alike_and_have_256_random_bits() -> None:
    made = {json.loads(run("new", "web", "--json"))["token"] for _ in range(5)}
    assert len(made) == 5
    assert all(len(token.removeprefix("edged_")) >= 43 for token in made)


def test_list_shows_names_roles_and_users(tmp_path: Path) -> None:
    path = tmp_path / "edged.toml"
    made = json.loads(run("new", "web", "--users", "ann", "--json"))
    path.write_text(made["toml"])
    assert json.loads(run("list", "-c", str(path), "--json")) == {
        "tokens": [{"name": "web", "roles": ["use", "train"], "users": ["ann"], "identity": "field"}]
    }
    made = json.loads(run("new", "web", "--users", "ann", "--identity", "name", "--json"))
    path.write_text(made["toml"])
    table = run("list", "-c", str(path))
    assert "name:ann" in table
    assert "use, train" in table
    assert made["sha256"] not in table
    path.write_text("")
    assert "edged token new" in run("list", "-c", str(path))


def test_a_token_for_prometheus_reads_metrics_alone() -> None:
    made = json.loads(run("new", "prometheus", "--roles", "metrics", "--json"))
    assert (made["roles"], "users" in made) == (["metrics"], False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "web", "--roles", "trian"), 'did you mean "train"?'),
        (("new", "a/b"), '"a/b" cannot name a token'),
        (("new", "web", "--users", "a/b"), '"a/b" names no user'),
        (("new", "web", "--users", "@self"), "a token has no name of its own"),
        (("new", "web", "--identity", "name"), "--identity name takes the user from --users"),
        (("new", "web", "--users", "ann,ben", "--identity", "name"), "--identity name takes the user from --users"),
        (("new", "web", "--users", "ann", "--identity", "name:eve"), 'the identity "name:eve" is of none of its users'),
        (("new", "web", "--roles", "admin", "--users", "ann"), '"admin" speaks for everybody'),
    ],
)
def test_what_cannot_be_is_named(arguments: tuple[str, ...], message: str) -> None:
    output = run(*arguments, code=1)
    assert message in output
    assert "edged_" not in output
