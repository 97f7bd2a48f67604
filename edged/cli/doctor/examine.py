"""The table of all checks, in the order in which they are shown, and the function that runs them."""

import os
from dataclasses import replace
from pathlib import Path

from edged.cli.doctor import box, model, service, storage
from edged.cli.doctor.check import CheckProcess
from edged.cli.doctor.finding import Check, Examination, Finding, broken, doubtful, fine
from edged.cli.settings import INSTALLED_FILE, NotReadable, as_installed, means_installed, settings_file, settings_of
from edged.settings.addresses import socket_paths
from edged.settings.load import ConfigError, Settings
from edged.store.data_dir import data_folder

FILE_CHECKS = (
    Check("model", model.place),
    Check("model", model.code),
    Check("model", model.weights),
    Check("tokenizer", model.tokenizer),
)
MODEL_CHECKS = (
    Check("served", model.served),
    Check("trained", model.trained),
    Check("memory", box.memory),
    Check("tokenizer", model.tokens),
    Check("tools", model.tools),
    Check("reasoning", model.reasoning),
)
"""What a model can, by its files but for the weights."""
CHECKS = (
    Check("units", service.units),
    Check("power mode", box.power),
    Check("jtop", box.jtop),
    Check("swap", box.swap),
    Check("clock", box.clock),
    Check("disk", storage.disk),
    Check("data folder", storage.data_folder),
    Check("socket", storage.socket_folder),
    Check("database", storage.database),
    Check("adapters", storage.adapters),
    Check("starts", storage.starts),
    Check("language", storage.language),
    *FILE_CHECKS,
    # The checks from here on wait for the check process.
    Check("device", box.device),
    Check("driver", box.driver),
    Check("torch", box.torch_build),
    Check("triton", box.triton),
    Check("kernels", box.kernels),
    Check("quantized", box.quantized),
    *MODEL_CHECKS,
    Check("profile", model.profile),
)


def examine(path: Path | None, socket: str | None, min_free_bytes: int, within_s: float) -> list[Finding]:
    """Run all checks and return their findings.

    The settings are those of the file at `path`; without one, those of the running daemon, else those that a daemon
    would start with. If these cannot be read, that is a finding, and the defaults are used.
    """
    settings, first = settings_to_look_with(path)
    it = examination(settings, path, socket, min_free_bytes, within_s)
    state, running, served = service.daemon(it)
    if served is not None and path is None:
        seen = f"those of the running daemon: model {served.model.path}, data in {served.store.data_dir}"
        first = fine(seen) if first.state != "fail" else first
        it = replace(it, settings=served, data_dir=Path(served.store.data_dir))
    folder, _ = model.find(it.settings.model)
    # Importing torch is slow: another process does it while the first checks run.
    it = replace(it, running=running, model_dir=folder, checks=CheckProcess(it.settings, folder, tries=not running))
    about = [replace(first, name="settings"), replace(state, name="daemon")]
    return about + [found for check in CHECKS if (found := check.finding(it)) is not None]


def examination(
    settings: Settings, path: Path | None, socket: str | None = None, min_free_bytes: int = 0, within_s: float = 60.0
) -> Examination:
    """Return the input of checks with the settings of the file at `path`, before anything was looked at."""
    return Examination(
        settings=settings,
        data_dir=data_folder(settings.store.data_dir, os.environ),
        sockets=socket_paths(socket or settings.api.socket, os.environ),
        min_free_bytes=min_free_bytes,
        within_s=within_s,
        account=service.account(Path("/")) if os.geteuid() == 0 and means_installed(path) else None,
    )


def settings_to_look_with(named: Path | None) -> tuple[Settings, Finding]:
    """Return the settings that the checks use, and the finding on where they came from."""
    try:
        settings, file = settings_of(named), settings_file(named)
        return settings, fine(str(file) if file else "the defaults and the environment")
    except NotReadable:
        seen = f"{INSTALLED_FILE} may be read by its user alone; the defaults were looked at instead"
        return as_installed(Settings()), doubtful(seen, "`sudo edged doctor`")
    except ConfigError as error:
        instead = as_installed(Settings()) if means_installed(named) else Settings()
        return instead, broken(str(error), "correct it; the defaults were looked at instead")
