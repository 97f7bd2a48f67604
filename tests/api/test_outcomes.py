"""A daemon whose latest requests or pairs all failed alike says so wherever its health is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from edged.align.feedback.pair import PairRetired
from edged.api.outcomes import LatestOutcomes
from edged.cli.main import cli
from tests.api.live import LiveDaemon
from tests.models import save_tiny


def skipped(number: int, reason: str = "the iteration failed: index 2048 is out of range") -> PairRetired:
    return PairRetired(number, "ann", "skipped", 1, 0, reason)


def test_pairs_that_were_all_skipped_for_one_reason_are_told_until_one_is_trained() -> None:
    outcomes = LatestOutcomes()
    outcomes.on_records([skipped(number, f"token {number} has no row") for number in range(4)])
    assert not outcomes.problems(), "too few to tell"
    outcomes.on_records([skipped(4, "token 4 has no row"), PairRetired(9, "ben", "quarantined", 0, 0, "burst")])
    assert outcomes.problems() == ["the latest 5 pairs all failed alike: token 4 has no row"]
    assert outcomes.problems(reasons=False) == ["the latest 5 pairs all failed alike"]
    outcomes.on_records([skipped(5, "another reason")])
    assert not outcomes.problems(), "they failed in two ways"
    outcomes.on_records([PairRetired(6, "ann", "learnt", 1, 1), *map(skipped, range(250))])
    assert outcomes.problems() == [f"the latest 100 pairs all failed alike: {skipped(249).reason}"]
    outcomes.on_records([PairRetired(6, "ann", "trained", 1, 1)])
    assert not outcomes.problems()


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[LiveDaemon]:
    """A daemon whose model's template refuses every chat that has a question."""
    model = tmp_path / "model"
    save_tiny(model, "llama")
    template = "{% if '?' in messages[0]['content'] %}{{ raise_exception('no questions') }}{% endif %}hello"
    (model / "chat_template.jinja").write_text(template)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    daemon = LiveDaemon(tmp_path / "daemon", model).wait_until_ready()
    yield daemon
    daemon.stop()


@pytest.mark.slow
def test_a_daemon_that_refuses_every_chat_says_so_and_refusals_of_bad_requests_do_not_count(
    refusing: LiveDaemon,
) -> None:
    def ask(text: str, **more: object) -> int:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
        return http.post("/v1/chat/completions", json=body).status_code

    with refusing.http() as http:
        assert {ask("fine", temperature=9) for _ in range(9)} == {400}
        assert http.get("/readyz").json() == {"status": "ready", "degraded": []}
        assert {ask("why?") for _ in range(7)} == {400}
        told = "the latest 7 requests all failed alike"
        assert http.get("/readyz").json() == {"status": "ready", "degraded": [told]}
        status = http.get("/v1/status").json()
        assert [line for line in status["degraded"] if line.startswith(told) and "no questions" in line]
        assert told in status["verdict"]
        doctor = CliRunner().invoke(cli, ["doctor", "--json", "--socket", str(refusing.socket)])
        assert told in doctor.output
        assert ask("fine") == 200
        assert http.get("/readyz").json() == {"status": "ready", "degraded": []}
