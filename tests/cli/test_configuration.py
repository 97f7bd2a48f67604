"""`edged config`, `configs/edged.toml` and `docs/configuration.md` all say what `edged.settings.load` says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.cli.settings import load_settings
from edged.scheduler.policies.registry import ROWS
from edged.settings.load import RENAMED, AlignSettings, ConfigError, Settings
from edged.settings.load import load_settings as load_typed
from edged.settings.toml import to_toml_value
from tests.tree.documents import section_table

ROOT = Path(__file__).parents[2]
LOSSES = get_args(AlignSettings.model_fields["loss"].annotation)


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDGED_CONFIG", "EDGED_MODEL__PATH"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_the_annotated_profile_is_what_init_writes(tmp_path: Path) -> None:
    run("config", "init", "--output", str(tmp_path / "edged.toml"))
    assert (tmp_path / "edged.toml").read_text() == (ROOT / "configs" / "edged.toml").read_text()


def test_every_value_of_the_annotated_profile_is_the_default() -> None:
    values = tomllib.loads((ROOT / "configs" / "edged.toml").read_text())
    assert values == json.loads(Settings().model_dump_json())


def test_init_does_not_overwrite_a_file_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "edged.toml"
    path.write_text("mine")
    assert "exists" in run("config", "init", "-o", str(path), code=1)
    assert path.read_text() == "mine"
    run("config", "init", "-o", str(path), "--force")
    assert "[align]" in path.read_text()


def test_show_is_toml_of_file_and_environment_with_the_changes_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "edged.toml"
    path.write_text("[align]\nrank = 8\n")
    monkeypatch.setenv("EDGED_MODEL__PATH", 'a "quoted" \\ path')
    text = run("config", "show", "--config", str(path))
    assert "rank = 8  # default: 16" in text
    assert tomllib.loads(text)["model"]["path"] == 'a "quoted" \\ path'
    assert json.loads(run("config", "show", "--config", str(path), "--json"))["align"]["rank"] == 8


def test_show_writes_rules_and_tokens_as_they_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "edged.toml"
    rules = [{"roles": ["admin"], "users": ["@self"], "identity": "field", "peers": ["group:ops"]}]
    tokens = [{"roles": ["use"], "users": ["a*"], "identity": "header:X-A", "name": "web", "sha256": "0" * 64}]
    path.write_text(f"[access]\nrules = {to_toml_value(rules)}\ntokens = {to_toml_value(tokens)}\n")
    shown = run("config", "show", "--config", str(path))
    assert tomllib.loads(shown)["access"] == {"rules": rules, "tokens": tokens}
    path.write_text(shown)
    assert run("config", "show", "--config", str(path)) == shown


def test_show_names_a_wrong_setting_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "edged.toml"
    path.write_text("[align]\nrnak = 8\n")
    output = run("config", "show", "--config", str(path), code=1)
    assert output.startswith("edged: ")
    assert 'did you mean "rank"' in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[scheduler]\npolicy = "MACE"\n', 'setting "scheduler.policy" = \'MACE\': did you mean "mace"?'),
        ('[model]\ndtype = "bf16"\n', 'setting "model.dtype" = \'bf16\': did you mean "bfloat16"?'),
        ("[align]\nloss = 3\n", f'setting "align.loss" = 3: known: {", ".join(LOSSES)}'),
        (
            "[scheduler]\nretrain_every_s = 10\nretrain_window_s = 12\n",
            'setting "scheduler.retrain_window_s" = 12: it must be shorter than retrain_every_s (10.0 s)',
        ),
        (
            '[[access.rules]]\npeers = ["user:ann"]\nroles = ["use", "trian"]\n',
            'setting "access.rules.0.roles.1" = \'trian\': did you mean "train"?',
        ),
        (
            '[[access.rules]]\npeers = ["user:ann"]\nroles = ["use"]\nuser = ["ann"]\n',
            'unknown setting "access.rules.0.user": did you mean "users"?',
        ),
        (
            '[[access.rules]]\npeers = ["ann"]\nroles = ["use"]\n',
            '"ann" names no peer: write "user:NAME", "group:NAME", "uid:NUMBER" or "gid:NUMBER"',
        ),
        ("[fairness]\nweights = { ann = 0 }\n", 'setting "fairness.weights.ann" = 0: it must be more than 0'),
        ('[fairness]\nweights = { "a b" = 1 }\n', '"a b" names no user: give a name, or a name\'s beginning with "*"'),
        ('[fairness]\nrun_headers = ["a b"]\n', '"a b" is no name of a header'),
        ('[access]\ntokens = "{"\n', 'setting "access.tokens": it is neither a list of tables nor JSON'),
    ],
)
def test_a_wrong_choice_is_told_the_nearest_one_or_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "edged.toml"
    path.write_text(text)
    assert message in run("config", "show", "--config", str(path), code=1)


def test_a_misspelt_policy_on_the_command_line_is_told_the_nearest_name() -> None:
    assert 'did you mean "ekya"?' in run("serve", "--policy", "eyka", code=1)


@pytest.mark.parametrize("policy", ROWS)
def test_every_policy_there_is_can_be_chosen(policy: str) -> None:
    assert load_settings(None, {"scheduler.policy": policy}).scheduler.policy == policy


def test_an_unknown_policy_is_told_beside_other_wrong_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"scheduler.policy": "zzz", "scheduler.gamma": -1.0})
    known = ", ".join(ROWS)
    assert f"setting \"scheduler.policy\" = 'zzz': known: {known}" in str(caught.value)
    assert 'setting "scheduler.gamma" = -1.0' in str(caught.value)


@pytest.mark.parametrize("command", [("serve",), ("bench", "replay")])
def test_help_lists_every_policy(command: tuple[str, ...]) -> None:
    text = re.sub(r"-\n +", "-", run(*command, "--help"))
    assert set(ROWS) <= set(re.findall(r"[a-z-]+", text.split("--policy")[1].split("Default")[0]))


def test_a_value_in_the_place_of_a_section_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "edged.toml"
    path.write_text('model = "demo"\n')
    monkeypatch.setenv("EDGED_MODEL__PATH", "./other")
    output = run("config", "show", "--config", str(path), code=1)
    assert output == f"edged: {path}: \"model\" = 'demo' is not a section: write [model] above its settings\n"


def test_show_says_that_a_file_is_missing() -> None:
    assert "config init" in run("config", "show", "--config", "/nowhere/edged.toml", code=1)


FORMER = {
    "cache.spill": "host",
    "cache.spill_mb": 7,
    "align.idle_passes": 7,
    "align.idle_replay": 0,
    "align.keep_graph": "lean",
}
FORMER |= {"model.short_layers": False, "model.narrow_weights": False}
MEANING = {"align.idle_passes": True, "align.idle_replay": False, "align.keep_graph": "selective"}


@pytest.mark.parametrize("where", ["file", "environment", "flag"])
@pytest.mark.parametrize("former", RENAMED)
def test_a_setting_is_read_under_its_former_name_and_the_log_has_its_name_now(
    former: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (section, key), now, value = former.split("."), RENAMED[former], FORMER[former]
    file = tmp_path / "edged.toml"
    file.write_text(f"[{section}]\n{key} = {json.dumps(value)}\n" if where == "file" else "")
    environ = {f"EDGED_{section}__{key}".upper(): str(value)} if where == "environment" else {}
    settings = load_typed(file, environ, {former: value} if where == "flag" else {})
    found = settings.model_dump()[section][now.split(".")[1]]
    assert found == MEANING.get(former, value)
    assert f'setting "{former}" is called "{now}" now' in caplog.text


@pytest.mark.parametrize("section", list(Settings.model_fields))
def test_the_documentation_lists_every_setting(section: str) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    heading, table = f"\n## `[{section}]`", section_table(section)
    assert heading in text
    part = text.partition(heading)[2].partition("\n## ")[0]
    assert table in part, f"write [{section}] anew: python -m tests.tree.documents"


def test_a_token_is_not_shown() -> None:
    for flags in ((), ("--json",)):
        shown = CliRunner().invoke(cli, ["config", "show", *flags], env={"EDGED_API__TOKEN": "sesame-7319"}).output
        assert "sesame" not in shown
        assert "(set, not shown)" in shown
