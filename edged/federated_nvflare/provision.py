"""Kits are made: NVFlare's provisioning signs certificates, and each box gets the files that close it."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edged.federated_nvflare.encrypted_sum import make_keys
from edged.federated_nvflare.kits import (
    BOX_LOCAL,
    BOX_STARTUP,
    HUB_STARTUP,
    ORG,
    SUM_KEY,
    SUM_PUBLIC_KEY,
    KitError,
    write_local,
)

_STATE = ".provisioning"
_BOX = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_ROOT_DAYS = 3650
_BUILDERS = ("workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder")


class FederationFile(BaseModel):
    """The file of a federation (TOML): its hub, its boxes, and who submits campaigns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
    hub: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$")]
    """HOST:PORT at which boxes reach the hub; its certificate is of this host."""
    boxes: tuple[Annotated[str, Field(pattern=f"^{_BOX.pattern}$")], ...]
    submitter: Annotated[str, Field(pattern=r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$")]
    """Address of the person who submits."""


def read_federation(path: Path) -> FederationFile:
    """Read a federation's file. Raises KitError."""
    try:
        return FederationFile.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        field = ".".join(map(str, item["loc"]))
        way_out = 'it has name, hub = "HOST:PORT", boxes = [...] and submitter = "ann@example.org"'
        raise KitError(f'"{path}": "{field}" = {item["input"]!r}: {item["msg"].lower()}; {way_out}') from None
    except (OSError, ValueError) as error:
        raise KitError(f'"{path}" cannot be read: {error}') from None


def provision(federation: FederationFile, folder: Path, added: str = "") -> list[str]:
    """Write a folder for the hub, each box and the submitter, and return the names of new ones.

    With `added`, one more box: the same authority signs it. What is there stays. Raises KitError, OSError.
    """
    boxes = [*federation.boxes, *([added] if added else [])]
    if added and not _BOX.fullmatch(added):
        raise KitError(f'"{added}" cannot name a box: use up to 32 letters, digits and "-"')
    if twice := next((box for box in boxes if boxes.count(box) > 1), None):
        raise KitError(f'two boxes are named "{twice}": give each a name of its own')
    if added and not (folder / _STATE).is_dir():
        raise KitError(f'"{folder}" has no authority that could sign "{added}": make the kits there first')
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / _STATE
    state.mkdir(mode=0o700, exist_ok=True)
    if not (state / SUM_KEY).exists():
        secret, public = make_keys()
        (state / SUM_PUBLIC_KEY).write_bytes(public)
        (state / SUM_KEY).touch(0o600)
        (state / SUM_KEY).write_bytes(secret)
    made = _provisioned(federation, boxes, state)
    host = federation.hub.partition(":")[0]
    wanted = {"hub": host, **{box: box for box in boxes}, federation.submitter: federation.submitter}
    new = [name for name in wanted if not (folder / name).exists()]
    for name in new:
        shutil.copytree(made / wanted[name], folder / name)
        kept = {"hub": HUB_STARTUP, federation.submitter: None}.get(name, BOX_STARTUP)
        if kept is BOX_STARTUP:
            write_local(folder / name, BOX_LOCAL)
        for key in {SUM_KEY, SUM_PUBLIC_KEY}.intersection(kept or ()):
            shutil.copy(state / key, folder / name / "startup" / key)
        _strip(folder / name, kept)
    shutil.rmtree(made)
    return new


def _provisioned(federation: FederationFile, boxes: list[str], state: Path) -> Path:
    """Have NVFlare make its kits; returns their folder. Raises KitError."""
    try:
        from nvflare.lighter.constants import CtxKey
        from nvflare.lighter.prov_utils import prepare_builders
        from nvflare.lighter.provision import prepare_project
        from nvflare.lighter.provisioner import Provisioner
    except ImportError:
        raise KitError(
            "NVFlare is not installed, which makes the certificates: pip install 'edged[federated]'"
        ) from None
    host, _, port = federation.hub.partition(":")
    people = [{"name": federation.submitter, "type": "admin", "org": ORG, "role": "project_admin"}]
    server = {"name": host, "type": "server", "org": ORG, "fed_learn_port": int(port)}
    builders = [{"path": f"nvflare.lighter.impl.{name}", "args": {}} for name in _BUILDERS]
    builders[1]["args"] = {"config_folder": "config", "scheme": "grpc"}
    builders[2]["args"] = {"root_valid_days": _ROOT_DAYS}
    project = {
        "api_version": 3,
        "name": federation.name,
        "participants": [server, *({"name": box, "type": "client", "org": ORG} for box in boxes), *people],
        "builders": builders,
    }
    heard = _Quiet()
    made = Provisioner(str(state), prepare_builders(project)).provision(prepare_project(project), logger=heard)
    if made.get(CtxKey.BUILD_ERROR):
        raise KitError(f"NVFlare made no kits: {'; '.join(heard.errors)}")
    return Path(made[CtxKey.CURRENT_PROD_DIR])


def _strip(kit: Path, kept: tuple[str, ...] | None) -> None:
    """Remove NVFlare's scripts and samples: `edged federated` starts its processes. Close the kit to others."""
    for path in (kit / "startup").iterdir():
        if kept is not None and path.name not in kept:
            path.unlink()
    for path in (kit, *kit.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


class _Quiet:
    """A listener of NVFlare's provisioning, which prints else."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, message: str) -> None:
        """Keep what went wrong."""
        self.errors.append(message)

    def info(self, message: str) -> None:
        """Drop what went well."""

    debug = warning = info
