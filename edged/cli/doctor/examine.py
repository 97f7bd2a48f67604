"""All checks in the order in which they are shown, bounded in time; one that breaks does not keep the others.

Owns that order. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edged.cli.doctor import box, device, model, service, storage
from edged.cli.doctor.finding import Examination, Finding, broken
from edged.cli.doctor.probe import Probe


def examine(it: Examination, running: bool) -> list[Finding]:
    """All findings but those of settings and daemon. The slow part, torch, is asked by a process beside the others."""
    folder, problem = model.find(it.settings.model)
    probe = Probe(it.settings, folder)
    findings: list[Finding] = []
    look_at = [service.units, box.power, box.jtop, box.swap, box.clock, storage.disk, storage.folders]
    for check in (*look_at, storage.database, storage.adapters, storage.language):
        findings += _guarded(check.__name__, lambda check=check: check(it))  # type: ignore[misc]
    findings += [problem] if problem else []
    if folder is not None:
        findings += _guarded("model", lambda: model.files(folder, it.settings.model.trust_remote_code))
    found, needs = probe.lines(it.left_s(it.within_s))
    on_gpu = found.get("gpu") if it.settings.model.device != "cpu" else None
    findings += _guarded("device", lambda: device.device(it, found))
    findings += _guarded("torch", lambda: device.torch_build(it, found))
    findings += _guarded("memory", lambda: device.memory(it, needs, running))
    findings += _guarded("profile", lambda: model.profile(it, on_gpu))
    return findings


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        return [broken(name, f"the check itself failed: {type(error).__name__}: {error}", "report this")]
