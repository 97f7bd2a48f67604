"""A federation for real: a hub and three agents beside three daemons; what is killed in a round, and hostile jobs.

Slow: processes of jobs take seconds to start, and boxes that died are waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from edged.federated.averaging import B, new_start, read_start, write_start
from edged.federated.campaign_file import parse_campaign
from edged.federated_nvflare import submission
from edged.federated_nvflare.box_daemon import add_start, start_tar
from examples.federation.federation import SUBMITTER, Box, Federation
from tests.federated_nvflare.conftest import NAMES, log_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 300.0


def progress(federation: Federation, name: str) -> dict[str, Any]:
    return federation.campaigns().get(name, {"rounds_complete": 0, "boxes_with_start": 0, "state": ""})


def complete(federation: Federation, name: str, rounds: int) -> Callable[[], bool]:
    return lambda: progress(federation, name)["rounds_complete"] >= rounds


def start_of(federation: Federation, name: str, number: int) -> Path:
    return federation.kits / "hub" / "campaigns" / name / f"start-{number}" / "adapter_model.safetensors"


def ledger(federation: Federation, box: str) -> list[dict[str, Any]]:
    return list(federation.boxes[box].ask("GET", "/v1/federated/ledger")["ledger"])


def test_two_campaigns_are_taught_and_every_box_is_given_their_starts(federation: Federation) -> None:
    federation.submit(name="one", demand=2, overcommit=1.0, deadline_s=120)
    federation.submit(name="two", demand=1, overcommit=1.0, deadline_s=120, rounds=2, aggregation="single")
    federation.wait_for(complete(federation, "one", 1), "campaign one", WITHIN_S)
    federation.wait_for(complete(federation, "two", 2), "campaign two", WITHIN_S)
    for name in ("one", "two"):
        federation.wait_for(lambda name=name: progress(federation, name)["boxes_with_start"] == 3, "it", WITHIN_S)  # type: ignore[misc]
    lines = [line for name in NAMES for line in ledger(federation, name)]
    assert sorted((line["campaign"], line["round"]) for line in lines) == [
        ("one", 0),
        ("one", 0),
        ("two", 0),
        ("two", 1),
    ]
    for name in NAMES:
        starts = {each["name"] for each in federation.boxes[name].ask("GET", "/v1/starts")["starts"]}
        assert {"one", "two"} <= starts
    # Sums stay encrypted at the hub; single records do not.
    assert not any(each.any() for name, each in load_file(start_of(federation, "one", 1)).items() if ".lora_B" in name)
    first, second = load_file(start_of(federation, "two", 1)), load_file(start_of(federation, "two", 2))
    begun = new_start("two", {name: each.shape for name, each in first.items()})
    for name, each in begun.items():
        if name.endswith("lora_A.weight"):
            assert (each == first[name]).all()
            assert (each == second[name]).all()
        else:
            assert (each != first[name]).any()
            assert (first[name] != second[name]).any()


def test_starts_that_a_campaign_names_are_moved_by_those_whom_they_fit(federation: Federation, tmp_path: Path) -> None:
    with federation.boxes["box-a"].daemon.client() as client:
        exported = tmp_path / "kind.tar"
        exported.write_bytes(b"".join(client.download("/v1/adapters/ann/export")[1]))
    with tarfile.open(exported) as tar:
        tar.extractall(tmp_path / "kind", filter="data")
    weights, alpha = read_start(tmp_path / "kind")
    for name, factor in (("kind", 0.1), ("unkind", -0.1)):  # so little that neither breaks the language
        write_start(tmp_path / name, {own: each * factor if B in own else each for own, each in weights.items()}, alpha)
    starts = {name: tmp_path / name for name in ("kind", "unkind")}
    fitting = {}
    for name, box in federation.boxes.items():
        with box.daemon.client() as client:
            for start, folder in starts.items():
                files = (folder / "adapter_model.safetensors", folder / "adapter_config.json")
                add_start(client, start, start_tar(*(path.read_bytes() for path in files)))

        def losses(box: Box = box) -> dict[str, float]:
            scores = box.ask("GET", "/v1/adapters/ann/starts")["scores"]
            found = {each["start"]: each["loss"] for each in scores if each["start"] in starts}
            return found if len(found) == 2 else {}

        federation.wait_for(losses, "scores of both starts", WITHIN_S)
        fitting[name] = min(losses(), key=losses().__getitem__)
    ((most, number),) = Counter(fitting.values()).most_common(1)
    federation.submit(starts, name="both", demand=number, overcommit=1.0, min_response=1.0, deadline_s=90)
    folder = federation.kits / "hub" / "campaigns" / "both" / most
    federation.wait_for((folder / "start-1").exists, "a round of a start", WITHIN_S)
    submission.cancel(federation.kits / SUBMITTER, "both")
    told = {name: line["start"] for name in NAMES for line in ledger(federation, name) if line["campaign"] == "both"}
    assert told == {name: fitting[name] for name in told}
    assert [*told.values()].count(most) == number
    begun, own = load_file(folder / "start-0" / "adapter_model.safetensors"), read_start(starts[most])[0]
    assert all((each == own[name]).all() for name, each in begun.items())


def test_a_round_goes_on_without_a_job_s_process_that_is_killed(federation: Federation) -> None:
    agent = federation.boxes["box-a"].agent
    assert agent is not None
    federation.submit(name="killed-job", demand=3, min_response=0.6, overcommit=1.0, deadline_s=90)
    federation.wait_for(agent.jobs, "a round", WITHIN_S)
    for process in agent.jobs():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    federation.wait_for(complete(federation, "killed-job", 1), "the round", WITHIN_S)
    federation.wait_for(lambda: progress(federation, "killed-job")["boxes_with_start"] == 3, "the start", WITHIN_S)


def test_a_round_goes_on_without_an_agent_that_is_killed_and_with_it_when_it_is_back(federation: Federation) -> None:
    agent = federation.boxes["box-b"].agent
    assert agent is not None
    federation.submit(name="killed-agent", demand=3, min_response=0.6, overcommit=1.0, deadline_s=90)
    federation.wait_for(agent.jobs, "a round", WITHIN_S)
    agent.kill()
    federation.wait_for(complete(federation, "killed-agent", 1), "the round", WITHIN_S)
    agent.process = agent.start()
    federation.wait_for(lambda: progress(federation, "killed-agent")["boxes_with_start"] == 3, "the start", WITHIN_S)


def test_a_round_goes_on_from_its_file_when_the_hub_was_killed(federation: Federation) -> None:
    federation.submit(name="killed-hub", demand=3, overcommit=1.0, min_response=1.0, deadline_s=120)
    kept = federation.kits / "hub" / "campaigns" / "killed-hub" / "sum.safetensors"
    agents = [federation.boxes[name].agent for name in NAMES]
    federation.wait_for(lambda: all(agent is not None and agent.jobs() for agent in agents), "a round", WITHIN_S)
    federation.wait_for(kept.exists, "the round's file", WITHIN_S)
    nonce = submission_nonce(kept)
    federation.hub.process.kill()
    federation.hub.process.wait()
    federation.hub.process = federation.hub.start()
    federation.wait_for(complete(federation, "killed-hub", 1), "the round", WITHIN_S)
    nonces = {line["nonce"] for name in NAMES for line in ledger(federation, name) if line["campaign"] == "killed-hub"}
    assert nonces == {nonce}


def submission_nonce(path: Path) -> str:
    """The nonce of the round under way."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return str(json.loads(header["__metadata__"]["edged"])["nonce"])


