"""A box's kit: each file that is loosened is refused by its name, before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edged.federated_nvflare.kits import (
    BOX_LOCAL,
    SUM_KEY,
    KitError,
    check_box_kit,
    exec_agent,
    join,
    joined,
    leave,
    write_local,
)

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit as `provision` makes it, but for its certificates."""
    kit = tmp_path / "kitchen"
    (kit / "startup").mkdir(parents=True)
    server = {"name": "home", "service": {"target": "localhost:8002", "scheme": "grpc"}, "identity": "localhost"}
    client = {"ssl_root_cert": "rootCA.pem", "fqsn": "kitchen", "connection_security": "mtls"}
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"servers": [server], "client": client}))
    for name in ("client.crt", "client.key", "rootCA.pem", SUM_KEY):
        (kit / "startup" / name).touch(0o600)
    write_local(kit, BOX_LOCAL)
    return kit


def change(kit: Path, file: str, how: Change) -> None:
    path = kit / file
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


def test_the_kit_that_provision_makes_is_taken(kit: Path) -> None:
    assert check_box_kit(kit)["client"]["fqsn"] == "kitchen"


LOOSENED: list[tuple[str, str, Change]] = [
    ("resources.json", "class_list_enforcement_mode", lambda file: file.update(class_list_enforcement_mode="warn")),
    ("resources.json", "class_list_enforcement_mode", lambda file: file.pop("class_list_enforcement_mode")),
    ("resources.json", "class_allow_list", lambda file: file["class_allow_list"].append("nvflare.")),
    ("resources.json", "class_allow_list", lambda file: file.update(class_allow_list=["*"])),
    ("resources.json", "class_allow_list", lambda file: file.pop("class_allow_list")),
    ("resources.json", "allow_log_streaming", lambda file: file.update(allow_log_streaming=True)),
    ("resources.json", "allow_log_streaming", lambda file: file.update(allow_log_streaming=0)),
    ("resources.json", "components", lambda file: file["components"].pop()),
    ("resources.json", "app_validator", lambda file: file.update(app_validator={"path": "x.Y"})),
    ("authorization.json", "permissions.lead.byoc", lambda file: file["permissions"]["lead"].update(byoc="any")),
    ("authorization.json", "permissions.lead.byoc", lambda file: file["permissions"]["lead"].pop("byoc")),
    ("authorization.json", "permissions.project_admin", lambda file: file["permissions"].update(project_admin="any")),
    ("authorization.json", "permissions.guest", lambda file: file["permissions"].update(guest={"byoc": "any"})),
    (
        "authorization.json",
        "permissions.member.shell_commands",
        lambda file: file["permissions"]["member"].update(shell_commands="o:site"),
    ),
    ("privacy.json", "scopes", lambda file: file["scopes"].append({"name": "open"})),
    ("privacy.json", "scopes", lambda file: file["scopes"][0].update(task_result_filters=[])),
    ("privacy.json", "default_scope", lambda file: file.pop("default_scope")),
    ("log_config.json", "handlers.wire", lambda file: file["handlers"].update(wire={"class": "logging.SocketHandler"})),
]


@pytest.mark.parametrize(("file", "field", "how"), LOOSENED)
def test_a_loosened_file_is_refused_by_its_name_and_field(kit: Path, file: str, field: str, how: Change) -> None:
    change(kit, f"local/{file}", how)
    with pytest.raises(KitError, match=rf'"{kit / "local" / file}" opens the box: {field}\b'):
        check_box_kit(kit)


@pytest.mark.parametrize(("file", "way_out"), [("privacy.json", "not there"), ("authorization.json", "not there")])
def test_a_missing_file_is_refused(kit: Path, file: str, way_out: str) -> None:
    (kit / "local" / file).unlink()
    with pytest.raises(KitError, match=f"{file}.*{way_out}"):
        check_box_kit(kit)


@pytest.mark.parametrize(
    "extra", ["local/more__resources.json", "local/custom", "startup/x__p_resources.json", "local/job_resources.json"]
)
def test_a_file_that_nvflare_might_read_besides_is_refused(kit: Path, extra: str) -> None:
    (kit / extra).touch()
    with pytest.raises(KitError, match=f"{Path(extra).name}.*remove it"):
        check_box_kit(kit)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda file: file.update(require_signed_jobs=False), "require_signed_jobs"),
        (lambda file: file["client"].update(connection_security="clear"), "mtls"),
        (lambda file: file["client"].update(ssl_root_cert="/etc/other.pem"), "rootCA.pem"),
    ],
)
def test_a_startup_file_that_trusts_more_is_refused(kit: Path, how: Change, said: str) -> None:
    change(kit, "startup/fed_client.json", how)
    with pytest.raises(KitError, match=f"fed_client.json.*{said}"):
        check_box_kit(kit)


@pytest.mark.parametrize("name", ["client.key", SUM_KEY])
def test_a_key_that_others_may_read_is_refused(kit: Path, name: str) -> None:
    (kit / "startup" / name).chmod(0o644)
    with pytest.raises(KitError, match=f"{name}.*chmod 600"):
        check_box_kit(kit)


def test_no_agent_starts_before_its_box_has_joined_or_after_it_has_left(kit: Path) -> None:
    with pytest.raises(KitError, match="has not joined"):
        exec_agent(kit)
    join(kit, {"at": "now"})
    assert joined(kit)
    assert (kit / "joined.json").stat().st_mode & 0o077 == 0
    assert leave(kit) is None
    with pytest.raises(KitError, match="has not joined"):
        exec_agent(kit)
