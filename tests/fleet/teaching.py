"""Users of a fleet who teach, and what each node has of them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from typing import Any

from tests.cli.conftest import wait_for
from tests.fleet.conftest import Fleet, ask


def pair(user: str, number: int) -> dict[str, str]:
    return {"user": user, "prompt": f"Question {number}:", "chosen": f" yes, certainly {number}", "rejected": " no"}


def teach(fleet: Fleet, user: str, number: int, url: str = "") -> str:
    """Teach a pair, and return the feedback's id."""
    status, taken, _ = ask(f"{url or fleet.url}/v1/feedback", pair(user, number))
    assert status == 200, taken
    return str(taken["id"])


def teach_at_last(fleet: Fleet, user: str, number: int) -> str:
    """Teach a pair as soon as the fleet takes it, and return the node that took it."""
    answers: list[tuple[int, Any, dict[str, str]]] = []

    def taken() -> bool:
        answers.append(ask(f"{fleet.url}/v1/feedback", pair(user, number)))
        assert answers[-1][0] in (200, 503), answers[-1]
        return answers[-1][0] == 200

    wait_for(taken)
    return answers[-1][2]["X-Edged-Node"]


def learned(fleet: Fleet, feedback_id: str) -> bool:
    status, told, _ = ask(f"{fleet.url}/v1/feedback/{feedback_id}")
    return status == 200 and all(each["state"] in ("trained", "learnt", "held_out") for each in told["pairs"])


def lease(fleet: Fleet, node: str, user: str) -> dict[str, Any] | None:
    """What a node knows of a user's writer."""
    found = ask(f"{fleet.node_url(node)}/v1/leases")[1]["leases"]
    return next((item for item in found if item["adapter"] == user), None)


def writers(fleet: Fleet, user: str) -> list[str]:
    """The nodes that take themselves for the writer."""
    known = {name: lease(fleet, name, user) for name in fleet.nodes}
    return [name for name, item in known.items() if item is not None and item["node"] == name]


def exported(fleet: Fleet, user: str) -> dict[str, Counter[str]]:
    """How often each pair's better answer stands in the feedback of each node."""
    found = {}
    for name in fleet.nodes:
        with urllib.request.urlopen(f"{fleet.node_url(name)}/v1/feedback?user={user}") as answer:
            rows = [json.loads(line) for line in answer.read().decode().splitlines()]
        found[name] = Counter(row["chosen"] for row in rows)
    return found


def all_once_at(fleet: Fleet, user: str, node: str, numbers: set[int]) -> bool:
    """Whether all of these pairs, and no others, are in the feedback of this node alone, each once and learned."""
    wanted = {
        name: Counter({pair("", each)["chosen"]: 1 for each in numbers} if name == node else {}) for name in "abc"
    }
    if exported(fleet, user) != wanted:
        return False
    return ask(f"{fleet.node_url(node)}/v1/status")[1]["finetune"]["pairs_queued"] == 0


def version_of(fleet: Fleet, user: str, **more: Any) -> int:
    """The version that answers a user."""
    status, answer, _ = fleet.chat(user, **more)
    assert status == 200, answer
    return fingerprint_version(user, answer)


def fingerprint_version(user: str, answer: dict[str, Any]) -> int:
    """The version that an answer names; 0 for the base."""
    found = re.match(rf"{user}@(\d+)", answer["system_fingerprint"])
    return int(found[1]) if found else 0


def wait_for_copy(fleet: Fleet, user: str, home: str) -> None:
    """Wait until another node has the version that home has."""

    def copied() -> bool:
        versions = {name: item["version"] for name in "abc" if (item := lease(fleet, name, user))}
        return any(versions[name] == versions.get(home, -1) > 0 for name in versions if name != home)

    wait_for(copied)
