"""An ingress names the caller it asks for: never an admin, and never with more than its own token has."""

from __future__ import annotations

import json

import pytest

from edged.http.access import Caller
from edged.http.errors import ApiError


def holder(roles: set[str], *users: str) -> Caller:
    return Caller('token "fleet"', "fleet", "token:fleet", frozenset(roles), users, "access.tokens")  # type: ignore[arg-type]


FLEET = holder({"use", "train", "metrics", "fleet"}, "*")


def told(name: str = "ann", roles: tuple[str, ...] = ("use",), users: tuple[str, ...] = ("ann",)) -> str:
    return json.dumps({"name": name, "roles": roles, "users": users})


def test_a_caller_is_told_as_it_is() -> None:
    ann = holder({"use", "train"}, "ann", "kitchen-*")
    seen = FLEET.on_behalf(ann.forwarded())
    assert (seen.roles, seen.users) == (ann.roles, ann.users)
    assert seen.tenant == "token:fleet/token:fleet"
    assert not seen.speaks_for("ben")
    assert seen.speaks_for("kitchen-7")


def test_a_role_that_is_of_no_use_at_a_node_stays_at_the_ingress() -> None:
    assert FLEET.on_behalf(FLEET.forwarded()).roles == {"use", "train", "metrics"}


def test_an_admin_of_the_ingress_is_none_at_a_node() -> None:
    seen = FLEET.on_behalf(holder({"admin"}, "*").forwarded())
    assert seen.roles == {"use", "train", "metrics"}
    assert seen.speaks_for("ben")


@pytest.mark.parametrize(
    ("own", "asked", "left"),
    [
        (("*",), ("*", "ann"), ("*", "ann")),
        (
            ("kitchen-*",),
            ("*", "kitchen-*", "kitchen-7", "kitchen-7*", "kit*", "ann"),
            ("kitchen-*", "kitchen-7", "kitchen-7*"),
        ),
        (("ann",), ("ann", "ann*", "*"), ("ann",)),
        ((), ("ann", "*"), ()),
    ],
)
def test_no_user_is_granted_that_the_token_does_not_cover(
    own: tuple[str, ...], asked: tuple[str, ...], left: tuple[str, ...]
) -> None:
    assert holder({"use", "fleet"}, *own).on_behalf(told(users=asked)).users == left


def test_no_role_is_granted_that_the_token_does_not_have() -> None:
    assert holder({"use", "fleet"}, "*").on_behalf(told(roles=("use", "train", "metrics"))).roles == {"use"}


NO_CALLERS = ("", "ann", "[]", '{"name": "ann"}', told(roles=("admin",)), told(roles=("fleet",)), told(name="a b"))


@pytest.mark.parametrize("header", NO_CALLERS)
def test_a_header_that_names_no_caller_is_refused(header: str) -> None:
    with pytest.raises(ApiError) as refused:
        FLEET.on_behalf(header)
    assert refused.value.status == 400


def test_others_may_speak_for_no_caller() -> None:
    with pytest.raises(ApiError) as refused:
        holder({"use", "train", "metrics"}, "*").on_behalf(told())
    assert refused.value.status == 403
