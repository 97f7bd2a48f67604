"""A multimodal checkpoint answers texts over HTTP as its own class does; what stands for an image is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import PeftModel
from transformers import AddedToken, AutoModelForImageTextToText

from benchmarks.support.architectures import ARCHITECTURES
from edged.text.tokenizer import Tokenizer
from tests.api.live import LiveDaemon, running
from tests.api.test_adapters import teach
from tests.models import byte_tokenizer

IMAGE = 259
PARTS = (
    "{% for m in messages %}{{ m.role + ': ' }}{% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A template in LLaVA's way: of a content that is a string it writes nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    llava = next(each for each in ARCHITECTURES if each.name == "llava")
    replace(llava, options={**llava.options, "image_token_id": IMAGE, "image_token_index": IMAGE}).save(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    # Where processors of transformers 4 kept it.
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    settings = {"align__rank": 4, "align__alpha": 8.0, "align__learning_rate": 0.05, "store__save_every_s": 0.1}
    with running(tmp_path_factory.mktemp("run"), folder, **settings) as live:
        yield live


@pytest.fixture
def http(daemon: LiveDaemon) -> Iterator[httpx2.Client]:
    with daemon.http() as client:
        yield client


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, **settings)
    return made[0, len(ids) :].tolist()


def whole(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


CHAT = {"messages": [{"role": "user", "content": "Where is <image> gone?"}], "temperature": 0, "max_tokens": 24}


def test_a_chat_has_the_answer_of_the_wrappers_own_class(http: httpx2.Client, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.render_chat(CHAT["messages"])  # type: ignore[arg-type]
    assert tokenizer.decode(prompt) == "user: Where is <image> gone?\nassistant: "
    assert IMAGE not in prompt
    answer = http.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True}).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(greedy(whole(folder), prompt, 24))


def refused(answer: httpx2.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


REFUSED = f'token id {IMAGE} ("<image>") stands for an image, a video or a sound: this model reads text only'


@pytest.mark.parametrize("prompt", [[1, 70, IMAGE, 71], "What is <image>?"])
def test_a_prompt_with_an_images_token_is_refused_as_an_image_is(http: httpx2.Client, prompt: Any) -> None:
    assert refused(http.post("/v1/completions", json={"prompt": prompt})) == REFUSED
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    told = refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]}))
    assert told.endswith('content part of type "image_url" is not supported: this model reads text only')


def test_a_pair_with_an_images_token_is_refused(http: httpx2.Client) -> None:
    pair = {"user": "ann", "chosen": "a", "rejected": "b"}
    assert refused(http.post("/v1/feedback", json={**pair, "prompt": "What is <image>?"})) == REFUSED


def test_an_images_token_may_be_kept_from_answers(http: httpx2.Client) -> None:
    asked = {"prompt": "a", "max_tokens": 1, "logit_bias": {str(IMAGE): -100}, "stop_token_ids": [IMAGE]}
    assert http.post("/v1/completions", json=asked).status_code == 200


def test_what_was_learned_leaves_for_the_wrappers_class_and_comes_back(
    http: httpx2.Client, folder: Path, tmp_path: Path
) -> None:
    teach(http, "bob")
    exported = http.get("/v1/adapters/bob/export")
    assert exported.status_code == 200, exported.text
    with tarfile.open(fileobj=io.BytesIO(exported.content)) as tar:
        tar.extractall(tmp_path, filter="data")
    peft: Any = PeftModel.from_pretrained(whole(folder), tmp_path)
    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.render_chat(CHAT["messages"])  # type: ignore[arg-type]
    wanted = tokenizer.decode(greedy(peft, prompt, 24))
    assert wanted != tokenizer.decode(greedy(whole(folder), prompt, 24))
    headers = {"Content-Type": "application/x-tar"}
    http.post("/v1/adapters/eve/import", content=exported.content, headers=headers).raise_for_status()
    for user in ("bob", "eve"):
        answer = http.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True, "user": user}).json()
        assert answer["choices"][0]["message"]["content"] == wanted
