"""Members of a fleet: most of them say what all serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.fleet.members import Members
from edged.fleet.state_file import StateFile
from edged.http.errors import ApiError
from edged.settings.fleet import FleetSettings
from tests.placement.nodes import REPORT


def members(folder: Path, *fingerprints: str) -> Members:
    nodes = {f"n{at}": f"http://127.0.0.1:{8200 + at}" for at in range(len(fingerprints))}
    files = (StateFile(folder, "127.0.0.1:8136", what) for what in ("fleet", "members"))
    made = Members(FleetSettings(nodes=nodes), *files)
    for member, fingerprint in zip(made.by_name.values(), fingerprints, strict=False):
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


def test_status_says_since_when_a_node_is_what_it_is(tmp_path: Path) -> None:
    now = [100.0]
    made = Members(
        FleetSettings(nodes={"n": "http://127.0.0.1:8200"}),
        *(StateFile(tmp_path, "x:1", what) for what in ("fleet", "members")),
        lambda: now[0],
    )
    member, since = made.by_name["n"], []
    for now[0], phase in ((100.0, "ready"), (105.0, "ready"), (110.0, "drained"), (111.0, "ready"), (111.5, "ready")):
        made.take(member, REPORT | {"phase": phase})
        since.append(made.report(False)["nodes"][0]["since_s"])
    now[0] = 120.0
    silent = made.report(False)["nodes"][0]
    assert (silent["state"], silent["since_s"]) == ("stale", 6.5)
    now[0] = 121.0
    made.lose(member, "its connection broke")
    now[0] = 124.0
    gone = made.report(False)["nodes"][0]
    assert (gone["state"], gone["since_s"]) == ("down", 3.0)
    assert since == [0.0, 0.0, 0.0, 0.0, 0.5]


def test_homes_that_cannot_be_read_are_told_and_the_ingress_goes_on(tmp_path: Path) -> None:
    (tmp_path / "fleet-127-0-0-1-8136.json").write_text("{]")
    made = members(tmp_path, "x")
    made.homes.note("n0", "ann", 1)
    made.keep_homes()
    assert members(tmp_path, "x").homes.remembered == {"ann": "n0"}


def test_a_box_that_registered_is_a_member_over_a_restart_until_it_leaves(tmp_path: Path) -> None:
    made = members(tmp_path, "x")
    assert made.register("new", "http://127.0.0.1:9000")
    assert not made.register("new", "http://127.0.0.1:9000")
    assert list(members(tmp_path, "x").by_name) == ["n0", "new"]
    made.leave("new")
    assert list(members(tmp_path, "x").by_name) == ["n0"]


def test_a_box_that_registers_takes_no_name_and_no_url_of_one_that_is_there(tmp_path: Path) -> None:
    made = members(tmp_path, "x")
    made.register("new", "http://127.0.0.1:9000")
    for name, url in (("n0", "http://127.0.0.1:9001"), ("other", "http://127.0.0.1:8200")):
        with pytest.raises(ApiError) as refused:
            made.register(name, url)
        assert refused.value.status == 409
    made.take(made.by_name["new"], REPORT | {"fingerprint": "x"})
    with pytest.raises(ApiError, match="give this box another"):
        made.register("new", "http://127.0.0.1:9001")
    made.lose(made.by_name["new"], "its connection broke")
    assert made.register("new", "http://127.0.0.1:9001")
    with pytest.raises(ApiError, match='no node "n0" has registered'):
        made.leave("n0")


def test_a_user_s_home_stays_when_boxes_join(tmp_path: Path) -> None:
    made = members(tmp_path, "x")
    made.homes.note("n0", "ann", 1)
    for number in range(8):
        made.register(f"new{number}", f"http://127.0.0.1:{9000 + number}")
    assert made.homes.of("ann") == "n0"
