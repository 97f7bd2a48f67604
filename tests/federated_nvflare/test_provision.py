"""Kits of one authority: for the hub, each box and the submitter, and for a box that comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="edged[federated] is not installed")
pytest.importorskip("tenseal", reason="edged[federated] is not installed")

from cryptography import x509

from edged.federated_nvflare.kits import SUM_KEY, KitError, check_box_kit
from edged.federated_nvflare.provision import FederationFile, provision, read_federation

HOME = """
name = "home"
hub = "localhost:8002"
boxes = ["kitchen", "hall"]
submitter = "ann@example.org"
"""


def federation(folder: Path, text: str = HOME) -> FederationFile:
    path = folder / "home.toml"
    path.write_text(text)
    return read_federation(path)


def issuer(kit: Path) -> bytes:
    """Who signed a box's certificate, whose name the hub believes."""
    authority = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
    own = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
    own.verify_directly_issued_by(authority)
    return (kit / "startup" / "rootCA.pem").read_bytes()


def test_each_has_a_kit_of_its_own_and_a_later_box_is_of_the_same_authority(tmp_path: Path) -> None:
    home, kits = federation(tmp_path), tmp_path / "kits"
    assert provision(home, kits) == ["hub", "kitchen", "hall", "ann@example.org"]
    made = [path for path in kits.rglob("*") if ".provisioning" not in path.parts]
    before = {path: path.read_bytes() for path in made if path.is_file()}
    assert provision(home, kits, "attic") == ["attic"]
    assert all(path.read_bytes() == content for path, content in before.items())
    for box in ("kitchen", "hall", "attic"):
        assert check_box_kit(kits / box)["client"]["fqsn"] == box
    assert len({issuer(kits / box) for box in ("kitchen", "hall", "attic")}) == 1
    assert len({(kits / box / "startup" / SUM_KEY).read_bytes() for box in ("kitchen", "hall", "attic")}) == 1
    assert [path.parent.parent.name for path in kits.rglob(SUM_KEY) if ".provisioning" not in path.parts].count(
        "hub"
    ) == 0
    assert not [path for path in made if path.stat().st_mode & 0o077]
    assert (kits / ".provisioning").stat().st_mode & 0o077 == 0
    with pytest.raises(KitError, match='two boxes are named "hall"'):
        provision(home, kits, "hall")


def test_no_box_is_added_where_no_authority_is(tmp_path: Path) -> None:
    with pytest.raises(KitError, match='no authority that could sign "attic"'):
        provision(federation(tmp_path), tmp_path / "kits", "attic")
    assert not (tmp_path / "kits").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('hub = "localhost"', "\"hub\" = 'localhost'"),
        ('boxes = ["the kitchen"]', "the kitchen"),
        ('submitter = "ann"', "\"submitter\" = 'ann'"),
        ("more = 1", '"more" = 1'),
        ("name = ", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_field_and_value(tmp_path: Path, line: str, said: str) -> None:
    kept = [each for each in HOME.strip().splitlines() if each.split()[0] != line.split()[0]]
    with pytest.raises(KitError, match=r"home\.toml") as refused:
        federation(tmp_path, "\n".join([*kept, line]))
    assert said in str(refused.value)
