"""A federation by USB stick: consent, a record of each, their average, which a third user begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.live import running
from tests.api.test_adapters import teach
from tests.cli.conftest import Daemon, edged
from tests.models import save_tiny

SETTINGS = {
    "store__save_every_s": 0.2,
    "federated__enabled": True,
    "federated__min_pairs": 4,
    "federated__min_participants": 2,
}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("stick")
    model = save_tiny(folder / "tiny", max_position_embeddings=512)
    with running(folder / "run", model, **SETTINGS) as live:
        with live.http() as http:
            for user in ("ann", "ben"):
                teach(http, user, 8)
        yield Daemon(live.socket)


def campaign(box: Daemon, folder: Path, more: str = "") -> str:
    """A campaign's file, whose model is the line that the status prints."""
    status = box.run("federated", "status").stdout
    line = next(line for line in status.splitlines() if line.startswith("model = "))
    rank = json.loads(box.run("federated", "status", "--json").stdout)["rank"]
    path = folder / "tone.toml"
    path.write_text(f'name = "tone"\n{line}\nrank = {rank}\ndemand = 2\nmin_response = 1.0\n{more}')
    return str(path)


@pytest.mark.slow
def test_records_by_file_become_a_start(box: Daemon, tmp_path: Path) -> None:
    tone = campaign(box, tmp_path)
    assert "nobody has agreed" in box.run("federated", "status").stdout
    refused = box.run("federated", "update", "ann", "--job", tone, "-o", str(tmp_path / "ann"), code=1)
    assert "`edged federated consent ann` shows it" in refused.stderr
    asked = box.run("federated", "consent", "ann", input="n\n", code=1)
    assert "NO noise is added" in asked.stderr
    records = []
    for user in ("ann", "ben"):
        box.run("federated", "consent", user, "--yes")
        records.append(str(tmp_path / f"{user}.safetensors"))
        done = json.loads(box.run("federated", "update", user, "--job", tone, "-o", records[-1], "--json").stdout)
        assert done["bytes"] == Path(records[-1]).stat().st_size
    again = box.run("federated", "update", "ann", "--job", tone, "-o", str(tmp_path / "more"), code=1)
    assert "took part 1 times, and federated.max_rounds is 1" in again.stderr
    lines = json.loads(box.run("federated", "ledger", "--json").stdout)["ledger"]
    assert [line["user"] for line in lines] == ["ann", "ben"]
    assert "ben" in box.run("federated", "ledger").stdout
    twice = edged("federated", "average", records[0], records[0], "-o", str(tmp_path / "twice"))
    assert twice.returncode == 1
    assert "a file is named twice: give each once" in twice.stderr
    averaged = edged("federated", "average", *records, "-o", str(tmp_path / "start"), "--json")
    assert averaged.returncode == 0, averaged.stderr
    assert json.loads(averaged.stdout)["records"] == 2
    box.run("starts", "add", "tone", str(tmp_path / "start"))
    with box.client() as client:
        assert [start["name"] for start in client.get("/v1/starts")["starts"]] == ["tone"]
    revoked = box.run("federated", "consent", "ann", "--revoke").stdout
    assert "takes part in no further round" in revoked


def test_what_a_campaign_asks_for_beyond_the_box_is_refused(box: Daemon, tmp_path: Path) -> None:
    strict = campaign(box, tmp_path, "clip = 3.0\n")
    told = box.run("federated", "update", "ann", "--job", strict, "-o", str(tmp_path / "one"), code=1).stderr
    assert '"clip" = 3: federated.clip allows 0.4 at most' in told
    noisy = campaign(box, tmp_path)
    told = box.run("federated", "update", "ann", "--job", noisy, "-o", str(tmp_path / "one"), "--noise", "2", code=1)
    assert "records on a round is worth it" in told.stderr
    wrong = campaign(box, tmp_path, "demnad = 3\n")
    told = box.run("federated", "update", "ann", "--job", wrong, "-o", str(tmp_path / "one"), code=1)
    assert 'unknown field "demnad": did you mean "demand"?' in told.stderr
    assert not (tmp_path / "one").exists()
