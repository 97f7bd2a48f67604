"""What drafts bring a single answer: edged with `serving.prompt_lookup` on and off, in turns, on texts of some kinds.

    python -m benchmarks.engine.drafts --model FOLDER [--tokens 160] [--rounds 5] [--peer] [--gguf FILE]
                                       [--output FILE] [--json]

Each text is answered greedily, and drawn at temperature 0.8 by a fixed seed; the answers of both sides must be equal.
"Iterations" are those of the side with drafts for an answer's tokens. With `--peer`, greedy answers of transformers
with `prompt_lookup_num_tokens` = 10 and without stand beside them; with `--gguf`, the same model's file, those of
llama.cpp with its Python binding's lookup of as many tokens and without (the extra [peers]). The model should follow
instructions (`tools/smollm2`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.support.command import finish, flag, markdown, model_folder, option, parse, say
from benchmarks.support.interleave import paired_ratio
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import report_header

STORY = (
    "The harbour of Lisbon was busy that morning. Three ships from Oslo had arrived with salmon, timber and wool, and "
    "the captains argued about the fees. Maria, who kept the books, wrote every crate into her ledger. By noon the "
    "market on the square was full: fishmongers shouted, children ran between the stalls, and an old man played the "
    "accordion. Nobody noticed that the clock of the tower had stopped at ten past nine. When the mayor came, he asked "
    "for the keys, but the keeper had gone to the mountains."
)
TEXTS = {
    "edit": f"Rewrite this text with every 'Maria' replaced by 'Anna' and change nothing else.\n\n{STORY}",
    "document": f"{STORY}\n\nQuote the sentences of this text that are about the market, word by word.",
    "code": "Write a Python class Point with x and y and the methods add, sub, mul, div, neg and eq.",
    "chat": "What should I see in Lisbon in three days? Tell me about food, too.",
    "explanation": "Explain to a child why the sky is blue.",
}
TEMPERATURES = (0.0, 0.8)
_SEED, _PEER_DRAFT = 5, 10


class Ours:
    """An engine of edged."""

    def __init__(self, model: Path, drafts: bool) -> None:
        settings: dict[str, dict[str, Any]] = {
            "model": {"device": "cpu", "dtype": "float32"},
            "serving": {"prompt_lookup": drafts},
        }
        self.local, self.number = LocalEngine(model, settings), 0

    def answer(self, prompt: Sequence[int], tokens: int, temperature: float) -> tuple[float, list[int], int]:
        """Return the seconds that an answer takes, its tokens, and the number of iterations."""
        self.number += 1
        name, totals = f"answer-{self.number}", self.local.engine.stats.totals
        before, started = totals.iterations, time.perf_counter()
        self.local.ask(name, prompt, tokens, temperature=temperature, seed=_SEED)
        self.local.wait()
        seconds = time.perf_counter() - started
        found = [event.token_id for event in self.local.recorder.tokens.pop(name)]
        return seconds, found, totals.iterations - before


def peer_s(model: Any, prompt: Sequence[int], tokens: int, drafts: bool) -> float:
    """Return the seconds that transformers takes for a greedy answer."""
    fields: dict[str, Any] = {"prompt_lookup_num_tokens": _PEER_DRAFT} if drafts else {}
    started = time.perf_counter()
    ids = torch.tensor([list(prompt)])
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **fields)
    return time.perf_counter() - started


def llama(file: Path, drafts: bool, most: int) -> Any:
    """Return llama.cpp's model through its Python binding, for `most` tokens, with its lookup decoding or without."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = torch.get_num_threads()
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=_PEER_DRAFT) if drafts else None
    counts = {"n_ctx": most, "n_batch": most, "n_threads": threads, "n_threads_batch": threads}
    return llama_cpp.Llama(str(file), **counts, draft_model=lookup, verbose=False)


def llama_s(model: Any, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
    """Return the seconds that llama.cpp takes for a greedy answer, and its tokens."""
    model.reset()
    started = time.perf_counter()
    found = list(islice(model.generate(list(prompt), temp=0.0), tokens))
    return time.perf_counter() - started, found


def measure(options: Any) -> list[dict[str, Any]]:
    """Return the figures of each text and temperature."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    on, off = Ours(options.model, True), Ours(options.model, False)
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32) if options.peer else None
    others = [llama(options.gguf, drafts, 1024) for drafts in (True, False)] if options.gguf else []
    rows = []
    for name, text in TEXTS.items():
        said = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        for temperature in TEMPERATURES:
            seconds: dict[str, list[float]] = {
                f"{side}{kind}": [] for side in ("", "peer_", "llama_") for kind in ("on", "off")
            }
            equal, same, iterations = True, None, 0
            for number in range(options.rounds + 1):
                ours, plain = (side.answer(prompt, options.tokens, temperature) for side in (on, off))
                equal, iterations = equal and ours[1] == plain[1], ours[2]
                if number:
                    seconds["on"].append(ours[0])
                    seconds["off"].append(plain[0])
                if number and peer is not None and not temperature:
                    seconds["peer_on"].append(peer_s(peer, prompt, options.tokens, True))
                    seconds["peer_off"].append(peer_s(peer, prompt, options.tokens, False))
                if number and others and not temperature:
                    drafted, alone = (llama_s(other, prompt, options.tokens) for other in others)
                    seconds["llama_on"].append(drafted[0])
                    seconds["llama_off"].append(alone[0])
                    same = drafted[1] == alone[1]
            rows.append(
                {
                    **{"text": name, "temperature": temperature, "equal": equal, "iterations": iterations},
                    **{"llama_equal": same, "seconds": seconds},
                }
            )
            say(f"{name}, {temperature:g}: {paired_ratio(seconds['off'], seconds['on']).text()}")
    on.local.close()
    off.local.close()
    return rows


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table."""
    heads = ["text", "temperature", "times as fast", "iterations", "equal"]
    heads += ["transformers: times as fast", "llama.cpp: times as fast", "equal"]
    lines = []
    for row in report["rows"]:
        seconds = row["seconds"]
        peer, other = (
            paired_ratio(seconds[f"{side}_off"], seconds[f"{side}_on"]).text() if seconds[f"{side}_on"] else ""
            for side in ("peer", "llama")
        )
        equal, same = ({True: "yes", False: "no", None: ""}[row[key]] for key in ("equal", "llama_equal"))
        ratio = paired_ratio(seconds["off"], seconds["on"]).text()
        head = [row["text"], f"{row['temperature']:g}", ratio]
        lines.append([*head, str(row["iterations"]), equal, peer, other, same])
    return "\n".join(markdown(heads, lines))


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--model", "a model's directory", type=model_folder, required=True),
        option("--tokens", "of each answer", 160, 24),
        option("--rounds", "measured rounds", 5, 1),
        flag("--peer", "measure transformers, too"),
        option("--gguf", "the model's GGUF file, for llama.cpp", type=Path),
        quick="short answers, one round",
    )
    report = {**report_header("cpu"), "model": options.model.name, "tokens": options.tokens, "rows": measure(options)}
    finish(options, report, table(report))


if __name__ == "__main__":
    main()
