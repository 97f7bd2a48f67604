"""What the daemon's lines look like, where they are left out, and what is never in them."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edged.align.feedback.pair import StepSkipped, VersionPublished
from edged.align.journal import LogEvents
from edged.api.request_log import problem_of
from edged.runtime import logs
from edged.settings.access import token_hash
from edged.settings.load import LogSettings, Settings, load_settings
from edged.settings.toml import to_toml_value
from tests.api.live import LiveDaemon, running
from tests.engine.harness import request, running_engine
from tests.models import save_tiny
from tests.test_daemon import tcp_port

log = logging.getLogger("edged.test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What one test sets up is not the next one's."""
    root, level, edged, hook = (
        logging.getLogger(),
        logging.getLogger().level,
        logging.getLogger("edged"),
        threading.excepthook,
    )
    handlers, edged_level = list(root.handlers), edged.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    edged.setLevel(edged_level)
    threading.excepthook = hook
    logging.captureWarnings(False)


def set_up(secrets: tuple[str, ...] = (), **settings: Any) -> io.StringIO:
    stream = io.StringIO()
    logs.set_up(LogSettings(**settings), secrets, {}, stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_a_sentence_for_people_and_an_object_for_programs() -> None:
    stream = set_up(format="json")
    logs.event(log, logging.WARNING, "rollback", "100 % sure", adapter="ann", version=3)
    (line,) = lines(stream)
    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "edged.test",
        "message": "100 % sure",
        "event": "rollback",
        "adapter": "ann",
        "version": 3,
    }
    stream = set_up(format="human")
    logs.event(log, logging.WARNING, "rollback", "100 % sure", adapter="ann")
    assert stream.getvalue().endswith("WARNING edged.test: 100 % sure\n")


@pytest.mark.parametrize("form", ["human", "json"])
def test_no_text_begins_a_line_of_its_own_or_controls_the_terminal_of_who_reads_it(form: str) -> None:
    evil = "role \x1b[2J\x9b\u202e\n2026-01-01 00:00:00,000 ERROR edged: forged"
    stream = set_up(format=form)
    log.warning("a file has the %s", evil)
    try:
        raise ValueError(evil)
    except ValueError:
        log.exception("it failed")
    said = stream.getvalue()
    assert not set(said) & {"\x1b", "\x9b", "\u202e"}
    assert not any(line.startswith("2026-01-01 00:00:00") for line in said.splitlines())
    if form == "json":
        assert lines(stream)[0]["message"] == f"a file has the {evil}"
    else:
        assert said.splitlines()[0].endswith(r"\u009b\u202e\n2026-01-01 00:00:00,000 ERROR edged: forged")


def test_an_exception_and_a_warning_of_python_stay_one_line() -> None:
    stream = set_up(format="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed")
    thread = threading.Thread(target=lambda: 1 / 0, name="dividing")
    thread.start()
    thread.join()
    first, second = lines(stream)
    assert "ValueError: two\nlines" in first["exception"]
    assert "ZeroDivisionError" in second["exception"]
    assert "dividing" in second["message"]


