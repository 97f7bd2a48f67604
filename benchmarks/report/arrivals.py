"""`python -m benchmarks.report.arrivals`: replays whose pairs are scored by the version that was served when they came.

Its `replay` and `compare` are those of `edged bench`. The engine scores a pair only when it is trained on, which hides
how stale the answers of a policy are that trains late. Here transformers and PEFT score it after the replay, with the
weights that were served when it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.report.scored import ScoredWorkload
from edged.align.feedback.pair import TokenPair
from edged.cli.main import CONTEXT, FailingGroup
from edged.client.client import DaemonError
from edged.engine.engine import Engine
from edged.lab.bench.load_run import ADAPTER, Progress
from edged.lab.bench.replay import ReplayPlan, replay
from edged.lab.cli.bench import compare as compare_command
from edged.lab.cli.bench import replay as replay_command
from edged.lab.rebuild.scores import answer_logps

_MEANS = {"win_rate": "win", "clpd_nats": "clpd_nats"}
Weights = tuple[int, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    pair: TokenPair
    weights: Future[Weights]


class Arrivals:
    """The pairs of a replay with the version served at each arrival. Each such version is copied to the host once."""

    def __init__(self) -> None:
        self._arrivals: list[_Arrival] = []
        self._version = -1

    def meet(self, engine: Engine, pair: TokenPair, at_s: float) -> None:
        """Record a pair that comes `at_s` after the start of the load; call it before the engine gets the pair."""
        self._spec = engine.adapter_files.spec
        version = engine.adapters().get(ADAPTER, 0)
        if version != self._version:
            self._version = version
            weights = engine.weights(ADAPTER)
        else:
            weights = self._arrivals[-1].weights
        self._arrivals.append(_Arrival(at_s, pair, weights))

    def judge(self, model_dir: Path, device: str) -> dict[str, Any]:
        """Return means over the pairs, and their series. Loads the model again: stop the engine before.

        Log-probabilities of answers are sums in nats, of the unquantized model in float32.
        """
        series = list(self._series(model_dir, device)) if self._arrivals else []
        means = {name: float(np.mean([row[key] for row in series])) for name, key in _MEANS.items()} if series else {}
        return {"pairs": len(series), **means, "series": series}

    def _series(self, model_dir: Path, device: str) -> Iterator[dict[str, Any]]:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False, dtype=torch.float32).to(device)
        targets = list(self._spec.peft_targets)
        config = LoraConfig(r=self._spec.rank, lora_alpha=self._spec.alpha, target_modules=targets)
        model = get_peft_model(base, config).eval()
        loaded = 0
        for arrival in self._arrivals:
            version, tensors = arrival.weights.result()
            if tensors and version != loaded:
                set_peft_model_state_dict(model, tensors)
                loaded = version
            # Version 0 is a fresh LoRA of PEFT's, which changes nothing.
            pair = arrival.pair
            with torch.no_grad():
                chosen, rejected = (
                    float(answer_logp(model, "default", pair.prompt, answer)) for answer in (pair.chosen, pair.rejected)
                )
            clpd = chosen - rejected
            yield {
                "at_s": round(arrival.at_s, 3),
                "pair_id": pair.pair_id,
                "version": version,
                "win": clpd > 0.0,
                "clpd_nats": clpd,
            }


def replay_and_score(plan: ReplayPlan, progress: Progress = lambda _line: None) -> dict[str, Any]:
    """Return a replay's report, with the scores under "arrivals". Raises what a replay raises."""
    arrivals = Arrivals()
    report = replay(plan, progress, arrivals.meet)
    return {**report, "arrivals": arrivals.judge(plan.model_dir, report["model"]["device"])}


@click.group(cls=FailingGroup, context_settings=CONTEXT)
def arrivals() -> None:
    """Judge each pair by the version that was served when it came, in a replay or in many."""


def _replay(**options: Any) -> None:
    assert replay_command.callback is not None
    replay_command.callback(**options, run=replay_and_score)


def _compare(**options: Any) -> None:
    if options["device"]:
        raise DaemonError("arrivals are scored with real pairs: not with --device")
    assert compare_command.callback is not None
    compare_command.callback(**options, kind=ScoredWorkload)


for _command, _callback in ((replay_command, _replay), (compare_command, _compare)):
    arrivals.add_command(click.Command(_command.name, callback=_callback, params=_command.params, help=_command.help))


def answer_logp(model: Any, adapter: str | None, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return log p(answer | prompt) in nats of a PEFT model under an adapter; BASE: the base model."""
    targets = torch.tensor(answer, device=model.device)[:, None]
    return answer_logps(model, adapter, prompt, answer).gather(1, targets).sum()


if __name__ == "__main__":
    arrivals(prog_name="python -m benchmarks.report.arrivals")
