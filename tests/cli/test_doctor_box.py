"""`edged doctor` on the box: Jetson's services, swap, clock, GPU, memory, systemd's units."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edged.cli.doctor import box, model, service
from edged.cli.doctor.check import CheckProcess
from edged.cli.doctor.finding import Finding
from edged.engine import native
from edged.settings.load import load_settings
from tests.cli.test_doctor import examination, only


def system(folder: Path, **files: str) -> Path:
    """A recorded /proc and /etc; `_` in a name is `/`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


ORIN = {
    "proc__device-tree__compatible": "nvidia,p3737-0000+p3701-0004\0nvidia,tegra234\0",
    "etc__nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64",
    "proc__swaps": "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 1966048 0 5\n",
}


def test_a_jetson_without_its_services_is_told_so(tmp_path: Path) -> None:
    it = examination(tmp_path, root=system(tmp_path, **ORIN), torch={"cuda": False})
    assert it.jetson
    assert "jetson-stats" in only(box.jtop(it)).way_out
    assert "nvpmodel" in only(box.power(it)).seen
    assert "nvzramconfig" in only(box.swap(it)).way_out
    assert (only(box.device(it)).state, only(box.driver(it)).state) == ("warn", "ok")
    assert only(box.driver(it)).seen == "L4T 36.4.3"


def test_jtop_is_well_where_its_socket_answers(tmp_path: Path) -> None:
    it = examination(tmp_path, root=system(tmp_path, **ORIN))
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "run" / "jtop.sock"))
        assert only(box.jtop(it)).state == "warn"
        listener.listen()
        assert only(box.jtop(it)).state == "ok"


def test_swap_that_is_in_use_is_found(tmp_path: Path) -> None:
    lines = "Filename\tType\tSize\tUsed\tPriority\n/swapfile file 4194304 {} -2\n"
    it = examination(tmp_path, root=system(tmp_path, proc__swaps=lines.format(0)))
    assert only(box.swap(it)).state == "ok"
    system(tmp_path, proc__swaps=lines.format(3_000_000))
    assert only(box.swap(it)).state == "warn"


def test_a_clock_that_went_back_is_found(tmp_path: Path) -> None:
    it = examination(tmp_path)
    it.data_dir.mkdir()
    database = it.data_dir / "edged.db"
    database.touch()
    tomorrow = time.time() + 86400
    os.utime(database, (tomorrow, tomorrow))
    finding = only(box.clock(it))
    assert finding.state == "warn"
    assert "were written at" in finding.seen


GPU = {
    "torch": "2.8",
    "cuda_build": "12.6",
    "cuda": True,
    "gpu": "Orin",
    "integrated": True,
    "gpu_bytes": 2**35,
    "triton": True,
}


def test_a_torch_that_cannot_use_the_gpu_is_found(tmp_path: Path) -> None:
    for_processors = {"torch": "2.8", "cuda_build": "", "cuda": False}
    with_gpu = examination(tmp_path, root=system(tmp_path, **ORIN), torch=for_processors)
    assert only(box.torch_build(with_gpu)).state == "fail"
    assert (box.triton(with_gpu), box.kernels(with_gpu)) == (None, None)
    without = examination(tmp_path / "other", torch=for_processors)
    if not box.gpu_there(without):
        assert only(box.torch_build(without)).state == "ok"
    wants_cuda = load_settings(environ={}, overrides={"model.device": "cuda:0"})
    asked = examination(tmp_path, root=tmp_path / "empty", settings=wants_cuda, torch=for_processors)
    assert only(box.device(asked)).state == "fail"


@pytest.mark.parametrize(
    ("capability", "architectures", "state"),
    [
        ([8, 7], ["sm_80", "sm_90"], "ok"),
        ([8, 7], ["sm_87"], "ok"),
        ([8, 7], ["sm_90"], "warn"),
        ([10, 0], ["sm_90", "compute_90"], "ok"),
        ([7, 2], ["sm_75", "compute_90"], "warn"),
    ],
)
def test_kernels_for_another_gpu_are_found(
    tmp_path: Path, capability: list[int], architectures: list[str], state: str
) -> None:
    found = {**GPU, "capability": capability, "architectures": architectures}
    assert only(box.torch_build(examination(tmp_path, torch=found))).state == state


