"""One daemon with a tiny random model for all tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

SETTINGS = {"serving__max_queue": 256, "api__max_body_kb": 256, "store__save_every_s": 0.2}


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root: Path = tmp_path_factory.mktemp("api")
    save_tiny(root / "tiny", max_position_embeddings=512)
    with running(root / "run", root / "tiny", **SETTINGS) as live:
        yield live


@pytest.fixture
def client(daemon: LiveDaemon) -> Iterator[openai.OpenAI]:
    with daemon.openai() as client:
        yield client


@pytest.fixture
def http(daemon: LiveDaemon) -> Iterator[httpx2.Client]:
    with daemon.http() as http:
        yield http
