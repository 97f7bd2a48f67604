"""A real federation on loopback: NVFlare's hub and agents, three daemons with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from examples.demo_model.dialogues import style_pairs
from examples.federation.federation import Box, Federation
from tests.models import save_tiny

SETTINGS = """
[federated]
enabled = true
when = "always"
min_pairs = 4
min_participants = 1
min_interval_h = 0
max_rounds = 99
aggregation = "single"
[align]
practice = false
rank = 4
[cache]
memory_mb = 32
"""
NAMES = ("box-a", "box-b", "box-c")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three boxes that have joined, on each of which somebody agreed."""
    pytest.importorskip("nvflare", reason="edged[federated] is not installed")
    folder = tmp_path_factory.mktemp("federation")
    model = save_tiny(folder / "model")
    boxes: dict[str, Box] = {}
    made = None
    try:
        for name in NAMES:
            boxes[name] = Box(folder / name, name, SETTINGS, "--model", str(model))
        for number, box in enumerate(boxes.values()):
            box.daemon.wait_until_ready()
            box.teach("ann", islice(style_pairs(number, True), 6))
            box.agree("ann")
        made = Federation(folder, boxes)
        made.join()
        for box in boxes.values():
            made.wait_for(lambda box=box: not box.pairs_waiting(), "learning")  # type: ignore[misc]
        yield made
    finally:
        for box in boxes.values():
            box.stop()
        if made is not None:
            made.hub.stop()


def log_of(federation: Federation, name: str) -> str:
    """What an agent has said."""
    agent = federation.boxes[name].agent
    assert agent is not None
    return agent.log_file.read_text(errors="replace")
