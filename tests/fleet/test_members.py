"""Members of a fleet: most of them say what all serve."""

from __future__ import annotations

from pathlib import Path

from edged.fleet.homes_file import HomesFile
from edged.fleet.members import Members
from edged.settings.fleet import FleetSettings
from tests.placement.nodes import REPORT


def members(folder: Path, *fingerprints: str) -> Members:
    nodes = {f"n{at}": f"http://127.0.0.1:{8200 + at}" for at in range(len(fingerprints))}
    made = Members(FleetSettings(nodes=nodes), HomesFile(folder, "127.0.0.1:8136"))
    for member, fingerprint in zip(made.by_name.values(), fingerprints, strict=True):
        made.take(member, REPORT | {"fingerprint": fingerprint, "model": f"model-{fingerprint}"})
    return made


def states(made: Members) -> list[str]:
    return [made.state(member) for member in made.by_name.values()]


def test_one_of_another_model_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    for order in ("xyy", "yxy", "yyx"):
        made = members(tmp_path, *order)
        assert states(made) == ["refused" if each == "x" else "up" for each in order]
        assert made.model == "model-y"
    assert states(members(tmp_path, "x", "y")) == ["up", "refused"]


def test_homes_that_cannot_be_read_are_told_and_the_ingress_goes_on(tmp_path: Path) -> None:
    (tmp_path / "fleet-127-0-0-1-8136.json").write_text("{]")
    made = members(tmp_path, "x")
    made.homes.note("n0", "ann", 1)
    made.keep_homes()
    assert members(tmp_path, "x").homes.remembered == {"ann": "n0"}
