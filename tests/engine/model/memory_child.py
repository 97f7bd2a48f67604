"""Serves and learns in a process of its own and prints how its private memory grew, beside what was predicted.

`memory_child.py DIR QUANTIZE`: DIR holds a bfloat16 checkpoint, which is loaded in float32 on the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

import torch
from transformers import AutoConfig

from edged.align.feedback.pair import PairRetired
from edged.engine.engine import Engine
from edged.engine.model.memory_model import BaseShape, needs
from edged.engine.model.quantization import form_of_setting
from edged.settings.load import load_settings
from tests.engine.harness import Client, random_ids, random_pairs, request, wait_idle
from tests.engine.model.loading_child import private_bytes, warm_up

USERS = ("ann", "bob", "cleo", "dan")
CONTEXT, WINDOW = 300, 128


def run(engine: Engine, client: Client) -> None:
    """Let every user learn, in steps of a whole window that keep their graph, and be served at once."""
    for number, user in enumerate(USERS):
        pairs = random_pairs(4, user, number, first_id=1 + 4 * number, prompt=40, answer=10)
        engine.submit_pairs(pairs)
    client.wait(lambda: len(client.of(PairRetired)) == 4 * len(USERS), 300)
    wait_idle(engine)
    for turn in range(2):
        for user in USERS:
            engine.submit(request(f"{user}{turn}", random_ids(CONTEXT - 40, turn), 30, adapter=user))
    client.wait(lambda: len(client.finished) == 2 * len(USERS), 300)


def main(folder: str, quantize: str) -> None:
    warm_up()
    overrides = {
        "model.device": "cpu",
        "model.quantize": quantize,
        "model.max_context_tokens": CONTEXT,
        "serving.max_sequences": 16,
        "serving.max_batch_tokens": 512,
        "cache.memory_mb": 64,
        "align.max_loaded_adapters": len(USERS),
        "align.max_active_adapters": len(USERS),
        "align.max_pair_tokens": WINDOW,
        "align.window_tokens": WINDOW,
        "guard.held_out_share": 0.0,
    }
    settings = load_settings(environ={}, overrides=overrides)
    before = peak = private_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    client = Client()
    with tempfile.TemporaryDirectory() as data:
        engine = Engine.build(settings, Path(folder), client.deliver, client.journal, Path(data))
        engine.start()
        run(engine, client)
        used = engine.status()["pages"]
        engine.stop(5.0)
    done.set()
    watcher.join()
    shape = BaseShape.of_config(AutoConfig.from_pretrained(folder), "all-linear")
    form = form_of_setting(quantize, torch.float32, False)
    found = needs(shape, settings, form, torch.float32, False, 8 << 30)
    kv = (used["total"] - used["free"]) * used["bytes_per_page"]
    parts = {name: getattr(found, name) for name in found.__slots__}
    print(json.dumps({"measured": peak - before, "predicted": found.total + kv, "kv": kv, "parts": parts}))


main(*sys.argv[1:])
