"""A campaign's folder at the hub: what is counted, what is refused, and what an interrupted round keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from edged.federated.averaging import mean, moved, new_start, write_start
from edged.federated.campaign_file import CampaignFile, CampaignRefused, parse_campaign
from edged.federated.records import FederatedRecord, RecordForm, RecordRefused, RoundFile
from edged.federated_nvflare.hub_rounds import STARTS, HubCampaign, HubRounds, campaign_of
from edged.federated_nvflare.submission import write_job

LINEAR, RANK, INPUTS, OUTPUTS = "base_model.model.layers.0.q_proj", 2, 6, 4
B = f"{LINEAR}.lora_B.weight"
MODEL = "ab" * 32


def job(**changes: Any) -> CampaignFile:
    told = {"name": "tone", "model": MODEL, "rank": RANK, "demand": 3, "rounds": 2, "aggregation": "single"}
    return parse_campaign({**told, **changes})


def asked(rounds: HubRounds, folder: Path) -> RoundFile:
    """The round file, as a box reads it."""
    path = folder / "round.safetensors"
    path.write_bytes(rounds.round_file())
    return RoundFile.read(path, 1 << 20)


def record(file: RoundFile, seed: int, **changes: Any) -> FederatedRecord:
    """What a box answers."""
    delta = np.random.default_rng(seed).normal(size=(OUTPUTS, RANK)).astype(np.float32)
    delta *= 0.3 / np.linalg.norm(delta)
    made = FederatedRecord(
        job=file.job, round=file.round, nonce=file.nonce, start=file.start, base=MODEL, mode="single", pairs=16,
        held_out=None, epsilon=None, form=RecordForm(alpha=4.0, inputs={LINEAR: INPUTS}), tensors={B: delta},
    )  # fmt: skip
    return replace(made, **changes)


def test_a_start_is_moved_by_the_mean_of_what_boxes_said(tmp_path: Path) -> None:
    rounds = HubRounds(tmp_path, job())
    file = asked(rounds, tmp_path)
    records = [record(file, seed) for seed in range(3)]
    assert [rounds.take(f"box-{at}", each.content(), 1.0 + at) for at, each in enumerate(records)] == [1, 2, 3]
    assert rounds.close()
    first = new_start("tone", records[0].shapes)
    expected = moved(first, mean([each.tensors for each in records]))
    again = asked(rounds, tmp_path)
    assert (again.round, rounds.round, rounds.is_complete) == (1, 1, False)
    assert set(again.tensors) == set(expected)
    assert all((again.tensors[name] == each).all() for name, each in expected.items())
    assert rounds.responses_s() == {"box-0": 1.0, "box-1": 2.0, "box-2": 3.0}
    assert again.nonce != file.nonce


@pytest.mark.parametrize("aggregate", ["mean", "median", "trimmed", "multi-krum"])
def test_single_records_are_aggregated_as_the_campaign_says(tmp_path: Path, aggregate: str) -> None:
    rounds = HubRounds(tmp_path, job(demand=7, aggregate=aggregate))
    file = asked(rounds, tmp_path)
    honest = [record(file, 1)] * 6
    hostile = replace(honest[0], tensors={B: -honest[0].tensors[B]})
    for at, each in enumerate((*honest[:3], hostile, *honest[3:])):
        rounds = HubRounds(tmp_path, rounds.job)  # the hub may start anew between two records
        rounds.take(f"box-{at}", each.content(), 1.0)
    assert rounds.close()
    moved_by = load_file(tmp_path / "tone" / "start-1" / "adapter_model.safetensors")[B]
    share = 5 / 7 if aggregate == "mean" else 1.0
    np.testing.assert_allclose(moved_by, share * honest[0].tensors[B], atol=1e-6)


def test_a_second_round_moves_the_start_of_the_first(tmp_path: Path) -> None:
    rounds, starts = HubRounds(tmp_path, job(demand=1)), []
    for number in range(2):
        rounds.take("box", record(asked(rounds, tmp_path), number).content(), 1.0)
        assert rounds.close()
        starts.append(load_file(tmp_path / "tone" / f"start-{number + 1}" / "adapter_model.safetensors"))
    delta = record(asked(rounds, tmp_path), 1).tensors[B]
    np.testing.assert_allclose(starts[1][B], starts[0][B] + delta, atol=1e-7)
    assert rounds.is_complete


def test_a_round_that_was_interrupted_goes_on_with_what_was_counted(tmp_path: Path) -> None:
    before = HubRounds(tmp_path, job())
    file = asked(before, tmp_path)
    before.take("box-0", record(file, 0).content(), 1.0)
    after = HubRounds(tmp_path, job())
    assert asked(after, tmp_path).nonce == file.nonce
    assert not after.close()
    assert [after.take(f"box-{at}", record(file, at).content(), 1.0) for at in (1, 2)] == [2, 3]
    assert after.close()


def test_records_of_a_round_that_is_complete_already_are_not_counted_again(tmp_path: Path) -> None:
    rounds = HubRounds(tmp_path, job(demand=1))
    rounds.take("box", record(asked(rounds, tmp_path), 0).content(), 1.0)
    kept = (tmp_path / "tone" / "sum.safetensors").read_bytes()
    assert rounds.close()
    # The hub ended after the start was written, and before the sum was removed.
    (tmp_path / "tone" / "sum.safetensors").write_bytes(kept)
    assert not HubRounds(tmp_path, job(demand=1)).sum().boxes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": 1}, "another round"),
        ({"nonce": "cd" * 16}, "another round"),
        ({"job": job(name="other")}, "another round"),
        ({"tensors": {B: np.full((OUTPUTS, RANK), np.nan, np.float32)}}, "not finite"),
        ({"tensors": {B: np.ones((OUTPUTS, RANK), np.float32)}}, "over the clip of 0.4"),
        ({"tensors": {B: np.zeros((OUTPUTS + 1, RANK), np.float32)}}, "its form is another"),
        ({"form": RecordForm(alpha=8.0, inputs={LINEAR: INPUTS})}, "its form is another"),
        ({"tensors": {B.replace("_B", "_A"): np.zeros((OUTPUTS, RANK), np.float32)}}, "B of each linear"),
    ],
)
def test_what_is_none_of_this_round_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    rounds = HubRounds(tmp_path, job(clip=0.4))
    file = asked(rounds, tmp_path)
    rounds.take("honest", record(file, 0).content(), 1.0)
    with pytest.raises(RecordRefused, match=said):
        rounds.take("box", record(file, 1, **changes).content(), 1.0)
    assert rounds.sum().boxes == {"honest": 1.0}
    assert not (tmp_path / "tone" / "incoming.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x00" * 8 + b"{}", b"\xff" * 64])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RecordRefused):
        HubRounds(tmp_path, job()).take("box", content, 1.0)


def test_a_box_is_counted_once(tmp_path: Path) -> None:
    rounds = HubRounds(tmp_path, job())
    file = asked(rounds, tmp_path)
    rounds.take("box", record(file, 0).content(), 1.0)
    with pytest.raises(RecordRefused, match='"box" is in the sum already'):
        rounds.take("box", record(file, 1).content(), 2.0)


def test_too_few_make_no_start(tmp_path: Path) -> None:
    rounds = HubRounds(tmp_path, job(demand=3, min_response=0.8))
    file = asked(rounds, tmp_path)
    for at in range(2):
        rounds.take(f"box-{at}", record(file, at).content(), 1.0)
    assert not rounds.close()
    assert (rounds.round, len(rounds.sum().boxes)) == (0, 2)


def test_a_campaign_of_a_known_name_must_be_the_same(tmp_path: Path) -> None:
    HubCampaign(tmp_path, job())
    with pytest.raises(CampaignRefused, match='"tone" is another one at this hub'):
        HubCampaign(tmp_path, job(demand=4))


def test_a_sum_takes_nothing_that_is_not_encrypted(tmp_path: Path) -> None:
    rounds = HubRounds(tmp_path / "campaigns", job(aggregation="sum"))
    file = asked(rounds, tmp_path)
    with pytest.raises(RecordRefused, match="not encrypted"):
        rounds.take("box", record(file, 0, mode="sum").content(), 1.0)
    assert not rounds.sum().boxes


def test_a_job_without_a_campaign_is_refused() -> None:
    for meta in ({}, {"custom_props": None}, {"custom_props": {"edged": []}}):
        with pytest.raises(CampaignRefused, match="edged federated submit"):
            campaign_of(meta)


def test_boxes_that_were_given_the_start_are_remembered(tmp_path: Path) -> None:
    HubCampaign(tmp_path, job()).tell("box-b")
    HubCampaign(tmp_path, job()).tell("box-a")
    assert HubCampaign(tmp_path, job()).told == ["box-a", "box-b"]


def given_starts(folder: Path, *names: str) -> dict[str, dict[str, np.ndarray]]:
    """Starts in PEFT folders, as a campaign's submitter has them."""
    shapes = {B.replace("_B", "_A"): (RANK, INPUTS), B: (OUTPUTS, RANK)}
    starts = {}
    for seed, name in enumerate(names):
        b = np.random.default_rng(seed).normal(size=shapes[B]).astype(np.float32)
        starts[name] = new_start(name, shapes) | {B: b}
        write_start(folder / name, starts[name], 4.0)
    return starts


