"""`edged serve` starts itself again where that gives its heap huge pages, once, as the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_request = pytest.mark.skipif(
    not CHOICE.is_file() or "[madvise]" not in CHOICE.read_text(), reason="no huge pages on request"
)
SCRIPT = """
import os, sys
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES", ""), flush=True)
from edged.runtime.process import restart_in_huge_pages
restart_in_huge_pages()
print("here", flush=True)
"""


def lines(**environment: str) -> list[str]:
    known = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--flag"], env=known | environment, capture_output=True, text=True, check=True
    )
    return out.stdout.splitlines()


@on_request
def test_it_starts_again_once_with_its_arguments() -> None:
    first, second, last = lines()
    assert first.endswith("['--flag'] ")
    assert second == first + "glibc.malloc.hugetlb=1"
    assert last == "here"


@on_request
def test_other_tunables_stay() -> None:
    assert lines(GLIBC_TUNABLES="glibc.malloc.check=0")[1].endswith("glibc.malloc.check=0:glibc.malloc.hugetlb=1")


def test_who_has_chosen_is_left_alone() -> None:
    assert lines(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[1:] == ["here"]
