"""A box's files, as NVFlare's own classes read them: nothing but ours is loaded, whoever submits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="edged[federated] is not installed")

from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.security.security import COMMAND_CATEGORIES, FLAuthorizer

from edged.federated_nvflare.kits import BOX_LOCAL, ORG, write_local
from edged.federated_nvflare.ledger_filter import LedgerFilter
from edged.federated_nvflare.submission import BOX_JOB

ROLES = ("project_admin", "org_admin", "lead", "member", "stranger")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "startup").mkdir()
    write_local(tmp_path, BOX_LOCAL)
    return Workspace(str(tmp_path), "kitchen")


@pytest.mark.parametrize("role", ROLES)
def test_nobody_may_bring_code_or_command_a_box(role: str) -> None:
    authorizer = FLAuthorizer(ORG, BOX_LOCAL["authorization.json"])
    person = Person("ann@example.org", ORG, role)
    for right in ("byoc", "server-predeployed-flwr", "clone_job", *COMMAND_CATEGORIES):
        may, _ = authorizer.authorize(AuthzContext(right, person, person))
        assert not may, right


def test_a_box_loads_its_executor_and_its_filter_and_no_other_class(workspace: Workspace) -> None:
    authorizer = ComponentPathAuthorizer()
    for item in BOX_JOB["executors"]:
        authorizer.authorize_component_config(item["executor"], workspace=workspace)
    others = [*DEFAULT_CLASS_ALLOW_LIST, "os.system", "edged.federated_nvflare.executor.Other", "edged.cli.main.main"]
    for path in others:
        with pytest.raises(UnsafeComponentError):
            authorizer.authorize_component_config({"path": path, "args": {}}, workspace=workspace)


def test_a_box_has_one_scope_and_its_filter_is_in_it(workspace: Workspace) -> None:
    manager = create_privacy_manager(workspace, names_only=False)
    assert [*manager.name_to_scopes] == ["edged"]
    for scope in (manager.get_scope(""), manager.get_scope("edged")):
        assert [type(each) for each in scope.task_result_filters["out"]] == [LedgerFilter]
    assert manager.get_scope("public") is None


def test_what_a_box_needs_is_json_and_names_classes_that_are_there() -> None:
    import importlib

    paths = [each["path"] for each in BOX_LOCAL["resources.json"]["components"]]
    for path in [*paths, *BOX_LOCAL["resources.json"]["class_allow_list"]]:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    assert all(json.loads(json.dumps(content)) == content for content in BOX_LOCAL.values())
