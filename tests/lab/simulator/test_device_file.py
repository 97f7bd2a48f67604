"""Device files are read as they are written, and refused by name and field; times follow from them by a roofline."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest

from edged.engine.model.loading import ModelRefused
from edged.lab.simulator import device_file as files
from edged.lab.simulator.device_file import DeviceError, find_device, find_model_shape, read_device
from edged.lab.simulator.hardware import room_for
from edged.lab.simulator.roofline import LAYER_KERNELS, Device, Pass, roofline_device
from edged.profiler.memory import ModelSizes
from edged.scheduler.task import Unit
from edged.settings.load import Settings

CONFIGS = Path(__file__).parents[3] / "configs"
TOO_LARGE = [CONFIGS / "models" / "llama-3.1-70b.json"]
"""Models that only `edged bench activations` accounts."""
PLAIN = """
name = "box"
power_mode = "all"
kind = "discrete"
memory_gib = 32
available_gib = 30
[bandwidth]
peak_gb_per_s = 500
efficiency = 0.8
[compute]
bfloat16_tflops = 100
float32_tflops = 20
efficiency = 0.5
[overhead]
launch_us = 0
gap_us = 0
iteration_ms = 1
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "box.toml"
    path.write_text(text)
    return path


def on(tmp_path: Path, text: str = PLAIN, **model: object) -> tuple[Device, ModelSizes]:
    settings = Settings.model_validate({"model": model})
    shape = ModelSizes.read(CONFIGS / "models" / "mistral-7b.json", settings, cuda=True)
    return roofline_device(read_device(written(tmp_path, text)), shape, settings), shape


@cache
def in_4_bits(shape: Path) -> tuple[ModelSizes, Settings]:
    settings = Settings.model_validate({"model": {"quantize": "nf4"}})
    return ModelSizes.read(shape, settings, cuda=True), settings


@pytest.mark.parametrize("path", sorted((CONFIGS / "devices").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "shape", sorted(set((CONFIGS / "models").glob("*.json")) - set(TOO_LARGE)), ids=lambda path: path.stem
)
def test_every_device_has_room_for_every_model_in_4_bits(path: Path, shape: Path) -> None:
    model, settings = in_4_bits(shape)
    assert room_for(roofline_device(read_device(path), model, settings), model, settings).pages > 1000


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("peak_gb_per_s = 500\n", "", '"bandwidth.peak_gb_per_s" is missing'),
        ("launch_us = 0", "launch_us = -1", '"overhead.launch_us" = -1'),
        ("efficiency = 0.5", "efficiency = 1.5", '"compute.efficiency" = 1.5'),
        ("launch_us = 0", "launch_us = 0\nlaunch_ms = 1", '"overhead.launch_ms" is not known'),
        ("available_gib = 30", "available_gib = 40", "available_gib = 40.0 is more than memory_gib = 32.0"),
        ("[overhead]", "[noise]\njitter = -0.1\n[overhead]", '"noise.jitter" = -0.1'),
        ("[overhead]", "[overhead", "cannot be read"),
    ],
)
def test_a_bad_device_file_is_refused_with_the_field(tmp_path: Path, before: str, after: str, told: str) -> None:
    with pytest.raises(DeviceError) as refused:
        read_device(written(tmp_path, PLAIN.replace(before, after)))
    assert told in str(refused.value)
    assert "box.toml" in str(refused.value)


def test_an_unknown_name_is_told_the_nearest_one() -> None:
    with pytest.raises(DeviceError, match='no device "rtx6000-ada": did you mean "rtx-6000-ada"'):
        find_device("rtx6000-ada")
    with pytest.raises(DeviceError, match='no model "Mistral7b": did you mean "mistral-7b"'):
        find_model_shape("Mistral7b")


def test_a_folder_named_like_a_device_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rtx-6000-ada", "mistral-7b"):
        Path(name).mkdir()
    assert find_device("rtx-6000-ada").is_file()
    assert find_model_shape("mistral-7b").is_file()
    (Path("mistral-7b") / "config.json").touch()
    assert find_model_shape("mistral-7b") == Path("mistral-7b"), "this one holds a model"


def test_files_of_a_checkout_come_before_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, installed = tmp_path / "configs", tmp_path / "share"
    monkeypatch.setattr(files, "CHECKOUT", checkout)
    monkeypatch.setattr(files, "INSTALLED", installed)
    for folder, names in ((checkout, ("one.toml", "mine.json")), (installed, ("one.toml", "two.toml", "one.json"))):
        (folder / "devices").mkdir(parents=True)
        for name in names:
            (folder / "devices" / name).write_text("")
    assert find_device("one") == checkout / "devices" / "one.toml"
    assert find_device("two") == installed / "devices" / "two.toml"
    assert find_device("mine") == checkout / "devices" / "mine.json", "a profile that lies there has a name, too"
    with pytest.raises(DeviceError, match="known are one, mine, two"):
        find_device("zzz")


def test_the_package_installs_every_device_and_model() -> None:
    root = CONFIGS.parent
    installed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    for kind in ("devices", "models"):
        (pattern,) = installed[f"share/edged/{kind}"]
        assert sorted(root.glob(pattern)) == sorted((CONFIGS / kind).iterdir())


