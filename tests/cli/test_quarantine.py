"""Held pairs as their user meets them: how many, why, and the one step that settles it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.live import running
from tests.api.test_quarantine import SETTINGS, adapter, attack, held, until
from tests.cli.conftest import Daemon
from tests.models import save_tiny


def test_held_pairs_are_shown_with_the_step_that_settles_them(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    with running(tmp_path / "run", model, **SETTINGS) as live, live.http() as http:
        attack(http)
        pairs, edged = held(http), Daemon(live.socket)
        said = f"{len(pairs)} pairs of ann are held: {pairs[-1]['reason']}; if this was you: "
        said += "edged quarantine release --user ann"
        assert said in edged.run("metrics", COLUMNS="400").stdout
        assert said in edged.run("chat", "--user", "ann", input="/quit\n").stdout
        assert "are held" not in edged.run("chat", "--user", "bob", input="/quit\n").stdout
        ids = sorted(pair["pair_id"] for pair in pairs)
        trained = adapter(http)["pairs_trained"]
        released = json.loads(edged.run("quarantine", "release", "--user", "ann", "--json").stdout)["decided"]
        assert released == [{"pair_id": pair, "adapter": "ann", "decision": "released", "left": 0} for pair in ids]
        until(lambda: adapter(http)["pairs_trained"] == trained + len(ids))
        assert "are held" not in edged.run("metrics", COLUMNS="400").stdout
        assert live.status()["finetune"]["alarms"] == []
        assert edged.run("quarantine", "drop", "--user", "ann").stdout == "0 pairs dropped\n"
