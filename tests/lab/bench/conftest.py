"""A tiny model with a trace and pairs for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edged.lab.bench.compare import ComparedLoad
from tests.models import save_tiny


@pytest.fixture(scope="session")
def workload_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, trace.jsonl (twelve requests in six conversations), pairs.jsonl and edged.toml."""
    folder = tmp_path_factory.mktemp("workload")
    save_tiny(folder / "model")
    rows = [
        {"timestamp": 500 * n, "input_length": 1100, "output_length": 80, "hash_ids": [n // 2, 100 + n, 200 + n]}
        for n in range(12)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "\n\nHuman: hi\n\nAssistant:"
    pairs = [{"chosen": f"{head} good day {n}", "rejected": f"{head} yo {n}"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "edged.toml").write_text("[cache]\nmemory_mb = 8\n[guard]\nheld_out_share = 0.0\n")
    return folder


def tiny_workload(files: Path, kind: type[ComparedLoad] = ComparedLoad, /, **changes: object) -> ComparedLoad:
    """Runs of two seconds on the tiny model."""
    values: dict[str, object] = {
        "trace": str(files / "trace.jsonl"),
        "pairs": str(files / "pairs.jsonl"),
        "model": str(files / "model"),
        "config": str(files / "edged.toml"),
        "seconds": 2.0,
    }
    return kind(**{**values, **changes})  # type: ignore[arg-type]