def test_a_context_that_the_pool_cannot_hold_is_refused_as_the_engine_does() -> None:
    settings = Settings.model_validate({"cache": {"memory_mb": 64}, "model": {"max_context_tokens": 8192}})
    model = ModelSizes.read(find_model_shape("mistral-7b"), settings, cuda=True)
    device = roofline_device(read_device(find_device("h200")), model, settings)
    with pytest.raises(ModelRefused, match=r"a context of 8192 tokens .*raise cache\.memory_mb to \d+"):
        room_for(device, model, settings)


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    settings = Settings()
    small = read_device(find_device("agx-orin-32gb-30w")).model_copy(update={"available_gib": 12.0})
    model = ModelSizes.read(find_model_shape("mistral-7b"), settings, cuda=True)
    with pytest.raises(ModelRefused, match=r"needs 1\d\.\d GiB without K/V pages, and .* has 12\.0 GiB"):
        room_for(roofline_device(small, model, settings), model, settings)


@pytest.mark.parametrize(
    ("recompute", "gib", "keeps"),
    [
        ("full", 40.0, False),
        ("auto", 40.0, True),
        ("auto", 26.0, False),
        ("none", 26.0, False),
        ("selective", 26.0, True),
    ],
)
def test_a_step_keeps_what_the_engine_would_keep(recompute: str, gib: float, keeps: bool) -> None:
    cache = {"cache": {"memory_mb": 512}, "model": {"max_context_tokens": 2048}}
    settings = Settings.model_validate({**cache, "align": {"recompute": recompute}})
    file = read_device(find_device("rtx-6000-ada")).model_copy(update={"available_gib": gib})
    model = ModelSizes.read(find_model_shape("mistral-7b"), settings, cuda=True)
    assert room_for(roofline_device(file, model, settings), model, settings).keeps_graph == keeps


def test_a_lone_decode_takes_the_time_to_read_the_weights_and_a_long_prompt_that_of_its_products(
    tmp_path: Path,
) -> None:
    device, model = on(tmp_path)
    head = model.shape.vocab_size * model.shape.hidden_size
    read_s = 2 * (model.linear_weights + head) / (0.8 * 500e9)
    assert device.forward_s(Pass(decodes=1, sampled=1)) == pytest.approx(read_s, rel=1e-3)
    prompt = Pass()
    prompt.add_chunk(1024, 0, finetune=False)
    pair_flops = 4 * 32 * 32 * 128 * 1024 * 1024 / 2
    assert device.forward_s(prompt) == pytest.approx((2 * model.linear_weights * 1024 + pair_flops) / 50e12, rel=1e-3)


def test_contexts_cost_their_bytes_and_quantized_weights_fewer(tmp_path: Path) -> None:
    device, _ = on(tmp_path)
    kv_bytes = 2 * 32 * 8 * 128 * 2
    short, long = (device.forward_s(Pass(decodes=8, context=context, sampled=8)) for context in (0, 80_000))
    assert long - short == pytest.approx(kv_bytes * 80_000 / (0.8 * 500e9), rel=1e-6)
    packed, _ = on(tmp_path, quantize="nf4")
    assert packed.forward_s(Pass(decodes=1)) < 0.3 * device.forward_s(Pass(decodes=1))


def test_launches_count_where_the_cpu_is_slower_than_the_gpu(tmp_path: Path) -> None:
    slow, _ = on(tmp_path, PLAIN.replace("launch_us = 0", "launch_us = 100"))
    launched_s = 32 * LAYER_KERNELS["forward"] * 100e-6
    chunk = Pass(prefill_tokens=8)
    assert slow.forward_s(chunk) == pytest.approx(launched_s)
    # Captured iterations are not launched kernel by kernel.
    assert slow.forward_s(Pass(decodes=8)) < 0.5 * launched_s


def test_computing_a_layer_again_costs_what_its_forward_and_its_backward_cost(tmp_path: Path) -> None:
    device, _ = on(tmp_path)
    forward_s, backward_s = device.unit_s(Unit("graph", 2048)), device.unit_s(Unit("grad", 2048))
    assert device.unit_s(Unit("layer", 2048)) == pytest.approx(forward_s + backward_s)
    assert backward_s > forward_s


def test_two_streams_add_up_the_bytes_and_the_operations_of_both(tmp_path: Path) -> None:
    device, _ = on(tmp_path)
    decode = Pass(decodes=1, context=100, sampled=1)
    small, large = [Unit("layer", 1)] * 8, [Unit("layer", 512)] * 8

    def both_s(forward: Pass, finetune: Pass, units: list[Unit]) -> float:
        parts_s = (device.forward_s(forward), device.forward_s(finetune), *map(device.unit_s, units))
        return device.overlap(forward, finetune, units) * sum(parts_s)

    decode_s, large_s = device.forward_s(decode), sum(map(device.unit_s, large))
    # Reading is all that a decode and units of one row do: none of it is saved.
    assert device.overlap(decode, Pass(), small) == pytest.approx(1.0, rel=0.01)
    # Units of many rows read little while they compute: the decode hides behind them, and they behind a long one.
    assert max(decode_s, large_s) <= both_s(decode, Pass(), large) < 0.8 * (decode_s + large_s)
    tuned = Pass()
    tuned.add_chunk(200, 0, finetune=True)
    assert both_s(decode, tuned, []) > both_s(decode, Pass(), small[:1])
