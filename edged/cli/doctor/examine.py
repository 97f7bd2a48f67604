"""The table of all checks, in the order in which they are shown."""

from __future__ import annotations

from dataclasses import replace

from edged.cli.doctor import box, device, model, service, storage
from edged.cli.doctor.finding import Check, Examination, Finding
from edged.cli.doctor.probe import Probe

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
    Check("language", storage.language),
    Check("model", model.place),
    Check("model", model.code),
    Check("model", model.weights),
    Check("tokenizer", model.tokenizer),
    # From here on they wait for the probe.
    Check("device", device.device),
    Check("driver", device.driver),
    Check("torch", device.torch_build),
    Check("triton", device.triton),
    Check("kernels", device.kernels),
    Check("memory", device.memory),
    Check("profile", model.profile),
)


def examine(it: Examination) -> list[Finding]:
    """All findings but those of settings and daemon. The slow part, torch, is asked by a process beside the others."""
    folder, _ = model.find(it.settings.model)
    it = replace(it, model_dir=folder, probe=Probe(it.settings, folder))
    return [found for check in CHECKS if (found := check.finding(it)) is not None]
