"""A second opinion on what was learned: TRL on the stored pairs, compared, and served only when asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from edged.align.adapters.adapter import AdapterFiles, Snapshot
from edged.align.adapters.form import peft_name
from edged.align.adapters.peft_import import form_of
from edged.engine.model.loading import ModelRefused
from edged.lab.rebuild.rebuild import Rebuild
from edged.lab.rebuild.scores import greedy_agreement, score
from edged.lab.rebuild.training import RebuildError, Recipe, check_loss
from edged.settings.load import AlignSettings, load_settings
from tests.api.live import running
from tests.api.test_adapters import teach
from tests.api.test_quarantine import until
from tests.cli.conftest import edged
from tests.models import save_tiny

SETTINGS = {
    **{"store__save_every_s": 0.1, "cache__memory_mb": 64, "guard__held_out_share": 0.25, "align__rank": 4},
    # Random weights have no language to lose, and a rebuilt adapter is to be served as it is.
    **{"guard__max_kl_nats": 1e9, "guard__max_nll_change": 1e9},
}
OVERRIDES = {"model.device": "cpu", "align.rank": 4}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """(model, data folder, version) of a daemon that learned from ada and was stopped."""
    root = tmp_path_factory.mktemp("rebuild")
    model = save_tiny(root / "tiny")
    with running(root / "run", model, **SETTINGS) as daemon:
        with daemon.http() as http:
            version = teach(http, "ada", pairs=16)["version"]
            # The last version is tested once nothing is left to learn.
            until(lambda: http.get("/v1/adapters/ada").json()["held_out_version"] == version)
        assert daemon.stop() == 0
    return model, daemon.data, version


@pytest.fixture(scope="module")
def rebuilt(stopped: tuple[Path, Path, int]) -> tuple[Rebuild, Any, list[int]]:
    model, data, _ = stopped
    steps: list[int] = []
    work = Rebuild(load_settings(environ={}, overrides=OVERRIDES), model, "tiny", data, "ada")
    return work, work.train(Recipe(epochs=2, learning_rate=2e-3), lambda step, of, loss: steps.append(step)), steps


@pytest.mark.slow
def test_both_adapters_are_measured_on_pairs_that_neither_and_that_both_were_trained_on(
    rebuilt: tuple[Rebuild, Any, list[int]], stopped: tuple[Path, Path, int]
) -> None:
    work, found, steps = rebuilt
    assert found.online_version == stopped[2]
    assert len(work.held_out) + len(work.learned) == 16
    assert found.online["held_out"].pairs == len(work.held_out) > 0
    assert found.rebuilt["learned"].pairs == len(work.learned)
    assert steps == list(range(1, found.steps + 1))
    assert found.steps == 2 * -(-len(work.learned) // 4)
    assert found.rebuilt["learned"].reward_accuracy > 0.9
    assert found.rebuilt["learned"].reward_margin > 0
    assert found.rebuilt["learned"].kl_nats > 0
    assert 0 <= found.agreement <= 1
    json.dumps(asdict(found))


def test_the_online_adapters_scores_are_those_that_the_daemon_recorded(
    rebuilt: tuple[Rebuild, Any, list[int]], stopped: tuple[Path, Path, int]
) -> None:
    import sqlite3

    _, found, _ = rebuilt
    with sqlite3.connect(stopped[1] / "edged.db") as connection:
        row = connection.execute(
            """SELECT count(*), avg(win), avg(logp_difference), avg(reward_correct), avg(reward_margin), avg(kl_nats)
               FROM alignment_metrics WHERE split = 'held_out' AND version = ?""",
            [stopped[2]],
        ).fetchone()
    held_out = found.online["held_out"]
    assert row[0] == held_out.pairs
    ours = [held_out.win_rate, held_out.clpd, held_out.reward_accuracy, held_out.reward_margin]
    assert ours == pytest.approx(row[1:5], rel=1e-3, abs=1e-4)
    # Theirs is a mean over pairs of means over tokens.
    assert held_out.kl_nats == pytest.approx(row[5], rel=0.2)


def test_an_adapter_agrees_with_itself_and_the_base_has_no_margin(rebuilt: tuple[Rebuild, Any, list[int]]) -> None:
    work, *_ = rebuilt
    prompts = [pair.prompt for pair in work.learned[:2]]
    assert greedy_agreement(work._model, "online", "online", prompts, 8) == 1.0
    assert greedy_agreement(work._model, "online", "default", [], 8) is None
    assert score(work._model, "online", [], 0.1) is None
    for parameter in work._model.parameters():
        assert parameter.device == torch.device("cpu")


def test_what_is_adopted_is_what_the_daemon_serves_next(
    rebuilt: tuple[Rebuild, Any, list[int]], stopped: tuple[Path, Path, int], tmp_path: Path
) -> None:
    work, *_ = rebuilt
    model, data, version = stopped
    work.save(tmp_path / "peft")
    number = work.publish(tmp_path / "peft")
    assert number == version + 1
    files = AdapterFiles(data / "adapters" / work.spec.fingerprint, work.spec, 5)
    assert files.newest("ada") == (number, [])
    prompt = work.learned[0].prompt
    ids = torch.tensor([list(prompt)])
    work._model.set_adapter("default")
    wanted = work._model.generate(input_ids=ids, do_sample=False, max_new_tokens=8)[0, len(prompt) :].tolist()
    with running(data.parent, model, **SETTINGS) as daemon, daemon.http() as http:
        adapter = http.get("/v1/adapters/ada").json()
        assert adapter["version"] == number
        assert adapter["versions"][0]["reason"] == "rebuilt"
        body = {"prompt": list(prompt), "user": "ada", "temperature": 0, "max_tokens": 8, "logprobs": 0}
        answer = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert answer == work._tokenizer.decode(wanted, skip_special_tokens=True)
        assert daemon.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_adopts_belongs_to_who_owns_the_folder(stopped: tuple[Path, Path, int], tmp_path: Path) -> None:
    model, before, version = stopped
    data = tmp_path / "data"
    shutil.copytree(before, data)
    for path in (data, *data.rglob("*")):
        os.chown(path, 4321, 4322)
    work = Rebuild(load_settings(environ={}, overrides=OVERRIDES), model, "tiny", data, "ada")
    number = work.publish(data / "adapters" / work.spec.fingerprint / "ada" / f"v{version:06d}")
    assert (data / "adapters" / work.spec.fingerprint / "ada" / f"v{number:06d}").is_dir()
    owners = {path: (path.stat().st_uid, path.stat().st_gid) for path in (data, *data.rglob("*"))}
    assert {path: owner for path, owner in owners.items() if owner != (4321, 4322)} == {}


def test_a_daemon_that_runs_keeps_its_folder(stopped: tuple[Path, Path, int], rebuilt: Any, tmp_path: Path) -> None:
    work, *_ = rebuilt
    work.save(tmp_path / "peft")
    with (
        running(stopped[1].parent, stopped[0], **SETTINGS),
        pytest.raises(RebuildError, match="in use by another edged"),
    ):
        work.publish(tmp_path / "peft")


@pytest.mark.parametrize(
    ("user", "change", "error", "message"),
    [
        ("nobody", {}, RebuildError, 'no pair of "nobody" was learned yet'),
        ("ada", {"align.rank": 8}, RebuildError, "another align.rank"),
        ("ada", {"align.target_modules": "nothing"}, ModelRefused, "matches no linear"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(
    stopped: tuple[Path, Path, int], user: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = load_settings(environ={}, overrides=OVERRIDES | change)
    with pytest.raises(error, match=message):
        Rebuild(settings, stopped[0], "tiny", stopped[1], user)


def test_another_base_model_is_refused(stopped: tuple[Path, Path, int], tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=5)
    with pytest.raises(RebuildError, match="speaks of the base model"):
        Rebuild(load_settings(environ={}, overrides=OVERRIDES), other, "other", stopped[1], "ada")


@pytest.mark.slow
def test_the_command_compares_and_changes_nothing_unless_told(stopped: tuple[Path, Path, int], tmp_path: Path) -> None:
    model, data, _ = stopped
    common = ("align", "rebuild", "ada", "--model", str(model), "--data-dir", str(data))
    place = {"EDGED_SOCKET": str(tmp_path / "none.sock"), "EDGED_ALIGN__RANK": "4"}
    before = sorted(path.name for path in (data / "adapters").rglob("v*"))
    shown = edged(*common, "-o", str(tmp_path / "peft"), **place)
    assert shown.returncode == 0, shown.stderr
    assert "reward accuracy" in shown.stdout
    assert "--adopt takes the rebuilt one" in shown.stdout
    assert re.search(
        r"held-out pairs.*: \d+ pairs, right are \d+ to \d+ % online and \d+ to \d+ % rebuilt", shown.stdout
    )
    assert [line for line in shown.stderr.splitlines() if not line.startswith("step ")] == []
    assert (tmp_path / "peft" / "adapter_model.safetensors").exists()
    assert sorted(path.name for path in (data / "adapters").rglob("v*")) == before
    adopted = edged(*common, "--adopt", "--json", **place)
    assert adopted.returncode == 0, adopted.stderr
    assert f"v{json.loads(adopted.stdout)['adopted_version']:06d}" not in before


@pytest.mark.slow
def test_the_command_takes_model_and_folder_of_the_daemon_that_runs_unless_told_others(
    stopped: tuple[Path, Path, int], tmp_path: Path
) -> None:
    with running(stopped[1].parent, stopped[0], **SETTINGS) as daemon:
        place = {"EDGED_SOCKET": str(daemon.socket), "XDG_DATA_HOME": str(tmp_path)}
        found = edged("align", "rebuild", "nobody", **place)
        assert 'no pair of "nobody" was learned yet' in found.stderr
        told = edged("align", "rebuild", "nobody", "--data-dir", str(tmp_path), **place)
        assert f'data folder "{tmp_path}" has no edged.db' in told.stderr


def test_without_trl_the_way_out_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['trl'] = None; from edged.cli.main import main; main()"
    command = [sys.executable, "-c", code, "align", "rebuild", "ada", "--data-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert f"`{sys.executable} -P -m pip install trl`" in result.stderr
    assert "tools/install --with rebuild" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"loss": "orpo"}, 'align.loss = "orpo" is none of TRL\'s DPOTrainer: set it to "sigmoid" or "ipo"'),
        ({"label_smoothing": 0.1}, "align.label_smoothing = 0.1: TRL's DPO smooths no labels: set it to 0"),
    ],
    ids=["loss", "smoothing"],
)
def test_losses_that_trl_would_compute_otherwise_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RebuildError, match=problem):
        check_loss(AlignSettings(**settings))


@pytest.mark.parametrize("kind", ["IA3", "DoRA"])
def test_an_adapter_of_another_form_is_not_rebuilt_as_a_lora(
    kind: str, stopped: tuple[Path, Path, int], tmp_path: Path
) -> None:
    model, before, version = stopped
    shutil.copytree(before, data := tmp_path / "data")
    settings = load_settings(environ={}, overrides=OVERRIDES)
    work = Rebuild(settings, model, "tiny", data, "ada")
    linear, (fan_in, fan_out) = next(iter(work.spec.shapes.items()))
    weights: dict[str, torch.Tensor] = {peft_name(linear): torch.ones(fan_out, 1)}
    config: dict[str, Any] = {"peft_type": "IA3"}
    if kind == "DoRA":
        shapes = {"A": (1, fan_in), "magnitude": (fan_out,), "B": (fan_out, 1)}
        weights = {peft_name(linear, part): torch.ones(shape) for part, shape in shapes.items()}
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": True}
    form = form_of(config, {name: tuple(value.shape) for name, value in weights.items()}, work.spec)
    files = AdapterFiles(data / "adapters" / work.spec.fingerprint, work.spec, 5)
    files.save(Snapshot("ada", version + 1, weights, {}, form))
    with pytest.raises(
        RebuildError, match=f'"ada" is of the form {kind}, and only a LoRA can be rebuilt: go back to a'
    ):
        Rebuild(settings, model, "tiny", data, "ada")
