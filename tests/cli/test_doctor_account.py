"""`edged doctor` as root looks with the rights of the service's user: root's own say nothing."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edged.cli.doctor import box, service, storage
from edged.cli.doctor.finding import Examination, Finding
from tests.cli.test_doctor import examination, only
from tests.cli.test_doctor_box import ORIN, system

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
UNIT = "etc__systemd__system__edged.service"


@pytest.fixture
def it() -> Iterator[Examination]:
    """A box whose service runs as nobody, with data that are all nobody's, in a folder that everybody can pass."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        system(root, **ORIN, **{UNIT: "[Service]\nUser=nobody\n"})
        looked = replace(examination(root), root=root, account=service.account(root))
        version = looked.data_dir / "adapters" / "base" / "ada" / "v000001"
        version.mkdir(parents=True)
        for file in (looked.data_dir / "edged.db", looked.data_dir / "edged.lock", version / "edged.json"):
            file.touch(mode=0o600)
        for path in (looked.data_dir, *looked.data_dir.rglob("*")):
            shutil.chown(path, "nobody")
        looked.data_dir.chmod(0o700)
        yield looked


def data_folder(it: Examination) -> Finding:
    data = storage.data_folder(it)
    assert (os.geteuid(), os.getegid()) == (0, 0)
    return data


def test_data_of_the_services_user_are_fine(it: Examination) -> None:
    assert data_folder(it).state == "ok"


@pytest.mark.parametrize(
    "part", ["", "edged.db", "edged.lock", "adapters/base/ada", "adapters/base/ada/v000001/edged.json"]
)
def test_a_part_of_the_data_that_is_roots_is_found(it: Examination, part: str) -> None:
    shutil.chown(it.data_dir / part, "root")
    (it.data_dir / part).chmod(0o755)
    finding = data_folder(it)
    assert finding.state == "fail"
    assert f"{it.data_dir / part}" in finding.seen
    assert "the service's user, nobody" in finding.seen
    assert f"chown -R nobody: {it.data_dir}" in finding.way_out


def test_a_folder_above_that_the_services_user_may_not_pass_is_found(it: Examination) -> None:
    it.root.chmod(0o700)
    assert data_folder(it).state == "fail"


def test_a_folder_that_the_services_user_cannot_make_is_found(it: Examination) -> None:
    shutil.rmtree(it.data_dir)
    assert data_folder(it).state == "fail"
    it.root.chmod(0o777)
    assert data_folder(it).state == "ok"


def test_a_services_user_who_is_not_in_jtops_group_is_found(it: Examination) -> None:
    assert it.account is not None
    with socket.socket(socket.AF_UNIX) as listener:
        path = it.root / "run" / "jtop.sock"
        path.parent.mkdir()
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o660)
        finding = only(box.jtop(it))
        assert finding.state == "warn"
        assert "usermod -aG jtop nobody" in finding.way_out
        os.chown(path, 0, it.account.pw_gid)
        assert only(box.jtop(it)).state == "ok"


def test_the_account_is_the_one_that_the_unit_names(it: Examination) -> None:
    assert it.account is not None
    assert it.account.pw_name == "nobody"
    for text in ("[Service]\n", "[Service]\nUser=root\n", "[Service]\nUser=no-such-account\n"):
        system(it.root, **{UNIT: text})
        assert service.account(it.root) is None
    assert service.account(it.root / "elsewhere") is None
