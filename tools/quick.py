"""What `tools/test --quick` does: whether a change is sound, in less than a minute.

Formatter, linter and the types of the changed files come first. Then come the tests that are nearest to the change:
those that it changes, those that name a changed module or page, and those of the tree as a whole. None begins when the
time is over. A change is what differs from HEAD, or, where nothing does, what HEAD itself changed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile, zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPED = ("edged/", "benchmarks/", "examples/")
ALWAYS = ("tests/test_layers.py", "tests/test_plain_words.py")
BEGUN_S = 45.0
"""No test begins later than that, so that the last one ends within the minute."""
LEAST_TESTS_S = 20.0
"""Time of the tests where the types took long: some seconds of it are for imports."""
MOST_FILES = 12
"""Test files at most: each takes time to be imported."""


def changed(since: str | None) -> list[str]:
    """The changed files that are there, as git names them."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    names = git("diff", "--name-only", since or "HEAD") + git("ls-files", "--others", "--exclude-standard")
    if not names and since is None:
        names = git("diff", "--name-only", "HEAD~1")
    return [name for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def shared_folders(one: str, other: str) -> int:
    """How many folders two files have in common below the first: tests mirror the packages."""
    pairs = zip(Path(one).parts[1:-1], Path(other).parts[1:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def nearest_tests(names: Sequence[str]) -> list[str]:
    """The test files that a change of these files concerns, the nearest first."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    found = [[name for name in names if name in texts]]
    for name in names:
        path = Path(name)
        if path.suffix == ".py" and name not in texts:
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            folder, _, own = module.rpartition(".")
            named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(folder)} import .*\b{own}\b")
        else:
            named = re.compile(rf"[\"'/]{re.escape(path.name)}\b")
        near = [test for test, text in texts.items() if named.search(text)]
        found.append(sorted(near, key=lambda test: (-shared_folders(test, name), len(texts[test]))))
    # Of each change the nearest comes first, then of each the next.
    in_turns = [test for each in zip_longest(*found) for test in each if test]
    return list(dict.fromkeys([*ALWAYS, *in_turns]))[:MOST_FILES]


def step(*command: str) -> int:
    """Run a module of this environment, and say so."""
    print(f"== {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the change is sound as far as a minute tells."""
    parser = argparse.ArgumentParser(prog="tools/test --quick", description=__doc__)
    parser.add_argument("--since", metavar="REF", help="what has changed since this commit")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    names = changed(options.since)
    typed = [name for name in names if name.startswith(TYPED) and name.endswith(".py")]
    failed = step("ruff", "format", "--check", ".") or step("ruff", "check", ".")
    failed = failed or (step("mypy", *typed) if typed else 0)
    if failed:
        return failed
    left_s = max(LEAST_TESTS_S, BEGUN_S - (time.monotonic() - began))
    return step("pytest", "-q", "-x", f"--within={left_s:.0f}", *nearest_tests(names))


if __name__ == "__main__":
    sys.exit(main())
