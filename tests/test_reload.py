"""Settings that change while the daemon runs: what is applied, what needs a restart, what is refused."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair import PairRetired, VersionPublished
from edged.http.access import Access
from edged.http.errors import ApiError
from edged.reload import RELOADABLE, adopted, compare
from edged.settings.access import AccessSettings, AccessToken, token_hash
from edged.settings.load import Settings, load_settings
from tests.api.live import LiveDaemon, running
from tests.cli.conftest import edged
from tests.engine.harness import random_ids, random_pairs, request, running_engine
from tests.models import save_tiny

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def settings(**values: Any) -> Settings:
    return load_settings(environ={}, overrides={name.replace("__", "."): value for name, value in values.items()})


def test_every_reloadable_setting_exists() -> None:
    for section, keys in RELOADABLE.items():
        assert keys <= set(type(getattr(Settings(), section)).model_fields), section


def test_the_documentation_says_what_can_be_reloaded() -> None:
    """ "all but" names what cannot; "all" is everything; else what is named can."""
    rows = re.findall(r"^\| (`\[.*) \| (.*) \|$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    said: dict[str, set[str]] = {}
    for sections, text in rows:
        named = set(re.findall(r"`(\w+)`", text))
        for section in re.findall(r"`\[(\w+)\]`", sections):
            settings = set(Settings.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]
            said[section] = settings - named if text.startswith("all") else named
    assert said == {section: set(names) for section, names in RELOADABLE.items()}


def test_changes_are_told_apart_by_whether_they_need_a_restart_and_tokens_are_not_shown() -> None:
    new = settings(model__path="other", api__token="sesame", serving__max_queue=5, align__rank=8, align__epochs=2)
    result = compare(Settings(), new)
    assert {change.setting: (change.old, change.new) for change in result.applied} == {
        "serving.max_queue": (1024, 5),
        "align.epochs": (1, 2),
    }
    restart = {change.setting: change.new for change in result.needs_restart}
    assert restart == {"model.path": "other", "align.rank": 8, "api.token": "***"}
    taken = adopted(Settings(), new)
    assert (taken.serving.max_queue, taken.align.epochs) == (5, 2)
    assert (taken.model.path, taken.align.rank, taken.api.token) == ("demo", 16, "")


def call(daemon: LiveDaemon, *arguments: str, code: int = 0) -> str:
    result = edged(*arguments, EDGED_SOCKET=str(daemon.socket))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_reload_applies_what_can_change_and_names_the_rest(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "edged.toml"
    config.write_text("")
    with running(tmp_path, model, config=config, scheduler__tau_tasks=99) as daemon:
        assert call(daemon, "reload") == "nothing has changed\n"
        config.write_text(
            "serving.default_max_tokens = 3\nmodel.threads = 2\nscheduler.tau_tasks = 5\nlog.level = 'debug'\n"
        )
        told = call(daemon, "reload")
        assert "applied: serving.default_max_tokens: 512 -> 3\n" in told
        assert "needs a restart: model.threads: 0 -> 2\n" in told
        # The environment still wins over the file.
        assert "tau_tasks" not in told
        with daemon.http() as http:
            body = {"prompt": "a", "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert "POST /v1/completions" in daemon.log
        again = json.loads(call(daemon, "reload", "--json"))
        assert again == {"applied": [], "needs_restart": [{"setting": "model.threads", "old": 0, "new": 2}]}


def test_a_bad_file_is_refused_by_name_and_the_old_settings_hold(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "edged.toml"
    config.write_text("[serving]\ndefault_max_tokens = 3\n")
    with running(tmp_path, model, config=config) as daemon:
        config.write_text("[serving]\ndefault_max_tokens = 4\nmax_queue = -1\n")
        assert 'setting "serving.max_queue" = -1' in call(daemon, "reload", code=1)
        daemon.signal(1)
        wait_for_line(daemon, "the old ones hold", 2)
        config.unlink()
        assert "does not exist" in call(daemon, "reload", code=1)
        with daemon.http() as http:
            body = {"prompt": "a", "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


def wait_for_line(daemon: LiveDaemon, text: str, times: int) -> None:
    end = time.monotonic() + 20
    while daemon.log.count(text) < times:
        assert time.monotonic() < end, daemon.log
        time.sleep(0.05)


def test_learning_switched_on_learns_what_came_before(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "edged.toml"
    config.write_text("[align]\nenabled = false\n[guard]\nheld_out_share = 0.0\n")
    with running(tmp_path, model, config=config) as daemon, daemon.http() as http:
        for i in range(3):
            body = {"user": "tom", "prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"}
            assert http.post("/v1/feedback", json=body).status_code == 200
        assert http.get("/v1/status").json()["finetune"]["enabled"] is False
        config.write_text("[guard]\nheld_out_share = 0.0\n")
        call(daemon, "reload")
        end = time.monotonic() + 30
        while http.get("/v1/adapters/tom").json().get("pairs_trained") != 3:
            assert time.monotonic() < end, daemon.log
            time.sleep(0.05)


def test_a_share_changed_at_run_time_changes_what_the_engine_does(tmp_path: Path) -> None:
    """Under endless overload fine-tuning gets nothing without a share, and its steps run once it has one."""
    starving = {"scheduler__finetune_min_share": 0.0, "scheduler__finetune_max_wait_s": 3600.0}
    busy = {"scheduler__tbt_slowdown": 1.0, "scheduler__tbt_floor_ms": 0.001, "scheduler__tbt_factor": 0.01}
    with running_engine(tmp_path, **starving, **busy) as (engine, client):
        for i in range(8):
            engine.submit(request(f"r{i}", random_ids(8, i), tokens=450))
        client.wait(lambda: all(client.tokens[f"r{i}"] for i in range(8)))
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: all(len(client.tokens[f"r{i}"]) > 20 for i in range(8)))
        assert engine.status()["finetune"]["steps"] == 0
        new = settings(scheduler__finetune_min_share=0.9, scheduler__finetune_max_wait_s=0.01)
        engine.configure(adopted(engine.settings, new)).result(10)
        client.wait(lambda: all(f"r{i}" in client.finished for i in range(8)))
        assert engine.status()["finetune"]["steps"] > 0


def test_a_learning_rate_changed_at_run_time_is_the_next_steps(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, _):
        moved = []
        for i, rate in enumerate((1e-3, 1e-9)):
            engine.configure(
                adopted(engine.settings, settings(align__learning_rate=rate, align__practice=False))
            ).result(10)
            before = engine.weights("ann").result(10)[1]
            engine.submit_pairs(random_pairs(4, seed=i, first_id=1 + 4 * i))
            end = time.monotonic() + 30
            while engine.status()["finetune"]["steps"] <= i:
                assert time.monotonic() < end
                time.sleep(0.02)
            after = engine.weights("ann").result(10)[1]
            moved.append(max(float((after[k] - before[k]).abs().max()) if k in before else 1.0 for k in after))
        assert moved[1] < 1e-8 < moved[0]


def test_limits_rules_and_tokens_change_and_what_would_open_a_listener_is_refused(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "edged.toml"
    config.write_text("")
    with running(tmp_path, model, config=config) as daemon:
        config.write_text("[limits]\nrequests_per_minute = 2\n")
        assert "applied: limits.requests_per_minute: 0 -> 2\n" in call(daemon, "reload")
        with daemon.http() as http:
            codes = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        digest = "0" * 64
        config.write_text(f"[[access.tokens]]\nname = 'x'\nsha256 = '{digest}'\nroles = ['use']\n")
        refused = call(daemon, "reload", code=1)
        assert "needs a restart" in refused
        assert digest not in refused + daemon.log
        config.write_text("[[access.rules]]\npeers = ['user:no-such-account']\nroles = ['use']\n")
        assert "no-such-account" in call(daemon, "reload", code=1)


def test_tokens_and_rules_are_taken_over_whole() -> None:
    tokens = [AccessToken(name=name, sha256=token_hash(name), roles=["use"]) for name in ("old", "new")]
    access = Access(AccessSettings(tokens=tokens[:1]), "the operators")
    access.configure(AccessSettings(tokens=tokens[1:]))
    assert access.of_token("Bearer new").roles == {"use"}
    assert access.of_token("Bearer the operators").roles == {"admin"}
    with pytest.raises(ApiError):
        access.of_token("Bearer old")


def test_nobody_elses_token_is_named_as_the_operators() -> None:
    with pytest.raises(ValueError, match=r'"api\.token" cannot name a token'):
        AccessToken(name="api.token", sha256=token_hash("mine"), roles=["admin"])


def test_streams_end_when_the_rules_change_and_go_on_otherwise(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "edged.toml"
    config.write_text("")
    with running(tmp_path, model, config=config) as daemon, socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(daemon.socket))
        raw.sendall(b"GET /v1/events?events=status HTTP/1.1\r\nHost: edged\r\n\r\n")
        config.write_text("log.level = 'debug'\n")
        call(daemon, "reload")
        told = b""
        while told.count(b"event: status") < 3:
            told += (piece := raw.recv(65536))
            assert piece
        config.write_text("[[access.rules]]\npeers = ['uid:65534']\nroles = ['use']\n")
        call(daemon, "reload")
        while not told.endswith(b"\r\n0\r\n\r\n"):
            told += (piece := raw.recv(65536))
            assert told.count(b"event: status") < 30, "the stream goes on"


def test_other_sizes_of_steps_count_from_the_next_step_on(tmp_path: Path) -> None:
    with running_engine(tmp_path, align__micro_batch_pairs=1, guard__held_out_share=0.0) as (engine, client):
        align = engine.settings.align.model_copy(update={"micro_batch_pairs": 4})
        engine.configure(engine.settings.model_copy(update={"align": align})).result()
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(client.of(PairRetired)) == 4)
        assert [record.pairs for record in client.of(VersionPublished)] == [4]