def hostile(federation: Federation, name: str, folder: Path, change: Callable[[Path], None]) -> None:
    """Submit a job that looks like a campaign's, but for a change."""
    told = federation.boxes["box-a"].ask("GET", "/v1/federated")
    table = {
        "name": name,
        "model": told["model"],
        "rank": told["rank"],
        "demand": 1,
        "overcommit": 1.0,
        "deadline_s": 20,
    }
    path = submission.write_job(folder, parse_campaign(table))
    change(path)
    with submission.session(federation.kits / SUBMITTER) as hub:
        hub.submit_job(str(path))


def edited(path: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


def _with_nvflare_s_class(job: Path) -> None:
    trainer = {"path": "nvflare.app_common.np.np_trainer.NPTrainer", "args": {}}
    file = job / "app" / "config" / "config_fed_client.json"
    edited(file, lambda content: content["executors"][0].update(executor=trainer))


def _with_another_scope(job: Path) -> None:
    edited(job / "meta.json", lambda content: content.update(scope="public"))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("class", _with_nvflare_s_class, "not in allow_list"),
        ("scope", _with_another_scope, "scope 'public' is not allowed"),
    ],
)
def test_a_hostile_job_is_refused_on_the_box(
    federation: Federation, tmp_path: Path, name: str, change: Callable[[Path], None], said: str
) -> None:
    before = {box: len(ledger(federation, box)) for box in NAMES}
    hostile(federation, f"hostile-{name}", tmp_path, change)

    def is_refused() -> bool:
        logs = [log_of(federation, box) for box in NAMES]
        return said in "".join([*logs, progress(federation, f"hostile-{name}")["state"]])

    federation.wait_for(is_refused, "a refusal", WITHIN_S)
    submission.cancel(federation.kits / SUBMITTER, f"hostile-{name}")
    assert {box: len(ledger(federation, box)) for box in NAMES} == before
