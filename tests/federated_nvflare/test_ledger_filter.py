"""The last gate of a box, before a real daemon: what its ledger has leaves, and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

pytest.importorskip("nvflare", reason="edged[federated] is not installed")
pytest.importorskip("tenseal", reason="edged[federated] is not installed")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from edged.federated.campaign_file import parse_campaign
from edged.federated.records import RoundFile
from edged.federated_nvflare.box_daemon import daemon_client, facts_of, make_record, ready_capacity
from edged.federated_nvflare.encrypted_sum import box_key, decrypt, make_keys
from edged.federated_nvflare.executor import NONCE
from edged.federated_nvflare.kits import SUM_KEY
from edged.federated_nvflare.ledger_filter import LedgerFilter
from examples.demo_model.dialogues import style_pairs
from examples.federation.federation import Box
from tests.cli.conftest import wait_for
from tests.federated_nvflare.conftest import SETTINGS
from tests.models import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A box that has not joined anything, and whose daemon somebody lets take part."""
    folder = tmp_path_factory.mktemp("box")
    box = Box(folder / "box", "box", SETTINGS, "--model", str(save_tiny(folder / "model")))
    try:
        box.daemon.wait_until_ready()
        box.teach("ann", islice(style_pairs(1, True), 6))
        box.agree("ann")
        wait_for(lambda: not box.pairs_waiting(), seconds=120.0)
        yield box
    finally:
        box.stop()


@pytest.fixture
def asked(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A round file for this box; the environment is the agent's."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / SUM_KEY).write_bytes(make_keys()[0])
    monkeypatch.setenv("EDGED_KIT", str(tmp_path))
    monkeypatch.setenv("EDGED_URL", f"http://127.0.0.1:{box.port}")
    monkeypatch.setenv("EDGED_TOKEN", box.token)
    told = box.ask("GET", "/v1/federated")
    table = {"name": "tone", "model": told["model"], "rank": told["rank"], "demand": 1}
    nonce = secrets.token_hex(16)
    return RoundFile(job=parse_campaign(table), round=0, nonce=nonce, start="", tensors={}).content()


def filtered(result: Shareable, asked: bytes) -> Shareable:
    context = FLContext()
    context.set_prop(NONCE, facts_of(asked)["nonce"], private=True, sticky=False)
    return LedgerFilter().process(result, context)


def result(**data: Any) -> Shareable:
    return DXO(DataKind.APP_DEFINED, data=data).to_shareable()


def test_a_record_passes_and_nothing_beside_it(asked: bytes) -> None:
    with daemon_client() as client:
        assert ready_capacity(client) is not None
        record = make_record(client, asked, lambda: False)
    given = result(record=record, text="what ann said")
    given["more"] = "what ann said"
    given.set_header("note", "what ann said")
    passed = filtered(given, asked)
    assert passed.get_return_code() == ReturnCode.OK
    data = from_shareable(passed).data
    assert data.keys() == {"record", "sealed"}
    assert facts_of(data["record"]) == facts_of(record)
    assert not any(each.any() for each in load(data["record"]).values())
    numbers = np.concatenate([each.ravel() for _, each in sorted(load(record).items())])
    np.testing.assert_allclose(decrypt(data["sealed"], box_key()), numbers, atol=1e-6)
    assert "ann said" not in repr(passed)


def test_a_record_that_was_changed_or_is_of_another_round_is_held_back(asked: bytes) -> None:
    with daemon_client() as client:
        record = make_record(client, asked, lambda: False)
    changed = record[:-1] + bytes([record[-1] ^ 1])
    other = RoundFile(job=parse_campaign({"name": "tone", "model": "ab" * 32, "rank": 4, "demand": 1}), round=0,
                      nonce=secrets.token_hex(16), start="", tensors={}).content()  # fmt: skip
    for held, of in ((changed, asked), (record, other), (b"what ann said", asked), ("what ann said", asked)):
        passed = filtered(result(record=held), of)
        assert passed.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
        assert "ann" not in repr(passed)


def test_without_a_daemon_nothing_passes(asked: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_client() as client:
        record = make_record(client, asked, lambda: False)
    monkeypatch.setenv("EDGED_URL", "http://127.0.0.1:9")
    assert filtered(result(record=record), asked).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR


@pytest.mark.parametrize("code", [ReturnCode.EXECUTION_EXCEPTION, ReturnCode.OK, "what ann said"])
def test_of_any_other_result_its_code_alone_passes(asked: bytes, code: str) -> None:
    given = make_reply(code, {"note": "what ann said"})
    given["more"] = "what ann said"
    passed = filtered(given, asked)
    assert passed.get_return_code() == (ReturnCode.ERROR if " " in code else code)
    assert "ann" not in repr(passed)
