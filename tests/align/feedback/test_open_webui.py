"""Open WebUI's export, items as its version 0.12.4 writes them: thumbs become pairs and single ratings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edged.align.feedback.pair_formats import read_pairs

THINKS = '<details type="reasoning" done="true" duration="2">\n<summary>Thought</summary>\n> hm\n</details>\n'


def message(name: str, parent: str | None, role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "parentId": parent, "childrenIds": [], "role": role, "content": content, **more}


CHAT = [
    message("q1", None, "user", "Name a river"),
    message("a1", "q1", "assistant", THINKS + "The Rhine."),
    message("a2", "q1", "assistant", "", output=[
        {"type": "reasoning", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Elbe"}, {"type": "output_text", "text": "."}]},
    ]),
    message("q2", "a1", "user", "Another one"),
    message("a3", "q2", "assistant", "The Oder."),
    message("a4", "q2", "assistant", "Oder", output=[{"type": "function_call", "name": "search"}]),
    message("q3", "a3", "user", "What is on it?", files=[{"type": "image"}]),
    message("a5", "q3", "assistant", "A boat."),
]  # fmt: skip
RIVER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river"}]
NEXT = [*RIVER, {"role": "assistant", "content": "The Rhine."}, {"role": "user", "content": "Another one"}]


def item(name: str, rating: Any, at: int = 1, user: str = "u-1", **more: Any) -> dict[str, Any]:
    history = {"messages": {each["id"]: each for each in CHAT}, "currentId": "a3"}
    chat = {"id": "", "models": ["demo"], "params": {"system": "Be brief."}, "history": history, "messages": []}
    return {
        **{"id": f"f-{name}", "user_id": user, "version": 0, "type": "rating", "created_at": 1, "updated_at": at},
        "data": {"rating": rating, "model_id": "demo", "reason": None, "comment": "", "tags": []},
        "meta": {"arena": False, "model_id": "demo", "message_id": name, "message_index": 2, "chat_id": "c"},
        "snapshot": {"chat": {"id": "c", "user_id": user, "title": "Rivers", "chat": chat}},
        **more,
    }


@pytest.fixture
def read(tmp_path):
    def read(*items: Any) -> list[Any]:
        path = tmp_path / "export.json"
        path.write_text(json.dumps(items))
        return list(read_pairs(path, "open-webui"))

    return read


def test_opposite_thumbs_on_siblings_are_a_pair_and_others_single_ratings(read) -> None:
    found = read(item("a2", "-1", 3), item("a3", 1, 2), item("a1", 1, 1), item("a1", 1, 1, user="u-2"))
    assert found == [
        (4, {"user": "u-2", "messages": RIVER, "completion": "The Rhine.", "label": True}),
        (2, {"user": "u-1", "messages": NEXT, "completion": "The Oder.", "label": True}),
        (1, {"user": "u-1", "messages": RIVER, "chosen": "The Rhine.", "rejected": "Elbe."}),
    ]


def test_a_bad_answer_that_is_made_anew_and_liked_then_is_one_pair(read) -> None:
    first = item("a1", -1, 1)
    del first["snapshot"]["chat"]["chat"]["history"]["messages"]["a2"]
    assert read(first, item("a2", 1, 2)) == [
        (2, {"user": "u-1", "messages": RIVER, "chosen": "Elbe.", "rejected": "The Rhine."})
    ]


def test_a_bad_sibling_leaves_the_others_their_pairs(read) -> None:
    liked, tools, plain = item("a1", 1, 3), item("a6", -1, 1), item("a2", -1, 2)
    calls = message("a6", "q1", "assistant", "Oder", output=[{"type": "function_call", "name": "search"}])
    for each in (liked, tools, plain):
        each["snapshot"]["chat"]["chat"]["history"]["messages"]["a6"] = calls
    assert read(liked, tools, plain) == [
        (1, "an answer of the chat calls tools, which are not in the export"),
        (1, {"user": "u-1", "messages": RIVER, "chosen": "The Rhine.", "rejected": "Elbe."}),
    ]


@pytest.mark.parametrize("at", [10**400, float("nan"), "yesterday", None])
def test_an_odd_time_costs_an_item_its_place_alone(read, at: Any) -> None:
    found = read(item("a1", 1, at), item("a3", 1, 5))
    assert [pair["completion"] for _, pair in found] == ["The Rhine.", "The Oder."]


def test_of_several_ratings_of_a_message_the_latest_counts(read) -> None:
    assert [pair["label"] for _, pair in read(item("a1", -1, 5), item("a1", 1, 4))] == [False]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (7, "the item is int, not an object"),
        (item("a1", None), '"data.rating" is None: a thumb is 1 or -1'),
        (item("a1", [1]), '"data.rating" is [1]: a thumb is 1 or -1'),
        (item("a1", True), '"data.rating" is True: a thumb is 1 or -1'),
        (item("a1", 1, meta=None), '"meta" is NoneType, not an object'),
        (item("a1", 1, snapshot={}), '"snapshot.chat" is NoneType, not an object'),
        (item("a1", 1, user=""), '"user_id" is missing'),
        (item("gone", 1), 'the chat has no message "gone", which "meta.message_id" names'),
        (item("a4", 1), "an answer of the chat calls tools, which are not in the export"),
        (item("a5", 1), "a message of the chat has files, which are not in the export"),
        (item("q1", 1), "0 messages come before the answer: it may be 1 to 1024"),
    ],
)
def test_a_bad_item_fails_alone(read, bad, problem) -> None:
    found = dict(read(item("a1", 1), bad))
    assert (found[1]["completion"], found[2]) == ("The Rhine.", problem)


def test_a_chat_that_goes_round_in_circles_is_refused(read) -> None:
    loop = item("a", 1)
    turns = [message("a", "q", "assistant", "Yes."), message("q", "b", "user", "?"), message("b", "q", "assistant", "")]
    loop["snapshot"]["chat"]["chat"]["history"]["messages"] = {each["id"]: each for each in turns}
    ((_, problem),) = read(loop)
    assert problem.endswith("messages come before the answer: it may be 1 to 1024")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1}', "it is a JSON dict, not the array that Open WebUI exports"),
        ("id,user_id\n", "it is no JSON: "),
        ("[" * 10**5, "it is no JSON: "),
    ],
)
def test_a_file_that_is_no_export_says_so(tmp_path, text: str, problem: str) -> None:
    path = tmp_path / "export"
    path.write_text(text)
    with pytest.raises(OSError, match=problem):
        list(read_pairs(path, "open-webui"))


def test_a_file_that_is_missing_or_too_large_is_told_as_such(tmp_path, monkeypatch) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_pairs(tmp_path / "gone", "open-webui"))
    path = tmp_path / "export"
    path.write_text(json.dumps([item("a1", 1)]))
    monkeypatch.setattr("edged.align.feedback.pair_formats._MOST_ARRAY_BYTES", 1000)
    with pytest.raises(OSError, match=r"it has more than 0 MiB: cut it, as `jq"):
        list(read_pairs(path, "open-webui"))