def test_a_gpu_without_triton_is_told_how_to_get_it(tmp_path: Path) -> None:
    for there, state in ((True, "ok"), (False, "warn")):
        found = {**GPU, "capability": [8, 7], "architectures": ["sm_87"], "triton": there}
        it = examination(tmp_path, torch=found)
        told = only(box.triton(it))
        assert (told.state, box.kernels(it)) == (state, None)
    assert told.way_out == "pip install triton"


def test_a_processor_without_the_compiled_kernels_is_told_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = {"torch": "2.8", "cuda_build": "", "cuda": False}
    it = examination(tmp_path, root=tmp_path / "empty", torch=processors)
    (tmp_path / "old.so").write_bytes(b"edged_interface_0")
    (tmp_path / "new.so").write_bytes(native.INTERFACE.encode())
    for name, state in (("new.so", "ok"), ("old.so", "warn"), (None, "warn")):
        monkeypatch.setattr(native, "shared_library", lambda name=name: tmp_path / name if name else None)
        told = only(box.kernels(it))
        assert (told.state, box.triton(it)) == (state, None)
    assert told.way_out.startswith("install gcc")


def test_memory_that_does_not_suffice_is_found(tmp_path: Path) -> None:
    def found(needs: dict[str, Any], running: bool = False) -> str:
        return only(box.memory(examination(tmp_path, needs=needs, running=running))).state

    needs = {"fits": True, "dtype": "bfloat16", "context_tokens": 4096, "needed_bytes": 8 << 30}
    room = {"total_bytes": 32 << 30, "available_bytes": 20 << 30}
    assert found({**needs, **room}) == "ok"
    short = {**needs, **room, "available_bytes": 4 << 30}
    assert found(short) == "warn"
    assert found(short, running=True) == "ok"
    assert found({**needs, **room, "fits": False}) == "fail"
    problem = examination(tmp_path, needs={"problem": "model: no linears"})
    assert (box.memory(problem), only(model.served(problem)).state) == (None, "fail")


UNIT = "[Unit]\nDescription=edged\n\n[Service]\nExecStart=/bin/true\n{}\n"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@needs_systemd
def test_units_that_are_missing_wrong_or_unwatched_are_found(tmp_path: Path) -> None:
    it = examination(tmp_path, root=tmp_path)
    assert "not installed" in only(service.units(it)).seen
    unit = "etc__systemd__system__edged.service"
    system(tmp_path, **{unit: UNIT.format("")})
    assert "WatchdogSec" in only(service.units(it)).way_out
    system(tmp_path, **{unit: UNIT.format("WatchdogSec=30\nRestartt=always")})
    assert "Restartt" in only(service.units(it)).seen
    system(tmp_path, **{unit: UNIT.format("WatchdogSec=30")})
    assert only(service.units(it)).state == "ok"


def systemd_says(folder: Path, monkeypatch: pytest.MonkeyPatch, **properties: str) -> Path:
    """A systemd that runs and tells these properties of the service; returns the socket that it listens on."""
    told = "".join(f"{name}={value}\n" for name, value in properties.items())
    answer = f"#!/bin/sh\n[ $1 = is-enabled ] && echo enabled || cat <<'END'\n{told}END\n"
    system(folder, bin__systemctl=answer)
    (folder / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    (folder / "run" / "systemd" / "system").mkdir(parents=True)
    system(folder, **{"etc__systemd__system__edged.socket": f"[Socket]\nListenStream={folder / 's'}\n"})
    return folder / "s"


@needs_systemd
@pytest.mark.parametrize(
    ("substate", "status", "state", "running"),
    [
        ("start", "loading demo for 12 s", "warn", True),
        ("start", "start refused, tried again in 40 s: no such model", "fail", False),
        ("auto-restart", "", "fail", False),
    ],
)
def test_a_service_that_does_not_come_up_is_told_in_systemds_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, substate: str, status: str, state: str, running: bool
) -> None:
    path = systemd_says(tmp_path, monkeypatch, ActiveState="activating", SubState=substate, StatusText=status)
    system(tmp_path, **{"etc__systemd__system__edged.service": UNIT.format("WatchdogSec=30")})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        it = examination(tmp_path, root=tmp_path, sockets=(path,))
        finding, runs, _ = service.daemon(it)
    assert runs is running
    for found in (finding, only(service.units(it))):
        assert found.state == state
        assert f"edged.service is activating ({substate}): {status}" in found.seen
        assert "journalctl -u edged" in found.way_out


