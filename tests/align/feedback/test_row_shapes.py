"""Rows as widely used sets have them: each teaches what its card says, or is refused by a sentence with the way out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from trl.data_utils import maybe_extract_prompt

from edged.align.feedback.examples import BadFile, ExampleFile
from edged.align.feedback.pair_formats import count_lines, read_pairs


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


ASK, YES, NO, SHORT = user("Is it?"), said("Yes."), said("No."), system("Be short.")
CHAT = {"messages": [ASK], "chosen": "Yes.", "rejected": "No."}
TEXT = {"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."}
SYSTEM = {**CHAT, "messages": [SHORT, ASK]}
TURNS = [ASK, NO, user("Sure?")]
LONG = {**CHAT, "messages": TURNS}
START = 'the prompt is the common start of "chosen" and "rejected"'
SIDES = {"chosen": [ASK, YES], "rejected": [ASK, NO]}
GPT = {"from": "gpt", "value": "Yes."}

TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "UltraFeedback binarized": (
        {
            "prompt": "Is it?",
            "prompt_id": "1",
            "messages": [ASK, YES],
            **SIDES,
            "score_chosen": 8.5,
            "score_rejected": 5.0,
        },
        CHAT,
        START,
    ),
    "UltraFeedback cleaned": (
        {"source": "x", "prompt": "", **SIDES, "chosen-rating": 5, "rejected-rating": 1, "chosen-model": "a"},
        CHAT,
        START,
    ),
    "UltraFeedback with a system turn": (
        {"prompt": "Is it?", "chosen": [SHORT, ASK, YES], "rejected": [SHORT, ASK, NO]},
        SYSTEM,
        START,
    ),
    "Tulu's mixture": ({"id": "1", "source": "x", "prompt": "Is it?", **SIDES, "chosen_rating": 5.0}, CHAT, START),
    "argilla dpo-mix-7k": ({"dataset": "x", **SIDES, "chosen_rating": 5.0, "rejected_rating": 4.0}, CHAT, START),
    "Capybara DPO": (
        {
            "source": "x",
            "conversation": [{"input": "Is it?", "output": "No."}, {"input": "Sure?", "output": "Yes."}],
            "original_response": "Yes.",
            "generation_prompt": ["a"],
            "prompt": "Sure?",
            "chosen": [*TURNS, YES],
            "rejected": [*TURNS, NO],
        },
        LONG,
        START,
    ),
    "HH-RLHF": (
        {side: f"\n\nHuman: Is it?\n\nAssistant: {text}" for side, text in (("chosen", "Yes."), ("rejected", "No."))},
        CHAT,
        "it is a dialogue of HH-RLHF",
    ),
    "SHP": (
        {
            "post_id": "1",
            "domain": "x",
            "history": "Is it?",
            "human_ref_A": "No.",
            "human_ref_B": "Yes.",
            "labels": 0,
            "score_ratio": 2.0,
        },
        CHAT,
        'the prompt is "history"; "labels" decides between "human_ref_A" and "human_ref_B"',
    ),
    "Orca DPO pairs": (
        {"system": "Be short.", "question": "Is it?", "chosen": "Yes.", "rejected": "No."},
        SYSTEM,
        'the prompt is "system" and "question"',
    ),
    "Orca DPO pairs without a system text": (
        {"system": "", "question": "Is it?", "chosen": "Yes.", "rejected": "No."},
        CHAT,
        'the prompt is "question"',
    ),
    "distilabel Orca pairs": (
        {
            "system": "Be short.",
            "input": "Is it?",
            "chosen": "Yes.",
            "rejected": "No.",
            "generations": ["Yes.", "No."],
            "rating": [9, 1],
            "status": "unchanged",
        },
        SYSTEM,
        'the prompt is "system" and "input"',
    ),
    "truthy DPO": (
        {"id": "1", "system": "Be short.", "prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
        SYSTEM,
        'the prompt is "system" and "prompt"',
    ),
    "PKU-SafeRLHF": (
        {
            "prompt": "Is it?",
            "response_0": "No.",
            "response_1": "Yes.",
            "is_response_0_safe": True,
            "better_response_id": 1,
            "safer_response_id": 1,
        },
        TEXT,
        '"better_response_id" decides between "response_0" and "response_1"',
    ),
    "HelpSteer2 preferences": (
        {
            "split": "train",
            "prompt": "Is it?",
            "response_1": "Yes.",
            "response_2": "No.",
            "preference_strength": -2,
            "preference_statement": "x",
        },
        TEXT,
        '"preference_strength" decides between "response_1" and "response_2"',
    ),
    "HelpSteer3": (
        {"domain": "x", "context": TURNS, "response1": "No.", "response2": "Yes.", "overall_preference": 3},
        LONG,
        'the prompt is "context"; "overall_preference" decides between "response1" and "response2"',
    ),
    "Chatbot Arena": (
        {
            "question_id": "1",
            "model_a": "x",
            "model_b": "y",
            "winner": "model_b",
            "conversation_a": SIDES["rejected"],
            "conversation_b": SIDES["chosen"],
            "turn": 1,
        },
        CHAT,
        f'{START}; "winner" decides between "conversation_a" and "conversation_b"',
    ),
    "UltraInteract": (
        {
            "task": "x",
            "trajectory": [{"from": "user", "value": "Is it?"}],
            "chosen": "Yes.",
            "rejected": "No.",
            "parent_id": "1",
        },
        CHAT,
        'the prompt is "trajectory"',
    ),
    "OpenAssistant pairs": (
        {"lang": "en", "parent_id": "1", "prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
        TEXT,
        "",
    ),
    "TL;DR preferences of TRL": (TEXT, TEXT, ""),
    "LLaMA-Factory's Alpaca preferences": (
        {"instruction": "Is it?", "input": "", "chosen": "Yes.", "rejected": "No."},
        CHAT,
        'the prompt is "instruction"',
    ),
    "Alpaca preferences with an input": (
        {"instruction": "Is", "input": "it?", "chosen": "Yes.", "rejected": "No.", "system": "Be short."},
        {**CHAT, "messages": [SHORT, user("Is\nit?")]},
        'the prompt is "system" and "instruction" and "input"',
    ),
    "LLaMA-Factory's ShareGPT preferences": (
        {
            "conversations": [{"from": "human", "value": "Is it?"}],
            "chosen": GPT,
            "rejected": {"from": "gpt", "value": "No."},
        },
        CHAT,
        'the prompt is "conversations"',
    ),
    "a prompt that both sides repeat": ({"prompt": [ASK], **SIDES}, CHAT, ""),
    "a text before answers that are messages": ({"prompt": "Is it?", "chosen": [YES], "rejected": [NO]}, CHAT, ""),
    "messages before answers that are texts": ({"prompt": [ASK], "chosen": "Yes.", "rejected": "No."}, CHAT, ""),
    "an export of edged": (
        {"user": "ada", **LONG, "source": "pair", "weight": 1.0, "state": "trained", "created_at": "x"},
        LONG,
        "",
    ),
    "text in parts": (
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "Is"}, {"type": "text", "text": "it?"}]}],
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
        },
        {**CHAT, "messages": [user("Is\nit?")]},
        "",
    ),
    "OpenAI's preference padded with null": (
        {"messages": None, "prompt": None, "input": {"messages": [ASK], "tools": None}, "preferred_output": [YES]}
        | {"non_preferred_output": [NO], "chosen": None, "label": None},
        CHAT,
        "",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Nectar": (
        {"prompt": "\n\nHuman: a\n\nAssistant: ", "answers": [{"answer": "b", "rank": 1.0}], "turns": 1},
        'Nectar\'s ranked answers: write rows of "prompt", "chosen" and "rejected"',
    ),
    "stack-exchange-preferences": (
        {"qid": 1, "question": "a", "answers": [{"text": "b", "pm_score": 1}]},
        "stack-exchange-preferences' scored answers: write",
    ),
    "WebGPT": (
        {"question": {"full_text": "a"}, "answer_0": "b", "answer_1": "c", "score_0": 1.0, "score_1": -1.0},
        "WebGPT's scored answers: write",
    ),
    "summarize_from_feedback": (
        {"info": {"post": "a"}, "summaries": [{"text": "b"}, {"text": "c"}], "choice": 0},
        "summarize_from_feedback's comparisons: write",
    ),
    "OpenAssistant": (
        {"message_id": "1", "parent_id": "2", "message_tree_id": "3", "text": "a", "role": "prompter"},
        "OpenAssistant's single messages: write",
    ),
    "UltraFeedback": (
        {"source": "x", "instruction": "a", "models": [], "completions": [{"response": "b"}]},
        "UltraFeedback's scored completions: write",
    ),
    "a tie of Chatbot Arena": (
        {"conversation_a": [ASK, YES], "conversation_b": [ASK, NO], "winner": "tie (bothbad)"},
        "\"winner\" is 'tie \\(bothbad\\)', which prefers no answer: leave the line out",
    ),
    "HelpSteer2 without a preference": (
        {"prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": 0},
        '"preference_strength" is 0, which prefers no answer',
    ),
    "two prompts": (
        {"question": "a", "instruction": "b", "chosen": "c", "rejected": "d"},
        '"question" and "instruction" may each be the prompt: name that "prompt"',
    ),
    "no prompt": (
        {"topic": "a", "chosen": "b", "rejected": "c"},
        'the prompt is empty: both sides begin differently; if it is in "topic", name that "prompt"',
    ),
    "turns before an instruction": (
        {"instruction": "a", "history": [["b", "c"]], "chosen": "d", "rejected": "e"},
        'turns in "history": write all as "messages"',
    ),
    "bare tokens": ({"prompt_ids": [1], "chosen": "a", "rejected": "b"}, "in tokens alone"),
    "an image": (
        {
            "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "chosen": [YES],
            "rejected": [NO],
        },
        'content part of type "image_url" is not supported: this model reads text only',
    ),
    "plain text": ({"text": "a", "meta": {}}, 'it has none of the fields .*, it has "text", "meta"'),
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", TAKEN)
def test_a_preference_is_taken_alike_by_an_import_and_a_job(tmp_path: Path, name: str) -> None:
    row, pair, told = TAKEN[name]
    path = written(tmp_path, row)
    file = ExampleFile(path, tmp_path, "dpo")
    assert list(file.read([0])) == [(1, [pair])]
    assert dict(file.taken) == ({told: 1} if told else {})
    if "preferred_output" not in row:
        taken = Counter[str]()
        assert list(read_pairs(path, "trl", taken)) == [(1, pair)]
        assert taken == file.taken


@pytest.mark.parametrize(
    "name", ["UltraFeedback binarized", "UltraFeedback with a system turn", "argilla dpo-mix-7k", "Capybara DPO"]
)
def test_the_pair_is_the_one_that_trl_extracts(name: str) -> None:
    row, pair, _ = TAKEN[name]
    theirs = maybe_extract_prompt(row)
    assert theirs["prompt"] == pair["messages"]
    assert [theirs["chosen"], theirs["rejected"]] == [[said(pair["chosen"])], [said(pair["rejected"])]]


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_leaves_a_doubt_is_refused_alike_with_the_way_out(tmp_path: Path, name: str) -> None:
    row, told = REFUSED[name]
    path = written(tmp_path, row)
    with pytest.raises(BadFile, match=told) as refused:
        ExampleFile(path, tmp_path, "dpo")
    assert list(read_pairs(path, "trl")) == [(1, str(refused.value).removeprefix("line 1: "))]


ANSWERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "Alpaca": (
        {"instruction": "Is", "input": "it?", "output": "Yes.", "text": "Below is an instruction"},
        [{"messages": [user("Is\nit?")], "chosen": "Yes."}],
        'the prompt is "instruction" and "input"',
    ),
    "Dolly": (
        {"instruction": "Is it?", "context": "", "response": "Yes.", "category": "x"},
        [{"messages": [ASK], "chosen": "Yes."}],
        'the prompt is "instruction"',
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "Be short.", "question": "Is it?", "response": "Yes."},
        [{"messages": [SHORT, ASK], "chosen": "Yes."}],
        'the prompt is "system_prompt" and "question"',
    ),
    "GSM8K": (
        {"question": "Is it?", "answer": "Yes."},
        [{"messages": [ASK], "chosen": "Yes."}],
        'the prompt is "question"',
    ),
    "UltraChat": (
        {"prompt": "Is it?", "prompt_id": "1", "messages": [ASK, YES]},
        [{"messages": [ASK], "chosen": "Yes."}],
        "",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Is it?"}, GPT], "system": "Be short."},
        [{"messages": [SHORT, ASK], "chosen": "Yes."}],
        'the prompt is "system" and "conversations"',
    ),
    "LMSYS chats": (
        {"conversation_id": "1", "model": "x", "conversation": [ASK, YES], "turn": 1, "language": "English"},
        [{"messages": [ASK], "chosen": "Yes."}],
        'the prompt is "conversation"',
    ),
    "a chat padded with null": (
        {"messages": [ASK | {"name": None, "weight": None}, YES | {"tool_calls": None, "weight": None}]}
        | dict.fromkeys(("chosen", "rejected", "prompt", "completion", "label", "input")),
        [{"messages": [ASK], "chosen": "Yes."}],
        "",
    ),
    "a chat with text in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}, YES]},
        [{"messages": [ASK], "chosen": "Yes."}],
        "",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_sets_for_supervised_training_are_taken(tmp_path: Path, name: str) -> None:
    row, pairs, told = ANSWERS[name]
    file = ExampleFile(written(tmp_path, row), tmp_path, "supervised")
    assert list(file.read([0])) == [(1, pairs)]
    assert dict(file.taken) == ({told: 1} if told else {})
    ((_, problem),) = read_pairs(tmp_path / "rows.jsonl", "trl")
    assert "is of a file of answers: `edged finetune create` learns these" in str(problem)


@pytest.mark.parametrize("about", [{"prompt": [ASK]}, {"prompt": "Is it?"}, {"messages": [ASK]}])
def test_ratings_of_the_kto_mix_are_taken(tmp_path: Path, about: dict[str, Any]) -> None:
    rows = [{**about, "completion": [YES], "label": True}, {**about, "completion": [YES], "label": False}]
    file = ExampleFile(written(tmp_path, *rows), tmp_path, "kto")
    good, bad = (pairs[0] for _, pairs in file.read([0, 1]))
    assert good == {"messages": [ASK], "chosen": "Yes."}
    assert bad == {"messages": [ASK], "chosen": "", "rejected": "Yes."}


FILES = {
    "a JSON array": (
        b'[\n {"prompt": "a"},\n {"prompt": "b"}\n]\n',
        'a JSON array .*not JSON lines: `jq -c "..." FILE`',
    ),
    "an array on one line": (b'  [{"prompt": "a"}]', "a JSON array"),
    "an array after a mark": (b"\xef\xbb\xbf[\n", "a JSON array"),
    "an object on several lines": (
        b'{\n  "prompt": "a"\n}\n',
        "on several lines, not JSON lines: `jq -c . FILE` makes them",
    ),
    "an object broken late": (b'{"prompt": "a",\n "chosen": "b"}\n', "on several lines"),
    "UTF-16": ('{"prompt": "a"}\n'.encode("utf-16"), "it is UTF-16: save it as UTF-8"),
    "UTF-16 without a mark": ('{"prompt": "a"}\n'.encode("utf-16-le"), "it is UTF-16: save it as UTF-8"),
    "Parquet": (b"PAR1\x15\x04", "it is Parquet's"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_json_lines_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    content, told = FILES[name]
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=f"^it is .*{told}".replace("it is .*it is", "it is")) as refused:
        ExampleFile(path, tmp_path, "supervised")
    for read in (lambda: list(read_pairs(path, "edged")), lambda: count_lines(path)):
        with pytest.raises(OSError, match=re.escape(str(refused.value))):
            read()


def test_lines_with_a_mark_or_windows_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TEXT).encode() + b"\r\n" + json.dumps(TEXT).encode() + b"\r\n")
    assert len(ExampleFile(path, tmp_path, "dpo")) == 2
    assert list(read_pairs(path, "trl")) == [(1, TEXT), (2, TEXT)]


def test_an_import_of_the_own_format_names_the_format_that_other_rows_need(tmp_path: Path) -> None:
    ((_, problem),) = read_pairs(written(tmp_path, {"prompt": "Is it?", **SIDES}), "edged")
    assert "--format trl" in str(problem)
