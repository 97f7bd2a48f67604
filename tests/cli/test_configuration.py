"""`edged config`, `configs/edged.toml` and `docs/configuration.md` all say what `edged.settings.load` says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.cli.settings import load_settings
from edged.scheduler.policies.registry import ROWS
from edged.settings.former import REMOVED, RENAMED
from edged.settings.load import AlignSettings, ConfigError, Settings
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
            '[scheduler]\npolicy = "ekya"\noptions = { retrain_every_s = 10, retrain_window_s = 12 }\n',
            'setting "scheduler.options.retrain_window_s" = 12: it must be shorter than retrain_every_s (10.0 s)',
        ),
        ("[scheduler.options]\ngama = 1\n", 'unknown setting "scheduler.options.gama": did you mean "gamma"?'),
        ("[scheduler.options]\ngamma = -1\n", 'setting "scheduler.options.gamma" = -1: it must be at least 0'),
        ('[scheduler]\ngamma = "a"\n', "setting \"scheduler.options.gamma\" = 'a': it must be a number"),
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
        load_settings(None, {"scheduler.policy": "zzz", "scheduler.tbt_factor": -1.0})
    known = ", ".join(ROWS)
    assert f"setting \"scheduler.policy\" = 'zzz': known: {known}" in str(caught.value)
    assert 'setting "scheduler.tbt_factor" = -1.0' in str(caught.value)


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


FORMER: dict[str, Any] = {
    "cache.prefix_sharing": False,
    "cache.spill": "host",
    "cache.spill_mb": 7,
    "align.idle_passes": 7,
    "align.idle_replay": 0,
    "align.keep_graph": "lean",
}
MEANING = {
    "cache.prefix_sharing": "none",
    "align.idle_passes": True,
    "align.idle_replay": False,
    "align.keep_graph": "selective",
}


def written_as(where: str, folder: Path, dotted: str, value: Any) -> dict[str, Any]:
    """Arguments of `load_settings` that set `dotted` in a file, in the environment or by a flag."""
    section, key = dotted.split(".")
    file = folder / "edged.toml"
    file.write_text(f"[{section}]\n{key} = {json.dumps(value)}\n" if where == "file" else "")
    environ = {f"EDGED_{section}__{key}".upper(): str(value)} if where == "environment" else {}
    return {"path": file, "environ": environ, "overrides": {dotted: value} if where == "flag" else {}}


@pytest.mark.parametrize("where", ["file", "environment", "flag"])
@pytest.mark.parametrize("former", RENAMED)
def test_a_setting_is_read_under_its_former_name_and_the_log_has_its_name_now(
    former: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = FORMER.get(former, 0.5)
    found: Any = load_typed(**written_as(where, tmp_path, former, value)).model_dump()
    for name in RENAMED[former].split("."):
        found = found[name]
    wanted = MEANING.get(former, value)
    # Options are texts until the policy's own model reads them.
    assert found == wanted or (found, where) == (str(wanted), "environment")
    assert f'setting "{former}" is called "{RENAMED[former]}" now' in caplog.text


@pytest.mark.parametrize("where", ["file", "environment", "flag"])
@pytest.mark.parametrize("former", REMOVED)
def test_a_setting_that_is_no_more_is_left_out_and_one_line_says_what_holds(
    former: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_typed(**written_as(where, tmp_path, former, "anything")) == Settings()
    (line,) = caplog.messages
    assert line == f'setting "{former}" is no more and was not read: {REMOVED[former]}'


def test_no_former_name_is_one_that_holds_now() -> None:
    now = {f"{section}.{key}" for section, table in Settings() for key in type(table).model_fields}
    assert not now & (REMOVED.keys() | RENAMED.keys())
    assert {".".join(name.split(".")[:2]) for name in RENAMED.values()} <= now


@pytest.mark.parametrize(
    ("shares", "across", "means"),
    [("false", "all", "none"), ("false", "user", "none"), ("true", "user", "user"), ("true", "all", "all")],
)
def test_a_former_switch_that_is_off_holds_beside_the_setting_that_has_its_place(
    shares: str, across: str, means: str, tmp_path: Path
) -> None:
    """As in a file that `edged config init` wrote, which names every setting."""
    file = tmp_path / "edged.toml"
    file.write_text(f'[cache]\nprefix_sharing = {shares}\nshare_across = "{across}"\n')
    assert load_typed(file, {}).cache.share_across == means


def test_former_names_stand_beside_the_table_that_holds_them_now(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text("[scheduler]\ngamma = 0.3\ntau_tasks = 7\n[scheduler.options]\ntau_memory = 0.5\n")
    environ = {"EDGED_SCHEDULER__OPTIONS": '{"gamma": 0.4}', "EDGED_SCHEDULER__TAU_TASKS": "8"}
    assert load_typed(file, {}).scheduler.options == {"gamma": 0.3, "tau_tasks": 7, "tau_memory": 0.5}
    assert load_typed(file, environ).scheduler.options == {"gamma": 0.4, "tau_tasks": "8"}
    assert load_typed(None, {"EDGED_SCHEDULER__OPTIONS__GAMMA": "0.4"}).scheduler.options == {"gamma": "0.4"}


def test_options_of_another_policy_stand_in_the_file_and_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text('[scheduler]\npolicy = "fcfs"\nslo_ms = "never"\ngamma = -1\n')
    assert load_settings(file).scheduler.policy == "fcfs"
    with pytest.raises(ConfigError, match="slo_ms"):
        load_settings(file, {"scheduler.policy": "flexllm"})


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
