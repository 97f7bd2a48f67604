"""Preference files of three kinds become pairs; bad lines are named and good ones kept."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edged.align.feedback.pair_formats import count_lines, export_pair, read_pairs, to_hh, to_openai, to_trl
from edged.align.feedback.row_shapes import FormatError
from edged.align.feedback.signals import record_pair
from edged.store import Store
from edged.store.feedback import get_pairs, pair_ids_of
from tests.real_data import HH_FILE

SKY = [{"role": "user", "content": "What color is the sky?"}]


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def read(tmp_path):
    def read(format, *rows, zipped=False):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / "pairs"
        content = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(content) if zipped else content)
        return list(read_pairs(path, format))

    return read


def dialogue(*turns):
    return "".join(f"\n\n{speaker}: {text}" for speaker, text in zip(("Human", "Assistant") * 5, turns, strict=False))


def test_an_hh_dialogue_is_split_at_its_last_answer(read):
    row = {
        "chosen": dialogue("Hi", "Hello", "Why?", "Good."),
        "rejected": dialogue("Hi", "Hello", "Why?", "Bad.\n\nEnd"),
    }
    messages = [
        *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}),
        {"role": "user", "content": "Why?"},
    ]
    assert read("hh", row) == [(1, {"messages": messages, "chosen": "Good.", "rejected": "Bad.\n\nEnd"})]


def test_a_speaker_who_goes_on_makes_one_message(read):
    prompt = "\n\nHuman: One\n\nHuman: Two\n\nAssistant:"
    ((_, pair),) = read("hh", {"chosen": prompt + " yes", "rejected": prompt + " no"})
    assert pair["messages"] == [{"role": "user", "content": "One\n\nTwo"}]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (dialogue("Hi", "a"), dialogue("Ho", "b"), "differ before the last answer"),
        (dialogue("Hi", "same"), dialogue("Hi", "same "), "are equal"),
        (dialogue("Hi", ""), dialogue("Hi", "b"), 'answer of "chosen" is empty'),
        (dialogue("Hi", "a"), dialogue("Hi", " "), 'answer of "rejected" is empty'),
        (dialogue("Hi", "a", "more"), dialogue("Hi", "a", "else"), "ends with the human"),
        ("Hi", dialogue("Hi", "b"), '"chosen" has no'),
        ("System\n\nHuman: Hi\n\nAssistant: a", dialogue("Hi", "b"), "does not start with"),
        ("\n\nAssistant: a", "\n\nAssistant: b", "does not start with"),
        ("\n\nHuman: Hi\n\nAssistant: x\n\nAssistant: a", dialogue("Hi", "b"), "follows no human turn"),
        (7, dialogue("Hi", "b"), '"chosen" is int, not a string'),
        (None, dialogue("Hi", "b"), '"chosen" is NoneType, not a string'),
    ],
)
def test_an_hh_line_that_is_no_pair_says_why(read, chosen, rejected, message):
    ((number, error),) = read("hh", {"chosen": chosen, "rejected": rejected})
    assert number == 1
    assert message in error


SKY_PAIR = {"messages": SKY, "chosen": "Blue.", "rejected": "Green."}
SKY_TEXT = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        (SKY_TEXT, SKY_TEXT),
        ({"prompt": SKY, "chosen": said("Blue."), "rejected": said("Green.")}, SKY_PAIR),
        ({"chosen": SKY + said("Blue."), "rejected": SKY + said("Green.")}, SKY_PAIR),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, SKY_TEXT),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
    ],
)
def test_trls_preference_types_are_read(read, row, pair):
    assert read("trl", row) == [(1, pair)]


@pytest.mark.slow
def test_the_implicit_prompt_is_the_one_that_trl_extracts(read):
    from trl.data_utils import extract_prompt

    for chosen, rejected in (
        ("The sky is blue.", "The sky is green."),
        ("a bc", "a bd"),
        ("x  y", "x  z"),
        ("ab c", "ab d"),
    ):
        row = {"chosen": chosen, "rejected": rejected}
        assert read("trl", row) == [(1, extract_prompt(row))]
    turns = {"chosen": SKY + said("Blue."), "rejected": SKY + said("Green.")}
    theirs = extract_prompt(turns)
    ((_, ours),) = read("trl", turns)
    assert (ours["messages"], said(ours["chosen"]), said(ours["rejected"])) == tuple(theirs.values())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": SKY, "chosen": "a", "rejected": said("b")}, "both as texts or both as lists"),
        ({"prompt": "p", "chosen": "a"}, "both as texts or both as lists"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"chosen": "alike", "rejected": "different"}, "prompt is empty"),
        ({"chosen": "one two", "rejected": "one"}, 'answer of "rejected" is empty'),
        ({"prompt": SKY, "chosen": said("a") + said("b"), "rejected": said("b")}, "adds: assistant, assistant"),
        ({"prompt": SKY, "chosen": [], "rejected": said("b")}, "adds: nothing"),
        ({"prompt": SKY, "chosen": SKY, "rejected": said("b")}, '"chosen" must add one assistant message'),
        ({"prompt": [{"role": "user"}], "chosen": said("a"), "rejected": said("b")}, '"prompt" has a message without'),
        ({"prompt": [], "chosen": said("a"), "rejected": said("b")}, "conversation before the answers is empty"),
        ({"chosen": said("a"), "rejected": said("b")}, "conversation before the answers is empty"),
        ({"prompt": SKY, "chosen": said("a"), "rejected": said(" a")}, "are equal"),
    ],
)
def test_a_trl_line_that_is_no_pair_says_why(read, row, message):
    ((_, error),) = read("trl", row)
    assert message in error


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, 'neither "messages" nor "prompt"'),
        ({"messages": "Hi", "chosen": "a", "rejected": "b"}, '"messages" is str, not a list'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, '"prompt" is int'),
        ({"prompt": "p", "rejected": "b"}, '"chosen" is missing'),
    ],
)
def test_a_line_of_the_own_format_that_is_no_pair_says_why(read, row, message):
    ((_, error),) = read("edged", row)
    assert message in error


def test_bad_lines_are_named_by_number_and_good_ones_kept(read):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    found = read("edged", good, b"{broken", b"", b"[1]", b'{"prompt": "\xff"}', b"[" * 30_000, good)
    assert [number for number, pair in found if isinstance(pair, dict)] == [1, 7]
    errors = {number: pair for number, pair in found if isinstance(pair, str)}
    assert sorted(errors) == [2, 4, 5, 6]
    assert errors[2].startswith("not JSON: ")
    assert errors[4] == "not a JSON object: list"
    assert errors[5].startswith("not UTF-8: ")
    assert errors[6].startswith("not JSON: ")


def test_gzip_is_recognised_by_content(read):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert read("edged", row, row, zipped=True) == [(1, row), (2, row)]


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:200] + b"\xff" * 50 + data[250:]]
)
def test_a_damaged_gzip_gives_what_was_read_and_then_an_error(tmp_path, damage):
    rows = [
        json.dumps({"prompt": f"p{i * 7919 % 10007}", "chosen": f"a{i}", "rejected": f"b{i}"}) for i in range(20_000)
    ]
    path = tmp_path / "pairs.gz"
    path.write_bytes(damage(gzip.compress("\n".join(rows).encode())))
    found = list(read_pairs(path, "edged"))
    number, error = found[-1]
    assert isinstance(error, str)
    assert "cannot be read from here on" in error
    assert number == len(found) < 20_000
    assert all(isinstance(pair, dict) for _, pair in found[:-1])
    assert count_lines(path) == number - 1


def test_lines_are_counted_with_or_without_a_last_newline(tmp_path):
    path = tmp_path / "pairs"
    path.write_bytes(b"a\nb\n\nc")
    assert count_lines(path) == 4


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_pairs(tmp_path / "none", "hh"))


def test_what_is_exported_can_be_imported(read, tmp_path):
    store = Store(tmp_path / "store" / "edged.db")
    now = datetime(2025, 1, 31, tzinfo=UTC)
    store.write(lambda db: record_pair(db, "ada", "blue ☀", "green", now, messages=SKY)).result()
    store.write(lambda db: record_pair(db, "ada", " 4", " 5", now, prompt="2+2 =")).result()
    exported = [export_pair(row) for row in store.read(lambda db: get_pairs(db, pair_ids_of(db, "ada")))]
    store.close()
    assert [pair for _, pair in read("edged", *exported)] == [
        {"messages": SKY, "chosen": "blue ☀", "rejected": "green", "user": "ada", "weight": 1.0},
        {"prompt": "2+2 =", "chosen": " 4", "rejected": " 5", "user": "ada", "weight": 1.0},
    ]
    assert exported[0]["user"] == "ada"
    assert (exported[0]["source"], exported[0]["weight"], exported[0]["state"]) == ("pair", 1.0, "queued")


CHAT = {"user": "ada", "messages": SKY, "chosen": "Blue ☀.", "rejected": "Green.", "weight": 1.0, "state": "queued"}
TEXT = {"user": "ada", "prompt": "2+2 =", "chosen": " 4", "rejected": " 5", "weight": 1.0, "state": "queued"}
TALK = [*SKY, *said("Blue."), {"role": "user", "content": "At night?"}]


def test_a_chat_that_is_exported_for_trl_or_hh_is_read_back_as_it_was(read):
    pair = {**CHAT, "messages": TALK}
    wanted = {"messages": TALK, "chosen": "Blue ☀.", "rejected": "Green."}
    assert read("trl", to_trl(pair)) == [(1, wanted)]
    assert read("hh", to_hh(pair)) == [(1, wanted)]
    assert read("openai", to_openai(pair)) == [(1, wanted)]
    assert read("trl", to_trl(TEXT)) == [(1, {"prompt": "2+2 =", "chosen": " 4", "rejected": " 5"})]


def test_content_in_parts_is_exported_as_its_text(read):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]}]
    assert to_trl({**CHAT, "messages": parts})["prompt"] == [{"role": "user", "content": "What \nnow?"}]


@pytest.mark.parametrize(
    ("convert", "pair", "message"),
    [
        (to_trl, {"prompt_ids": [1], "chosen": "a", "rejected": "b"}, "in tokens alone"),
        (to_hh, TEXT, "not a chat"),
        (to_openai, TEXT, "not a chat"),
        (to_hh, {**CHAT, "messages": [{"role": "system", "content": "Be kind"}, *SKY]}, 'no role "system"'),
        (to_hh, {**CHAT, "messages": SKY + SKY}, "do not alternate"),
        (to_hh, {**CHAT, "messages": said("Hi")}, "follows no human turn"),
        (to_hh, {**CHAT, "messages": [{"role": "user", "content": "a\n\nAssistant: b"}]}, "follows no human turn"),
        (to_hh, {**CHAT, "messages": [{"role": "user", "content": "a\n\nHuman: b"}]}, "begins a turn"),
        (to_hh, {**CHAT, "chosen": "yes\n\nHuman: no"}, "ends with the human"),
    ],
)
def test_what_a_format_cannot_say_is_refused(convert, pair, message):
    with pytest.raises(FormatError, match=message):
        convert(pair)


@pytest.mark.parametrize("pairs", [[CHAT, {**CHAT, "messages": TALK}], [TEXT, TEXT]])
def test_trl_takes_what_is_exported_for_it(tmp_path, pairs):
    """TRL's own check of the type, its own template and tokens, from a file that `datasets` reads."""
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer
    from trl.data_utils import is_conversational

    from tests.models import byte_tokenizer, tiny_model

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(to_trl(pair)) + "\n" for pair in pairs))
    dataset = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert dataset.column_names == ["prompt", "chosen", "rejected"]
    assert is_conversational(dataset[0]) == ("messages" in pairs[0])
    config = DPOConfig(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False, max_length=None)
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        tiny_model(), args=config, train_dataset=dataset, processing_class=byte_tokenizer(), peft_config=lora
    )
    row = next(iter(trainer.get_train_dataloader()))
    said = byte_tokenizer().decode(row["input_ids"][0], skip_special_tokens=True)
    assert (pairs[0].get("prompt") or pairs[0]["messages"][0]["content"]) in said
    assert pairs[0]["chosen"].strip() in said