@pytest.mark.parametrize(
    ("error", "line", "with_kind"),
    [
        (OSError("  no such device\nat line 1"), "no such device", "OSError: no such device"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (ValueError("x" * 1000), "x" * 400, "ValueError: " + "x" * 400),
    ],
)
def test_an_error_is_told_in_one_line_even_if_it_says_nothing(error: Exception, line: str, with_kind: str) -> None:
    assert logs.first_line(error) == line
    assert logs.first_line(error, with_kind=True) == with_kind


def test_the_level_is_edgeds_and_can_change() -> None:
    stream = set_up(format="json", level="warning")
    log.info("not told")
    logs.set_up(LogSettings(format="json", level="debug"), (), {}, stream)
    log.debug("told")
    logging.getLogger("urllib3").info("of no concern")
    assert [line["message"] for line in lines(stream)] == ["told"]


def test_lines_carry_the_request_that_they_belong_to() -> None:
    stream = set_up(format="json")
    token = logs.request_id.set("mine")
    log.warning("inside")
    logs.request_id.reset(token)
    log.warning("outside")
    assert [line.get("request_id") for line in lines(stream)] == ["mine", None]
    human = set_up(format="human")
    token = logs.request_id.set("mine")
    log.warning("inside")
    logs.request_id.reset(token)
    assert human.getvalue().endswith("inside [mine]\n")


@pytest.mark.parametrize("form", ["json", "human"])
def test_secrets_are_blanked_wherever_they_come_from(form: str) -> None:
    settings = load_settings(environ={}, overrides={"api.token": 'open "sesame"'})
    secrets = logs.secrets_of(settings, {"HF_TOKEN": "hf_12345678", "EDGED_TOKEN": "short", "HOME": "/home/me"})
    assert secrets == {'open "sesame"', "hf_12345678"}
    stream = set_up(tuple(secrets), format=form)
    try:
        raise RuntimeError("hf_12345678 was refused")
    except RuntimeError:
        log.exception('with open "sesame"', extra={"fields": {"header": 'Bearer open "sesame"'}})
    text = stream.getvalue()
    assert "sesame" not in text
    assert "hf_12345678" not in text
    assert text.count("***") >= 2


def test_the_form_follows_from_where_the_lines_go(tmp_path: Path) -> None:
    auto = LogSettings()
    with (tmp_path / "journal").open("w") as file:
        there = os.fstat(file.fileno())
        journal = {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"}
        assert logs.writes_json(auto, journal, file)
        assert not logs.writes_json(auto, {"JOURNAL_STREAM": "1:2"}, file)
        assert logs.writes_json(auto, {"INVOCATION_ID": "0"}, file)
        assert not logs.writes_json(LogSettings(format="human"), journal, file)
        logs.set_up(auto, (), journal, file)
        log.error("for journald")
        log.warning("for journald")
    assert [line[:4] for line in (tmp_path / "journal").read_text().splitlines()] == ["<3>{", "<4>{"]
    main, terminal = os.openpty()
    with os.fdopen(terminal, "w") as shell:
        assert not logs.writes_json(auto, {"INVOCATION_ID": "0"}, shell)
    os.close(main)


def test_a_flood_of_like_events_is_told_sparingly_and_counted() -> None:
    sparing = logs.Sparing(burst=2, every_s=10.0)
    assert [sparing.left_out("a", now) for now in (0.0, 0.0, 0.0, 1.0)] == [0, 0, None, None]
    assert sparing.left_out("b", 1.0) == 0
    assert sparing.left_out("a", 12.0) == 2
    assert sparing.left_out("a", 12.0) is None


def test_an_operator_is_told_of_versions_sparingly_and_of_all_rollbacks_and_skipped_steps() -> None:
    stream, told = set_up(format="json"), LogEvents()
    told.on_records([VersionPublished("ann", version, version - 1, "trained", 4, 0.5) for version in range(1, 10)])
    told.on_records([VersionPublished("ann", 10, 9, "guard: KL"), VersionPublished("ann", 11, 10, "rollback to 3")])
    told.on_records([StepSkipped("bob", 1, (7, 8), "out of memory")])
    found = [(line["event"], line["adapter"], line.get("version")) for line in lines(stream)]
    assert found[:3] == [("version", "ann", version) for version in (1, 2, 3)]
    assert found[3:] == [("rollback", "ann", 10), ("rollback", "ann", 11), ("step_skipped", "bob", 1)]


@pytest.mark.parametrize("reason", ["imported", "rebuilt", "introduced"])
def test_a_version_that_nobody_took_back_is_no_rollback(reason: str) -> None:
    stream, told = set_up(format="json"), LogEvents()
    told.on_records([VersionPublished("ann", 1, 0, reason)])
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["reason"]) == ("version", "info", reason)


def test_an_iteration_that_failed_names_the_requests_that_it_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_engine(tmp_path) as (engine, client):
        run = engine.built.runner.run

        def once(*arguments: Any, **named: Any) -> Any:
            engine.built.runner.run = run  # type: ignore[method-assign]
            raise RuntimeError("the kernel failed")

        engine.built.runner.run = once  # type: ignore[method-assign]
        engine.submit(request("poor", [5, 6, 7]))
        client.wait(lambda: "poor" in client.finished)
        engine.submit(request("lucky", [5, 6, 7]))
        client.wait(lambda: "lucky" in client.finished)
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "iteration_failed"]
    assert record.__dict__["fields"] == {"requests": ["poor"]}
    assert "the kernel failed" in record.getMessage()
    assert client.finished["lucky"].reason == "length"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("logs")
    model = save_tiny(root / "tiny")
    with running(root / "run", model, log__format="json", log__level="debug") as live:
        yield live