def test_each_start_that_a_campaign_names_has_its_own_sum_and_is_moved_by_it(tmp_path: Path) -> None:
    named = job(starts=["concise", "elaborate"], demand=2, min_response=1.0, rounds=1)
    begun = given_starts(tmp_path / "given", *named.starts)
    campaign = HubCampaign(tmp_path, named)
    for rounds in campaign.rounds:
        rounds.begin_with(tmp_path / "given" / rounds.start)
    files = {rounds.start: asked(rounds, tmp_path) for rounds in campaign.rounds}
    for start, file in files.items():
        assert file.start == start
        assert all((file.tensors[name] == each).all() for name, each in begun[start].items())
    records = [record(files[start], at) for at, start in enumerate(("concise", "elaborate", "concise", "elaborate"))]
    for at, each in enumerate(records[:3]):
        campaign.take(f"box-{at}", each.content(), 1.0)
    assert (campaign.missing, campaign.counted) == (1, ["box-0", "box-2", "box-1"])
    assert [rounds.close() for rounds in campaign.open] == [True, False]
    # The hub may start anew.
    campaign = HubCampaign(tmp_path, named)
    assert ([rounds.start for rounds in campaign.open], campaign.counted) == (["elaborate"], ["box-1"])
    with pytest.raises(RecordRefused, match="of a start whose round is not under way"):
        campaign.take("box-3", record(files["concise"], 4).content(), 1.0)
    campaign.take("box-3", records[3].content(), 1.0)
    assert campaign.open[0].close()
    assert campaign.is_complete
    for rounds, own in zip(campaign.rounds, (records[::2], records[1::2]), strict=True):
        told = rounds.start_file()
        expected = moved(begun[rounds.start], mean([each.tensors for each in own]))
        assert told["name"] == rounds.start
        assert all((each == expected[name]).all() for name, each in load(told["weights"]).items())


