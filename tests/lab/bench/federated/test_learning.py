"""What starts are worth: gradients as PEFT's, linear steps as the engine's, Auxo's rewards, and a run that goes on."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from edged.align.adapters.adapter import AdapterState
from edged.align.feedback.pair import TokenPair
from edged.cli.main import cli
from edged.lab.bench.federated.auxo import AuxoRun, Cohort, LearningMember
from edged.lab.bench.federated.kept import Kept
from edged.lab.bench.federated.learning import mean_sent
from edged.lab.bench.federated.linear import TASTES, AnswerModel, LinearMembers, by_taste
from edged.settings.load import AlignSettings
from tests.engine.harness import Client, random_ids, running_engine
from tests.models import byte_tokenizer, save_tiny


def pair(pair_id: int) -> TokenPair:
    """A pair of a short answer and a long one, of their own tokens."""
    chance = random.Random(pair_id)
    short = tuple(chance.choices(range(3, 120), k=chance.randint(3, 5)))
    long = tuple(chance.choices(range(130, 250), k=chance.randint(8, 12)))
    return TokenPair(pair_id, "ann", tuple(random_ids(chance.randint(4, 12), pair_id)), (*short, 2), (*long, 2))


PAIRS = [pair(number) for number in range(1, 25)]


def silent(_: str) -> None:
    """Tell nobody."""


def opened(folder: Path) -> tuple[AnswerModel, AdapterState]:
    """The tiny model, and the weights that its members begin with."""
    with running_engine(folder) as (engine, _):
        first = engine.trainer.adapter_cache.build("first")
    return AnswerModel(folder / "model-llama", first.form, first.tensors()), first


def test_margins_and_gradients_are_peft_s(tmp_path: Path) -> None:
    model, first = opened(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model-llama", dtype=torch.float32)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    peft = get_peft_model(base, config)
    noise = torch.Generator().manual_seed(0)
    flat = torch.randn(model.flat(first.tensors()).shape, generator=noise) * 1e-2
    weights = model.weights(flat)
    assert torch.equal(model.flat(weights), flat)

    def logp(one: TokenPair, answer: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([one.prompt + answer])
        logps = peft(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logps[len(one.prompt) - 1 :].sum()

    def put(values: dict[str, torch.Tensor]) -> list[torch.nn.Parameter]:
        own = dict(peft.named_parameters())
        for name, value in values.items():
            own[name.replace(".weight", ".default.weight")].data.copy_(value)
        return [own[name.replace(".weight", ".default.weight")] for name in values if "lora_B" in name]

    put(weights)
    apart = torch.stack([logp(one, one.chosen) - logp(one, one.rejected) for one in PAIRS[:5]])
    with peft.disable_adapter():
        apart = apart - torch.stack([logp(one, one.chosen) - logp(one, one.rejected) for one in PAIRS[:5]])
    assert model.margins(weights, PAIRS[:5]) == pytest.approx(apart.detach(), abs=1e-4)
    found = model.gradients(PAIRS[:5])
    parameters = put(first.tensors())
    for at, one in enumerate(PAIRS[:5]):
        for side, answer in enumerate((one.chosen, one.rejected)):
            told = torch.autograd.grad(logp(one, answer), parameters)
            assert torch.allclose(found[at, side], torch.cat([each.flatten() for each in told]), atol=1e-4)


def test_linear_steps_go_where_the_engine_s_go(tmp_path: Path) -> None:
    settings = {"align__loss_threshold": 0.0, "guard__held_out_share": 0.0, "align__replay_share": 0.0}
    with running_engine(tmp_path, **settings, align__learning_rate=1e-4) as (engine, client):
        first = engine.trainer.adapter_cache.build("first")
        engine.import_adapter("ann", first.tensors(), "imported").result()
        learned = [by_taste(one, "concise") for one in PAIRS[:8]]
        engine.submit_pairs([replace(one, adapter="ann") for one in learned])
        _settled(client, 8)
        moved = engine.weights("ann").result()[1]
        align = engine.settings.align
    model = AnswerModel(tmp_path / "model-llama", first.form, first.tensors())
    linear = LinearMembers(model, Kept(tmp_path / "kept", {}), align, silent)
    linear.add(learned)
    found, real = linear.learn("concise", [one.pair_id for one in learned]), model.flat(moved)
    assert torch.cosine_similarity(found, real, dim=0) > 0.95
    assert found.norm() == pytest.approx(float(real.norm()), rel=0.1)
    margins = linear.margins(real, "concise", [one.pair_id for one in learned])
    assert torch.corrcoef(torch.stack([margins, model.margins(moved, learned)]))[0, 1] > 0.95


def _settled(client: Client, count: int) -> None:
    from edged.align.feedback.pair import PairRetired

    client.wait(lambda: len({each.pair_id for each in client.of(PairRetired)}) == count)


def members(tmp_path: Path, strength: float) -> tuple[LinearMembers, list[LearningMember], list[LearningMember]]:
    """Members of two tastes, of whose pairs the longer answer's gradient is that of length, so strong, and noise; and
    two new ones."""
    rng = torch.Generator().manual_seed(0)
    linear = LinearMembers(None, Kept(tmp_path, {}), AlignSettings(learning_rate=2e-5), silent)  # type: ignore[arg-type]
    length = torch.randn(200, generator=rng) * strength
    for number in range(1, 401):
        noise = torch.randn(2, 200, generator=rng)
        linear.take(number, torch.stack([noise[0], noise[1] + length]), (5, 9))
    made = [LearningMember(TASTES[at % 2], tuple(range(8 * at + 1, 8 * at + 9))) for at in range(42)]
    return linear, made[:40], made[40:]


def test_auxo_to_the_letter_splits_where_j_falls(tmp_path: Path) -> None:
    linear, known, new = members(tmp_path, 8.0)
    auxo = AuxoRun(linear, known, 200, 0)
    auxo.play()
    assert min(auxo.ratios) < 2**-0.5
    assert len(auxo.cohorts) >= 2
    assert {auxo.cohort_of(each).path for each in new} <= auxo.cohorts.keys()


def test_auxo_to_the_letter_makes_one_cohort_of_weak_tastes(tmp_path: Path) -> None:
    linear, known, new = members(tmp_path, 0.05)
    auxo = AuxoRun(linear, known, 200, 0)
    auxo.play()
    assert list(auxo.cohorts) == [()]
    assert auxo.cohort_of(new[0]) is auxo.cohorts[()]
    # A split whatever J says takes it apart.
    forced = AuxoRun(linear, known, 200, 0, threshold=1.0)
    forced.play()
    assert len(forced.cohorts) > 1


def test_a_reward_is_shared_by_kinship(tmp_path: Path) -> None:
    """As in Figure 3.7: the nearer a cohort is in the tree, the larger its share."""
    auxo = AuxoRun(*members(tmp_path, 1.0)[:2], 200, 0)
    tried = Cohort((0, 1), torch.zeros(1), torch.zeros(1), bound=1.0)
    auxo.cohorts = {path: tried for path in ((0, 0), (0, 1), (1,))}
    rewards: defaultdict[tuple[int, ...], float] = defaultdict(float)
    auxo._reward(rewards, tried, 4.0, {(0, 1)})
    assert rewards == pytest.approx({(0, 1): -0.6, (0, 0): -0.6 / 2, (1,): -0.6 / 3})
    auxo._reward(rewards, tried, 4.0, auxo.cohorts)
    assert rewards[(1,)] == pytest.approx(-0.2), "only cohorts that are not explored have a share"


def test_a_start_of_the_bench_is_the_mean_of_records_clipped_and_noised_as_boxes_do() -> None:
    short, long = torch.zeros(20000), torch.zeros(20000)
    short[0], long[1] = 0.1, 4.0
    exact = mean_sent([short, long], 0.0, 0)
    assert exact[:2] == pytest.approx(torch.tensor([0.05, 0.2]))
    assert not exact[2:].any()
    apart = mean_sent([short, long], 3.0, 0) - exact
    # Each record has z C sqrt(2 / n); nobody leaves it out here, so that the mean has z C sqrt(2) / n.
    assert float(apart.std()) == pytest.approx(3.0 * 0.4 * 2**0.5 / 2, rel=0.02)
    assert torch.equal(mean_sent([short, long], 3.0, 0) - exact, apart)


def test_what_is_kept_is_of_one_plan(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {"seed": 0})
    assert kept.figures("a") is kept.tensor("a") is None
    kept.keep_figures("a", {"1": 0.5})
    kept.keep_tensor("a", torch.ones(2))
    again = Kept(tmp_path, {"seed": 0})
    assert again.figures("a") == {"1": 0.5}
    assert torch.equal(again.tensor("a"), torch.ones(2))  # type: ignore[arg-type]
    assert Kept(tmp_path, {"seed": 1}).figures("a") is None


@pytest.mark.slow
def test_the_command_compares_arms_and_a_second_run_takes_what_the_first_kept(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = []
    for number in range(1500):
        asked = f"\n\nHuman: {number}?\n\nAssistant:"
        lines.append(json.dumps({"chosen": f"{asked} yes", "rejected": f"{asked} no, never {number}"}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    words = ["bench", "federated", "learning", "--model", str(tmp_path / "model"), "--users", "2,3", "--new", "1"]
    words += ["--pairs", str(tmp_path / "pairs.jsonl"), "--own", "1,4", "--keep", str(tmp_path / "kept"), "--json"]
    words += ["--splits", "1", "--noise", "0.1"]
    first = CliRunner().invoke(cli, words)
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert set(report["arms"]) == {"local", "global", "nearest", "start-2", "start-3", "auxo", "auxo-split"}
    assert all(set(shares) == {"1", "4"} for shares in report["arms"].values())
    assert set(report["chosen_right"]["start-3"]) == {"nearest", "taken", "took_one", "scale"}
    assert report["single"]["two"]["seeds"] == 1
    second = CliRunner().invoke(cli, words)
    assert json.loads(second.stdout) == report
    assert "new users" not in second.stderr
