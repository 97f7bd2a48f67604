"""Encrypted sums: boxes read the mean of records that the hub adds up, and the hub alone reads nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

pytest.importorskip("tenseal", reason="edged[federated] is not installed")

from edged.federated.averaging import mean, moved, new_start
from edged.federated.records import RecordRefused
from edged.federated_nvflare.encrypted_sum import (
    add,
    decrypt,
    encrypt,
    make_keys,
    opened_round,
    opened_weights,
    sealed_record,
)
from edged.federated_nvflare.hub_rounds import HubRounds
from edged.federated_nvflare.kits import SUM_PUBLIC_KEY
from tests.federated_nvflare.test_hub_rounds import B, asked, job, record


@pytest.fixture(scope="module")
def keys() -> tuple[bytes, bytes]:
    return make_keys()


@pytest.fixture
def root(tmp_path: Path, keys: tuple[bytes, bytes]) -> Path:
    """The hub's folder of campaigns, in a kit with its key."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / SUM_PUBLIC_KEY).write_bytes(keys[1])
    return tmp_path / "campaigns"


def test_the_encrypted_mean_of_ten_boxes_is_the_plain_one(keys: tuple[bytes, bytes]) -> None:
    updates = np.random.default_rng(0).normal(size=(10, 9000)).astype(np.float32) * 1e-3
    total = add([encrypt(update, keys[0]) for update in updates], keys[1], 1 / 10)
    twice = add([total, total], keys[1])
    np.testing.assert_allclose(decrypt(total, keys[0]), updates.mean(0), atol=1e-6)
    np.testing.assert_allclose(decrypt(twice, keys[0]), 2 * updates.mean(0), atol=1e-6)


def test_who_has_the_hub_s_key_cannot_decrypt(keys: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="secret_key"):
        decrypt(encrypt(np.ones(3), keys[0]), keys[1])


def test_what_the_hub_gets_and_keeps_of_a_record_has_none_of_its_numbers(
    root: Path, tmp_path: Path, keys: tuple[bytes, bytes]
) -> None:
    rounds = HubRounds(root, job(aggregation="sum"))
    content = record(asked(rounds, tmp_path), 0, mode="sum").content()
    sent = sealed_record(content, keys[0])
    rounds.take("box", sent["record"], 1.0, sent["sealed"])
    numbers = content[-8:]
    assert numbers in content
    for path in (path for path in root.rglob("*") if path.is_file()):
        assert numbers not in path.read_bytes()
    assert not load(sent["record"])[B].any()


def test_boxes_read_the_start_that_two_encrypted_rounds_have_moved(
    root: Path, tmp_path: Path, keys: tuple[bytes, bytes]
) -> None:
    campaign, seed = job(aggregation="sum"), 0
    expected: dict[str, np.ndarray] = {}
    for _ in range(2):
        rounds = HubRounds(root, campaign)
        file = asked(rounds, tmp_path)
        records = [record(file, seed := seed + 1, mode="sum") for _ in range(3)]
        for at, each in enumerate(records):
            sent = sealed_record(each.content(), keys[0])
            # The hub may start anew between two records.
            assert HubRounds(root, campaign).take(f"box-{at}", sent["record"], 1.0, sent["sealed"]) == at + 1
        assert rounds.close()
        expected = moved(expected or new_start("tone", records[0].shapes), mean([each.tensors for each in records]))
    files, sealed = rounds.start_file(), rounds.sealed_start()
    assert not load(files["weights"])[B].any(), "the hub has the start as it began"
    for found in (load(opened_weights(files["weights"], sealed, keys[0])),
                  load(opened_round(rounds.round_file(), sealed, keys[0]))):  # fmt: skip
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            np.testing.assert_allclose(found[name], each, atol=1e-6)


@pytest.mark.parametrize("sealed", [[b"x" * 100], [b""], "another length", "more pieces"])
def test_encrypted_numbers_of_another_kind_are_refused(
    root: Path, tmp_path: Path, keys: tuple[bytes, bytes], sealed: object
) -> None:
    rounds = HubRounds(root, job(aggregation="sum"))
    content = record(asked(rounds, tmp_path), 0, mode="sum").content()
    honest = sealed_record(content, keys[0])
    rounds.take("honest", honest["record"], 1.0, honest["sealed"])
    made = {"another length": encrypt(np.ones(3), keys[0]), "more pieces": [*honest["sealed"], *honest["sealed"]]}
    given = made[sealed] if isinstance(sealed, str) else sealed
    with pytest.raises(RecordRefused, match="cannot be added"):
        rounds.take("box", honest["record"], 1.0, given)  # type: ignore[arg-type]
    assert rounds.sum().boxes == {"honest": 1.0}


def test_a_start_of_another_form_is_not_moved(keys: tuple[bytes, bytes], root: Path, tmp_path: Path) -> None:
    rounds = HubRounds(root, job(aggregation="sum", demand=1))
    content = record(asked(rounds, tmp_path), 0, mode="sum")
    sent = sealed_record(content.content(), keys[0])
    rounds.take("box", sent["record"], 1.0, sent["sealed"])
    assert rounds.close()
    wide = replace(content, tensors={B: np.zeros((8, 2), np.float32)}).content()
    with pytest.raises(ValueError, match="another form"):
        opened_weights(wide, rounds.sealed_start(), keys[0])