def test_a_record_of_another_form_than_the_start_is_refused(tmp_path: Path) -> None:
    given_starts(tmp_path / "given", "concise")
    (rounds,) = HubCampaign(tmp_path, job(starts=["concise"])).rounds
    rounds.begin_with(tmp_path / "given" / "concise")
    wide = {B: np.zeros((OUTPUTS + 1, RANK), np.float32)}
    with pytest.raises(RecordRefused, match="of another model or form"):
        rounds.take("box", record(asked(rounds, tmp_path), 0, tensors=wide).content(), 1.0)


def test_a_campaign_is_submitted_with_the_starts_that_it_names_and_no_others(tmp_path: Path) -> None:
    begun = given_starts(tmp_path / "given", "concise")
    named, folder = job(starts=["concise"]), tmp_path / "given" / "concise"
    path = write_job(tmp_path / "job", named, {"concise": folder})
    weights = load_file(path / "app" / "config" / STARTS / "concise" / "adapter_model.safetensors")
    assert all((each == begun["concise"][name]).all() for name, each in weights.items())
    for given in ({}, {"concise": folder, "elaborate": folder}):
        with pytest.raises(CampaignRefused, match="names the starts concise: give each by --start NAME=FOLDER"):
            write_job(tmp_path / "other", named, given)
    with pytest.raises(CampaignRefused, match="is no start"):
        write_job(tmp_path / "third", named, {"concise": tmp_path})
