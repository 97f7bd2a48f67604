"""A campaign's file: what it says, and how it is refused by name, value and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edged.federated.campaign_file import CampaignRefused, parse_campaign, read_campaign
from edged.federated.signature import Capacity

MODEL = "0f" * 32
TONE = f"""
name = "tone"
model = "{MODEL}"
rank = 8
demand = 10
deadline_s = 300
requires = {{ memory_mb = 512, participants = 3 }}
starts = ["concise", "elaborate"]
"""


def table(**more: Any) -> dict[str, Any]:
    return {"name": "tone", "model": MODEL, "rank": 8, "demand": 10, **more}


def test_a_file_becomes_a_campaign(tmp_path: Path) -> None:
    (tmp_path / "tone.toml").write_text(TONE)
    found = read_campaign(tmp_path / "tone.toml")
    campaign = found.campaign(submitted_s=5.0)
    assert campaign.requires == Capacity(memory_mb=512, participants=3, model=MODEL)
    assert (campaign.submitted_s, campaign.asked, campaign.needed, found.threshold) == (5.0, 13, 8, 8)
    assert (campaign.rounds, campaign.declares_rounds) == (1, False)
    assert parse_campaign(table(rounds=20)).campaign(0.0).declares_rounds


def test_a_table_goes_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "tone.toml").write_text(TONE)
    found = read_campaign(tmp_path / "tone.toml")
    assert parse_campaign(found.table()) == found
    assert "aggregate" not in found.table()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"demand": 0}, '"demand" = 0: it must be at least 1'),
        ({"demand": "ten"}, "\"demand\" = 'ten': it must be a whole number"),
        ({"demnad": 3}, 'unknown field "demnad": did you mean "demand"?'),
        ({"requires": {"memory": 3}}, 'unknown field "requires.memory": did you mean "memory_mb"?'),
        ({"requires": 3}, '"requires" = 3: it must be a table'),
        ({"starts": "concise"}, "\"starts\" = 'concise': it must be a list"),
        ({"starts": ["a", "a"]}, "a start is named twice: name each once"),
        ({"starts": ["../a"]}, '"../a" cannot be a name'),
        ({"name": "tone/../x"}, '"tone/../x" cannot be a name'),
        ({"model": "SmolLM2"}, "\"model\" = 'SmolLM2': it must be the 64 hex digits"),
        ({"deadline_s": float("nan")}, '"deadline_s" = nan: it must be a finite number'),
        ({"noise": -1.0}, '"noise" = -1.0: it must be at least 0'),
        ({"aggregate": "mode"}, "\"aggregate\" = 'mode': known: mean, median, trimmed, multi-krum"),
        ({"aggregate": "median"}, 'must see each record: take aggregation = "single", or "mean"'),
        ({"aggregate": "multi-krum", "aggregation": "single", "demand": 2}, "three are needed, raise demand"),
        ({"noise": 1.0, "aggregation": "single"}, "noise hides a person in a sum"),
        ({"noise": 1.0, "starts": ["a", "b"]}, "with noise no box may choose by private pairs"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_the_way_out(given: dict[str, Any], told: str) -> None:
    with pytest.raises(CampaignRefused) as refused:
        parse_campaign(table(**given), "tone.toml")
    assert str(refused.value).startswith("tone.toml: ")
    assert told in str(refused.value)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(CampaignRefused, match='"rank" is missing'):
        parse_campaign({key: value for key, value in table().items() if key != "rank"})


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"#" * 70_000], ids=["no TOML", "no UTF-8", "too large"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tone.toml"
    path.write_bytes(content)
    with pytest.raises(CampaignRefused, match=r'campaign file ".*tone\.toml"'):
        read_campaign(path)
    with pytest.raises(CampaignRefused, match="cannot be read"):
        read_campaign(tmp_path / "none.toml")
