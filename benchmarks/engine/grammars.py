"""What grammars cost the answers beside them: 64 at once, of which 16 follow a JSON schema or none does, in turns.

    python -m benchmarks.engine.grammars [--size 135m | --model FOLDER] [--rounds 9] [--output FILE] [--json]

An engine in process on one core, with a Llama of random weights or a model of one's own, at temperature 1 by fixed
seeds and without drafts. A round's throughput is all tokens over the CPU time of the engine's thread from the first
decode to the last, which other programs do not lengthen. Both sides make as many tokens: the schema is of a list too
long to end.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.support.command import SIZE, finish, markdown, model_folder, option, parse, say
from benchmarks.support.interleave import paired_ratio
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import report_header
from benchmarks.support.random_llama import SHAPES, write_random_llama
from edged.engine.engine import Engine
from edged.engine.model_runner import RunnerOutput
from edged.tensors.cpu_threads import apart
from edged.text.grammar import Constraint, Grammar, GrammarCompiler
from edged.text.tokenizer import Tokenizer

ANSWERS, FOLLOWING = 64, 16
PROMPT_TOKENS = 33
"""Two pages and a token: once they are cached prefixes, all answers begin together."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "mood": {"enum": ["good", "bad", "mixed"]},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "mood", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


async def compiled(model: Path) -> Grammar:
    """Return the schema's grammar over the tokens of a model."""
    constraint = Constraint("json", json.dumps(SCHEMA), "schema", strict=True)
    return await GrammarCompiler(Tokenizer.load(model)).compile(constraint)


class TimedEngine(LocalEngine):
    """An engine that records when its thread begins an iteration, in the thread's CPU time."""

    def __init__(self, model: Path) -> None:
        self.began_s: list[float] = []
        settings: dict[str, dict[str, Any]] = {
            "model": {"device": "cpu", "dtype": "float32", "threads": 1},
            "serving": {"prompt_lookup": False, "max_sequences": ANSWERS},
        }
        super().__init__(model, settings, watch=self._watch)
        self.answer_ms(1, None)

    def _watch(self, parts: Engine) -> None:
        run = parts.runner.run

        def timed(*arguments: Any, **named: Any) -> RunnerOutput:
            self.began_s.append(time.thread_time())
            work = run(*arguments, **named)
            self.began_s.append(time.thread_time())
            return work

        setattr(parts.runner, "run", timed)  # noqa: B010

    def answer_ms(self, tokens: int, grammar: Grammar | None) -> float:
        """Return the time of a token of each answer; some answers follow the grammar, if one is given."""
        self.began_s, random = [], np.random.default_rng(0)
        for number in range(ANSWERS):
            prompt = random.integers(3, self.vocab, PROMPT_TOKENS).tolist()
            followed = grammar if number % (ANSWERS // FOLLOWING) == 0 else None
            options: dict[str, Any] = {"temperature": 1.0, "seed": number, "grammar": followed}
            self.ask(f"{time.monotonic_ns()}", prompt, tokens, **options)
        self.wait()
        return 1e3 * (self.began_s[-1] - self.began_s[0]) / tokens


def measure(model: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return each side's time of a token of all answers by round, in milliseconds; the first round is not counted."""
    grammar = asyncio.run(compiled(model))
    engine = TimedEngine(model)
    sides: dict[str, list[float]] = {"with grammars": [], "without": []}
    try:
        for number in range(rounds + 1):
            for name in [*sides][:: 1 if number % 2 else -1]:
                took_ms = engine.answer_ms(tokens, grammar if name == "with grammars" else None)
                if number:
                    sides[name].append(took_ms)
            if number:
                say(", ".join(f"{name} {times[-1]:.2f} ms" for name, times in sides.items()))
    finally:
        engine.close()
    return sides


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        SIZE,
        option("--model", "a model's directory, in place of random weights", type=model_folder),
        option("--tokens", "of each answer", 64, 16),
        option("--rounds", "measured rounds", 9, 1),
        quick="short answers, one round",
    )
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = options.model or apart(lambda: write_random_llama(Path(folder), SHAPES[options.size]))
        sides = measure(model, options.tokens, options.rounds)
    ratio = paired_ratio(sides["without"], sides["with grammars"])
    name = options.model.name if options.model else options.size
    report = {**report_header("cpu"), "model": name, "token_ms": sides, "throughput_ratio": ratio.as_json()}
    rows = [[name, f"{median(sides['without']):.2f} ms", f"{median(sides['with grammars']):.2f} ms", ratio.text(3)]]
    heads = ["model", "a token of all without", "with 16 of 64", "throughput with over without"]
    finish(options, report, "\n".join(markdown(heads, rows)))


if __name__ == "__main__":
    main()
