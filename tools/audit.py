"""What `tools/audit` does with the packages that edged needs.

pip-audit looks them up, their files are compared with their own hashes, and their versions with constraints.txt.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata as metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
_MACHINES = ("torch", "pip", "setuptools")
AUDIT_S = 300.0
"""How long the vulnerability database may take."""


@dataclass(frozen=True)
class Package:
    """One installed package: `files` with a hash, `changed` those that have another one now."""

    name: str
    version: str
    files: int
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """What is known against the packages; `problem` says why nobody could be asked, "" where somebody was.

    `unknown` are those that the database has never heard of: nothing is known against them, nor for them.
    """

    vulnerabilities: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    problem: str = ""


def requirements(names: list[str]) -> Iterator[metadata.Distribution]:
    """The installed distributions that these requirements lead to, each once; extras and other systems left out."""
    seen: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            found = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        yield found
        waiting += [Requirement(line) for line in found.requires or ()]


def examine(distribution: metadata.Distribution) -> Package:
    """Compare a package's files with the hashes that were installed with it (RECORD)."""
    changed, files = [], 0
    for file in distribution.files or ():
        if file.hash is None:
            continue
        files += 1
        try:
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
        except OSError:
            changed.append(f"{file} (missing)")
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value.rstrip("="):
            changed.append(str(file))
    return Package(distribution.metadata["Name"], distribution.version, files, tuple(changed))


def ask(packages: list[Package]) -> Known:
    """What pip-audit's database knows against these very versions."""
    if importlib.util.find_spec("pip_audit") is None:
        return Known(problem="pip-audit is not installed: pip install pip-audit")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        # A local version, such as torch's +cpu, is not in any database; the public one before it is.
        listed.write_text("".join(f"{item.name}=={item.version.split('+')[0]}\n" for item in packages))
        command = [sys.executable, "-P", "-m", "pip_audit", "-r", str(listed), "--no-deps", "--disable-pip"]
        try:
            done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=AUDIT_S)
            found = json.loads(done.stdout)["dependencies"]
        except subprocess.TimeoutExpired:
            return Known(problem=f"the vulnerability database gave no answer for {AUDIT_S:.0f} s")
        except (ValueError, KeyError):
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return Known(problem=f"the vulnerability database could not be asked: {reason[:300]}")
    return understand(found)


def understand(found: list[dict[str, Any]]) -> Known:
    """From the dependencies of pip-audit's JSON report."""
    unknown = tuple(item["name"] for item in found if "skip_reason" in item)
    if len(unknown) == len(found):
        return Known(unknown=unknown, problem="the vulnerability database knows none of the packages")
    vulnerabilities = tuple(
        f"{item['name']} {item['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'none'}"
        for item in found
        for known in item.get("vulns", ())
    )
    return Known(vulnerabilities, unknown)


def compare(packages: list[Package], constraints: str) -> list[str]:
    """How installed versions differ from the lines `NAME==VERSION`; torch and the installers are the machine's own."""
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    tested = {canonicalize_name(name): version.strip() for name, version in pins.items()}
    return [
        f"{item.name} {item.version}: {f'tested with {wanted}' if wanted else 'not among those tested'}"
        for item in packages
        if (name := canonicalize_name(item.name)) not in _MACHINES and (wanted := tested.get(name)) != item.version
    ]


def main() -> int:
    """Returns the exit code that `tools/audit` documents."""
    parser = argparse.ArgumentParser(prog="tools/audit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = sorted((examine(found) for found in requirements(needed)), key=lambda item: item.name.lower())
    known = ask(packages)
    changed = [f"{item.name} {item.version}: {file}" for item in packages for file in item.changed]
    others = compare(packages, CONSTRAINTS.read_text()) if CONSTRAINTS.is_file() else None
    if as_json:
        found = {"packages": [asdict(item) for item in packages], **asdict(known), "other_versions": others}
        print(json.dumps(found, indent=2))
    else:
        files = sum(item.files for item in packages)
        print(f"{len(packages)} packages, {files} files: {len(changed)} differ from what was installed")
        print("\n".join(f"  {line}" for line in changed) or "  all are as their packages' own hashes say")
        if others is None:
            print(f"NOT compared with the tested versions: {CONSTRAINTS} is missing")
        else:
            print(f"{len(others)} have another version than was tested (constraints.txt)")
            print("".join(f"  {line}\n" for line in others), end="")
        if known.problem:
            print(f"NOT checked for known vulnerabilities: {known.problem}")
            print("  what was checked are the hashes above; the versions are: tools/audit --json")
        else:
            print(f"{len(known.vulnerabilities)} known vulnerabilities")
            print("".join(f"  {line}\n" for line in known.vulnerabilities), end="")
            if known.unknown:
                print(f"NOT checked, as the vulnerability database does not know them: {', '.join(known.unknown)}")
    if changed or known.vulnerabilities:
        return 1
    return 2 if known.problem or known.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