@pytest.mark.parametrize(("state", "asked"), [("inactive", False), ("active", True)])
def test_a_daemon_that_systemds_socket_would_start_is_left_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, asked: bool
) -> None:
    path = systemd_says(tmp_path, monkeypatch, ActiveState=state)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        finding, running, _ = service.daemon(examination(tmp_path, root=tmp_path, sockets=(path,), within_s=0.3))
        if asked:
            listener.accept()[0].close()
        else:
            assert (finding.state, running) == ("ok", False)
            assert f"the first request on {path} starts it" in finding.seen
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_on_a_jetson_binaries_for_another_gpu_of_its_kind_do_not_do(tmp_path: Path) -> None:
    it = examination(tmp_path, torch={**GPU, "capability": [8, 7], "architectures": ["sm_80", "sm_90"]}, root=tmp_path)
    assert only(box.torch_build(it)).state == "ok"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "nv_tegra_release").write_text("# R36 (release), REVISION: 4.0\n")
    assert only(box.torch_build(it)).state == "warn"
    assert "https://pypi.jetson-ai-lab.io" in only(box.torch_build(it)).way_out


# -- what is tried -----------------------------------------------------------------------------------------------------

_STUB_TORCH = """
import types
__version__, float32, bfloat16, device = "2.8.0", "fp32", "bf16", str
version = types.SimpleNamespace(cuda="12.6")
gpu = types.SimpleNamespace(name="Orin", major=8, minor=7, is_integrated=True, total_memory=32 << 30)
cuda = types.SimpleNamespace(
    is_available=lambda: True, get_device_properties=lambda device: gpu, get_arch_list=lambda: ["sm_87"]
)

class ones:
    def __init__(self, *sizes, dtype=None, device=None):
        self.dtype = dtype

    def __matmul__(self, other):
        if PROBLEM and self.dtype == "bf16":
            raise RuntimeError(PROBLEM)
        return self

    def __getitem__(self, place):
        return 64.0

    def sum(self):
        return 128.0
"""
_STUB_TRITON = """
class Kernel:
    def __getitem__(self, grid):
        def launch(*arguments):
            if PROBLEM:
                raise RuntimeError(PROBLEM)
        return launch

jit = lambda function: Kernel()
"""


@pytest.mark.parametrize("problem", ["", "it does not work"])
@pytest.mark.parametrize("broken", ["torch", "triton"])
def test_a_product_and_a_kernel_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, problem: str
) -> None:
    for name, stub in (("torch", _STUB_TORCH), ("triton", _STUB_TRITON)):
        (tmp_path / name).mkdir()
        text = f"PROBLEM = {problem if name == broken else ''!r}\n{stub}"
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "triton" / "language.py").write_text("constexpr = int\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    it = examination(tmp_path, checks=CheckProcess(load_settings(environ={}), None, tries=True), within_s=60.0)
    found = {"torch": only(box.torch_build(it)), "triton": only(box.triton(it))}
    assert {name: each.state for name, each in found.items()} == {
        **{"torch": "ok", "triton": "ok"},
        **({broken: "fail"} if problem else {}),
    }
    assert not problem or f"fails (RuntimeError: {problem})" in found[broken].seen
    ways_out = {"torch": "https://pypi.jetson-ai-lab.io", "triton": 'model.kernels = "torch"'}
    assert not problem or ways_out[broken] in found[broken].way_out
    # In a folder without programs there is no compiler.
    monkeypatch.setenv("PATH", str(tmp_path))
    if broken == "triton" and problem:
        assert only(box.triton(it)).way_out.startswith("`sudo apt install gcc")


@pytest.mark.slow
def test_a_model_is_quantized_where_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(environ={}, overrides={"model.quantize": "nf4"})

    def found() -> Finding:
        checks = CheckProcess(settings, None, tries=True)
        return only(box.quantized(examination(tmp_path, settings=settings, checks=checks, within_s=120.0)))

    assert found().state == "ok"
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise ImportError('libcudart.so is not there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert found().state == "fail"
    assert "pip install 'edged[quantized]'" in found().way_out


def test_triton_compiles_the_kernel_that_is_tried() -> None:
    code = "from edged.tensors.triton_trial import try_triton; try_triton('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