@pytest.mark.skipif(not HH_FILE.exists(), reason=f"real HH-RLHF pairs are not at {HH_FILE}")
def test_real_hh_pairs_are_read_and_the_few_bad_ones_named():
    found = list(read_pairs(HH_FILE, "hh"))
    pairs = [pair for _, pair in found if isinstance(pair, dict)]
    assert (len(found), count_lines(HH_FILE)) == (1900, 1900)
    assert len(pairs) == 1894
    with gzip.open(HH_FILE, "rt") as file:
        raw = [json.loads(line) for line in file]
    for number, pair in found:
        if isinstance(pair, str):
            assert "is empty" in pair or "follows no human turn" in pair
            continue
        roles = [message["role"] for message in pair["messages"]]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert roles[-1] == "user"
        for side in ("chosen", "rejected"):
            assert raw[number - 1][side].endswith(pair[side]) or raw[number - 1][side].rstrip().endswith(pair[side])


def test_the_module_starts_without_heavy_imports():
    heavy = ("torch", "pydantic", "sqlite_utils", "numpy")
    code = f"import sys, edged.align.feedback.pair_formats; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"


def test_a_kto_line_is_a_single_rating(read):
    chat = {"prompt": SKY, "completion": said("Blue."), "label": True}
    text = {"prompt": "The sky is", "completion": " green", "label": False}
    assert read("kto", chat, text) == [
        (1, {"messages": SKY, "completion": "Blue.", "label": True}),
        (2, {"prompt": "The sky is", "completion": " green", "label": False}),
    ]
    good = {"prompt": "a", "completion": "b"}
    wrong = [{**good, "label": 1}, good, {"prompt": "a", "chosen": "b", "rejected": "c"}, {**good, "completion": " "}]
    told = ['"label" is 1: it may be true or false', 'it has no "label": true or false']
    told += ['"chosen" is of a file of preferences: --format trl reads pairs', "the completion is empty"]
    assert read("kto", *wrong) == list(enumerate(told, 1))


def test_an_exported_rating_is_read_back(read):
    row = {"user": "ada", "completion": "Blue.", "label": False, "weight": 0.5, "source": "thumbs", "state": "trained"}
    kept = {"user": "ada", "completion": "Blue.", "label": False, "weight": 0.5}
    assert read("edged", {**row, "messages": SKY}, {**row, "prompt_ids": [1]}) == [
        (1, {"messages": SKY, **kept}),
        (2, {"prompt_ids": [1], **kept}),
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    # What is no message is as if it were not there.
    assert read(
        "edged", {**row, "messages": SKY, "rejected_message": called}, {**row, "messages": SKY, "chosen_message": "x"}
    ) == [
        (1, "an answer calls tools, which no import takes"),
        (2, {"messages": SKY, **kept}),
    ]
