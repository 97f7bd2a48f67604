"""Adapter versions on disk are whole or not there, and never mixed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edged.align.adapters.adapter import MAX_GRAD_NORM, AdapterError, AdapterFiles, AdapterState, Snapshot
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.adapters.form import AdapterForm, LoraSpec
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.0.mlp.up_proj": (8, 10)}
CPU = torch.device("cpu")


def spec(fingerprint: str = "base-a", rank: int = 4) -> LoraSpec:
    return LoraSpec(SHAPES, rank, 8.0, "tiny", fingerprint, ("q_proj", "up_proj"))


def live(**align: object) -> Live[Settings]:
    return Live(Settings(align=AlignSettings(**align)))  # type: ignore[arg-type]


def state(name: str = "ann", **align: object) -> AdapterState:
    return AdapterState(name, spec().form, live(rank=4, alpha=8.0, **align), CPU)


def stepped(times: int = 1) -> AdapterState:
    made = state()
    for seed in range(times):
        generator = torch.Generator().manual_seed(seed)
        gradients = {
            name: (torch.randn(a.shape, generator=generator), torch.randn(b.shape, generator=generator))
            for name, (a, b) in made.weights.items()
        }
        made.step(gradients, 2)
    return made


def snapshot(made: AdapterState) -> Snapshot:
    return made.copied().snapshot()


def files(root: Path, **kwargs: str) -> AdapterFiles:
    return AdapterFiles(root, spec(**kwargs), keep=3)


def test_version_zero_changes_nothing_and_users_start_apart() -> None:
    assert all(float(b.detach().abs().max()) == 0.0 for _, b in state().weights.values())
    first, same, other = (state(name).weights["model.layers.0.mlp.up_proj"][0] for name in ("x", "x", "y"))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("pairs", "rate"), [(1, 0.025), (2, 0.05), (4, 0.1), (5, 0.1)])
def test_a_step_is_torchs_adamw_on_the_clipped_mean_at_a_rate_for_its_pairs(pairs: int, rate: float) -> None:
    made = state(learning_rate=0.1, micro_batch_pairs=4)
    parameters = [p.detach().clone().requires_grad_() for p in made.parameters()]
    oracle = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    gradients = {name: (torch.full_like(a, 3.0), torch.full_like(b, -5.0)) for name, (a, b) in made.weights.items()}
    for parameter, gradient in zip(parameters, (t for pair in gradients.values() for t in pair), strict=True):
        parameter.grad = gradient / pairs
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    oracle.step()
    assert made.step(gradients, pairs) == pytest.approx(float(norm))
    assert made.version == 1
    for got, wanted in zip(made.parameters(), parameters, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    made = state()
    before = made.tensors()
    gradients = {name: (torch.full_like(a, float("nan")), b.detach()) for name, (a, b) in made.weights.items()}
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        made.step(gradients, 1)
    assert made.version == 0
    assert all(torch.equal(before[key], value) for key, value in made.tensors().items())


def test_a_copied_version_is_what_it_was_when_later_steps_are_made() -> None:
    made, twin = stepped(1), stepped(1)
    copied = made.copied()
    gradients = {name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in made.weights.items()}
    made.step(gradients, 2)
    found = copied.snapshot()
    assert (found.adapter, found.version) == ("ann", 1)
    for part in ("weights", "optimizer"):
        was, now = getattr(snapshot(twin), part), getattr(snapshot(made), part)
        assert all(torch.equal(getattr(found, part)[key], value) for key, value in was.items())
        assert not all(torch.equal(value, was[key]) for key, value in now.items())


def test_versions_that_are_due_are_copied_one_by_one_the_longest_waiting_first(tmp_path: Path) -> None:
    adapter_cache = AdapterCache(spec(), live(rank=4, alpha=8.0), CPU, files(tmp_path))
    for name in ("ann", "bob", "cy"):
        made = adapter_cache.get(name)
        made.step({key: (torch.ones_like(a), torch.ones_like(b)) for key, (a, b) in made.weights.items()}, 1)
    taken = [adapter_cache.to_save(now, 5.0) for now in (10.0, 11.0, 12.0, 13.0)]
    assert [copied and copied.adapter for copied in taken] == ["ann", "bob", "cy", None]
    for name in ("cy", "ann"):
        made = adapter_cache.get(name)
        made.step({key: (torch.ones_like(a), torch.ones_like(b)) for key, (a, b) in made.weights.items()}, 1)
    again = [adapter_cache.to_save(now, 5.0) for now in (16.0, 16.0, 17.0)]
    assert [copied and copied.adapter for copied in again] == ["ann", None, "cy"]


def test_what_was_saved_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    made = stepped(2)
    path, removed = files(tmp_path).save(snapshot(made))
    assert (path.name, removed) == ("v000002", ())
    loaded = files(tmp_path).load("ann", 2)
    again = state()
    again.restore(loaded.weights, 2, loaded.optimizer)
    gradients = {name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in made.weights.items()}
    made.step(gradients, 1)
    again.step(gradients, 1)
    for got, wanted in zip(again.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)


def test_old_versions_are_removed(tmp_path: Path) -> None:
    made, saved = state(), files(tmp_path)
    removed = []
    for version in range(1, 6):
        made.version = version
        removed += saved.save(snapshot(made))[1]
    assert saved.versions("ann") == [3, 4, 5]
    assert removed == [1, 2]
    assert saved.adapters() == ["ann"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "missing file"])
def test_a_damaged_version_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    made, saved = stepped(), files(tmp_path)
    saved.save(snapshot(made))
    made.version = 2
    path, _ = saved.save(snapshot(made))
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "truncate":
        weights.write_bytes(data[:-9])
    elif damage == "flip":
        data[-3] ^= 1
        weights.write_bytes(data)
    elif damage == "no manifest":
        (path / "edged.json").unlink()
    else:
        weights.unlink()
    newest, problems = saved.newest("ann")
    assert newest == 1
    assert len(problems) == 1
    assert str(path) in problems[0]
    with pytest.raises(AdapterError):
        saved.load("ann", 2)


def test_a_draft_that_a_power_cut_left_is_not_a_version(tmp_path: Path) -> None:
    saved = files(tmp_path)
    saved.save(snapshot(stepped()))
    (tmp_path / "ann" / ".v000002.draft").mkdir()
    assert saved.versions("ann") == [1]


def test_an_adapter_of_another_base_model_is_not_served(tmp_path: Path) -> None:
    files(tmp_path).save(snapshot(stepped()))
    newest, problems = files(tmp_path, fingerprint="base-b").newest("ann")
    assert newest == 0
    assert "another base model" in problems[0]


def test_another_rank_is_an_error_that_names_the_matrix(tmp_path: Path) -> None:
    made = stepped()
    wider = AdapterState("ann", spec(rank=8).form, live(rank=8), CPU)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A\.weight is of shape \(4, 8\), \(8, 8\) is needed"):
        wider.restore(made.tensors(), 1)


def test_the_config_is_pefts(tmp_path: Path) -> None:
    from peft import LoraConfig

    path, _ = files(tmp_path).save(snapshot(stepped()))
    config = LoraConfig.from_pretrained(path)
    assert (config.r, config.lora_alpha, sorted(config.target_modules or ())) == (4, 8.0, ["q_proj", "up_proj"])
    assert json.loads((path / "edged.json").read_text())["version"] == 1


def test_a_version_stays_what_it_is_while_another_state_goes_on_from_it() -> None:
    kept = snapshot(stepped(2))
    wanted = {key: value.clone() for key, value in kept.optimizer.items()}
    made = state()
    made.restore(kept.weights, kept.version, kept.optimizer)
    made.step({name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in made.weights.items()}, 2)
    assert all(torch.equal(value, wanted[key]) for key, value in kept.optimizer.items())
    lacking = {key: value for key, value in kept.optimizer.items() if key != "1.exp_avg"}
    before = made.tensors()
    with pytest.raises(AdapterError, match=r"1\.exp_avg of its optimizer is missing"):
        made.restore(kept.weights, kept.version, lacking)
    assert all(torch.equal(value, before[key]) for key, value in made.tensors().items())


@pytest.mark.parametrize("times", [0, 2])
def test_an_optimizer_that_fails_leaves_weights_and_moments_as_they_were(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, twin = stepped(times), stepped(times)
    gradients = {name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in made.weights.items()}

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        # At the first step the moments have been made by then.
        patch.setattr(torch, "_fused_adamw_", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.step(gradients, 2)
    assert made.version == times
    for part in ("weights", "optimizer"):
        found, wanted = getattr(snapshot(made), part), getattr(snapshot(twin), part)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert made.step(gradients, 2) == twin.step(gradients, 2)
    assert all(torch.equal(value, twin.tensors()[key]) for key, value in made.tensors().items())


def test_a_resident_adapter_that_multiplies_outputs_is_known_and_one_that_multiplies_inputs_is_none(
    tmp_path: Path,
) -> None:
    adapter_cache = AdapterCache(spec(), live(rank=4, alpha=8.0), CPU, files(tmp_path))
    adapter_cache.get("ann")
    for name, on_inputs in (("bob", True), ("eve", False)):
        assert not adapter_cache.output_factors
        vectors = {linear: (1, size[0]) if on_inputs else (size[1], 1) for linear, size in SHAPES.items()}
        form = AdapterForm(dict.fromkeys(SHAPES, 1.0), vectors, {"peft_type": "IA3"})
        adapter_cache.adopt(AdapterState(name, form, live(), CPU, begin=False))
    assert adapter_cache.output_factors