def test_a_late_first_token_is_a_warning_and_so_is_what_failed() -> None:
    def problem(phase: str = "ready", **fields: Any) -> str:
        return problem_of("/v1/completions", {"status": 200, **fields}, phase)

    assert problem(ttft_ms=9_999.0) == problem() == problem("loading", status=503) == ""
    assert problem(ttft_ms=10_001.0) == "slow"
    assert problem(status=503) == "failed (503)"
    assert problem(status=429, ttft_ms=10_001.0) == "refused (429)"


def told_of(daemon: LiveDaemon, name: str) -> dict[str, Any]:
    """The line of the request of that id."""
    found = [json.loads(line) for line in daemon.log.splitlines()]
    (line,) = [line for line in found if line.get("event") == "request" and line.get("request_id") == name]
    return line


def test_a_daemon_tells_of_its_start_in_json(daemon: LiveDaemon) -> None:
    events = {line["event"]: line for line in map(json.loads, daemon.log.splitlines()) if "event" in line}
    assert events["start"]["sockets"] == [str(daemon.socket)]
    assert events["ready"]["seconds"] > 0
    assert events["ready"]["rss_bytes"] > 0


def test_a_completion_is_one_line_under_its_id_without_its_text(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        body = {"prompt": "precious secret", "max_tokens": 4, "user": "ann", "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
    name = answer.headers["X-Request-Id"]
    assert name == answer.json()["id"]
    line = told_of(daemon, name)
    assert (line["level"], line["path"], line["status"]) == ("debug", "/v1/completions", 200)
    assert (line["user"], line["completion_tokens"], line["finish_reason"]) == ("ann", 4, "length")
    assert line["ttft_ms"] > 0
    assert "precious" not in daemon.log
    assert answer.json()["choices"][0]["text"] not in daemon.log


def test_a_clients_own_request_id_comes_back_also_with_errors_and_streams(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        for body, status in (({"prompt": "a", "max_tokens": 2, "stream": True}, 200), ({"prompt": 3}, 400)):
            answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": f"mine-{status}"})
            assert (answer.status_code, answer.headers["X-Request-Id"]) == (status, f"mine-{status}")
            assert told_of(daemon, f"mine-{status}")["status"] == status
        assert http.get("/no/such/url").headers["X-Request-Id"].startswith("req-")
        refused = http.get("/v1/models", headers={"X-Request-Id": "two words"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request_id")
        assert "'two words'" in refused.json()["error"]["message"]


def test_a_refusal_says_whose_it_was_which_and_for_whom(tmp_path: Path) -> None:
    token = {"name": "app", "sha256": token_hash("secret"), "roles": ["use"], "users": ["ann"]}
    config = tmp_path / "edged.toml"
    config.write_text(f"[access]\ntokens = [{to_toml_value(token)}]\n")
    settings = {"config": config, "api__listen": "127.0.0.1:0", "limits__feedback_per_minute": 1}
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny"), log__format="json", **settings) as daemon:
        with httpx2.Client(base_url=f"http://127.0.0.1:{tcp_port(daemon.process.pid or 0)}") as http:
            body = {"prompt": "a", "max_tokens": 1, "user": "ben"}
            for name, shown in (("foreign", "secret"), ("nobody", "wrong")):
                headers = {"Authorization": f"Bearer {shown}", "X-Request-Id": name}
                http.post("/v1/completions", json=body, headers=headers)
        with daemon.http() as http:
            for name in ("once", "often"):
                pair = {"user": "ann", "prompt": "a", "chosen": "b", "rejected": "c"}
                http.post("/v1/feedback", json=pair, headers={"X-Request-Id": name})
        foreign, nobody = told_of(daemon, "foreign"), told_of(daemon, "nobody")
        assert (foreign["caller"], foreign["user"], foreign["code"]) == ('token "app"', "ben", "forbidden_user")
        assert 'caller token "app", code forbidden_user, user ben' in foreign["message"]
        assert (nobody["peer"], nobody["code"]) == ("127.0.0.1", "invalid_api_key")
        often = told_of(daemon, "often")
        assert (often["user"], often["code"], often["status"]) == ("ann", "rate_limit_reached", 429)
        assert "(uid " in often["caller"]


def test_defaults_tell_nothing_of_requests_that_went_well(tmp_path: Path) -> None:
    with running(tmp_path, save_tiny(tmp_path / "tiny")) as daemon:
        with daemon.http() as http:
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert daemon.stop() == 0
        assert "/v1/completions" not in daemon.log
        assert "edged has stopped" in daemon.log
    assert Settings().log.level == "info"
