"""Rows come back as they went in, and a user can be forgotten."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from edged.align.feedback.pair import VersionPublished
from edged.store import Store, StoreError
from edged.store.adapters import forget_adapters, insert_version
from edged.store.application_runs import add_run, forget_runs, latest_runs, salt
from edged.store.completions import (
    Choice,
    completions_of_prompt,
    content_text,
    get_completion,
    insert_completion,
    prompt_key,
)
from edged.store.feedback import PairRow, Side, Signal, get_pairs, insert_pair, insert_signal, pair_ids_of
from tests.store.rows import MOMENT, completion

DOCUMENT = Path(__file__).parents[2] / "docs" / "database.md"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def add(store, *completions):
    for future in [store.write(lambda db, c=c: insert_completion(db, c)) for c in completions]:
        future.result()


def refer(store, name, user="ada"):
    store.write(lambda db: insert_signal(db, Signal(f"fb-{name}", MOMENT, user, "up", name, 0))).result()


def pair(chosen, rejected, signal_id, adapter="ada"):
    return PairRow(0, MOMENT, adapter, signal_id, "thumbs", 0.5, None, "Hi", (1, 2), chosen, rejected, "queued")


def ids(store):
    return [
        name for (name,) in store.read(lambda db: db.execute("SELECT id FROM completions ORDER BY rowid").fetchall())
    ]


@pytest.mark.parametrize(
    "stored",
    [
        completion("c", "Fine.", "Bad, \n\0 ünïcödé 🙂", adapter="ada", version=7),
        completion("c", "", user=None),
        completion("c", "x", messages=None, prompt="Once", object="text_completion"),
        completion("c", "x", messages=None, prompt_ids=(5,), object="text_completion"),
        completion("c", "x", asked=[{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ada"}]),
        completion("c", choices=(Choice(0, "t", (1,), "length", 1, 2, 3.5, 4.5, 5.5),)),
    ],
)
def test_a_completion_comes_back_as_it_went_in(store, stored):
    add(store, stored)
    assert store.read(lambda db: get_completion(db, "c")) == stored
    assert store.read(lambda db: get_completion(db, "d")) is None


def test_text_that_utf8_cannot_say_is_stored_with_a_question_mark(store):
    add(store, completion("c", "a\ud800b", asked="c\udfffd"))
    found = store.read(lambda db: get_completion(db, "c"))
    assert found.choices[0].text == "a?b"
    assert found.messages[0]["content"] == "c?d"


def test_a_pair_comes_back_as_it_went_in(store):
    add(store, completion("c", "good", "bad"))
    refer(store, "c")
    wanted = pair(Side("good", (1, 2), "c", 0), Side("bad", None, "c", 1), "fb-c")
    number = store.write(lambda db: insert_pair(db, wanted, "key")).result()
    found = store.read(lambda db: get_pairs(db, [number, 99]))
    assert found == [PairRow(**{field: getattr(wanted, field) for field in PairRow.__slots__} | {"id": number})]


def test_equal_prompts_have_equal_keys_and_different_ones_do_not():
    chat = [{"role": "user", "content": "Hi"}]
    assert prompt_key(chat, None) == prompt_key([{"content": "Hi", "role": "user"}], None, (1, 2))
    assert (
        len({prompt_key(chat, None), prompt_key(None, "Hi"), prompt_key(None, None, (1,)), prompt_key([], None)}) == 4
    )
    # Stored rows keep the keys of the edged that wrote them.
    known = [prompt_key(chat, None), prompt_key(None, "Hé"), prompt_key(None, None, (1, 2))]
    assert known == [
        "3030ef7283bfdb0bfb6b7952f4d4c81f",
        "0840007810f044d84f159f32174d03de",
        "c11660ae5fea9e98d0a2a746964fd6de",
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": 3}, "b"], "a\n3"),
        (None, ""),
        ({"text": "no list"}, ""),
    ],
)
def test_a_messages_text_is_its_content_or_its_text_parts(content, text):
    assert content_text({"role": "user", "content": content}) == text
    assert content_text({"role": "user"}) == ""


def test_the_latest_runs_are_of_each_type_and_go_with_their_user(store):
    def add_runs(db):
        for number, (kind, user) in enumerate([("plan", "ann"), ("chat", "bob"), ("plan", "bob"), ("chat", "ann")]):
            row = {column.name: 0 for column in db["application_runs"].columns if column.name != "id"}
            add_run(db, {**row, "created_at": f"2025-01-0{number + 1}", "application": kind, "user": user})

    store.write(add_runs).result()
    assert [run["created_at"][-1] for run in store.read(latest_runs)] == ["1", "2", "3", "4"]
    store.write(lambda db: forget_runs(db, "plan", ["ann", "eve"])).result()
    left = [(run["application"], run["user"]) for run in store.read(latest_runs)]
    assert left == [("chat", "bob"), ("plan", "bob"), ("chat", "ann")]
    assert len(store.read(salt)) >= 16


def test_completions_of_a_prompt_are_those_of_the_same_learner_newest_first(store):
    add(
        store,
        completion("a1", "1"),
        completion("b", "2", user="bob"),
        completion("a2", "3"),
        completion("a3", "4", asked="Else?"),
        completion("a4", "5", user="bob", adapter="ada"),
        completion("base", "6", adapter=None),
    )
    key = completion("", "").prompt_key
    found = store.read(lambda db: completions_of_prompt(db, key, "ada", 10))
    assert [c.id for c in found] == ["a4", "a2", "a1"]
    assert [c.id for c in store.read(lambda db: completions_of_prompt(db, key, "ada", 1))] == ["a4"]


def test_forgetting_removes_everything_of_that_user_and_nothing_else(store):
    for user in ("zoe", "bob"):
        add(store, completion(f"c-{user}", "x", "y", user=user))
        refer(store, f"c-{user}", user)
        sides = Side("x", (1,), f"c-{user}", 0), Side("y", (2,), f"c-{user}", 1)
        store.write(lambda db, s=sides, u=user: insert_pair(db, pair(*s, f"fb-c-{u}", u), "key")).result()
        made = asdict(VersionPublished(user, 1, 0, "trained"))
        store.write(lambda db, made=made: insert_version(db, MOMENT, made)).result()
    deleted, _ = store.write(lambda db: forget_adapters(db, "zoe")).result()
    assert {table: count for table, count in deleted.items() if count} == {
        "adapter_versions": 1,
        "pairs": 1,
        "signals": 1,
        "completions": 1,
    }
    assert ids(store) == ["c-bob"]
    for table in ("choices", "pairs", "signals", "adapter_versions"):
        text = store.read(lambda db, t=table: repr(list(db.query(f"SELECT * FROM {t}"))))
        assert "zoe" not in text
        assert "bob" in text


def test_forgetting_takes_what_the_user_said_through_another_adapter_and_leaves_that_adapter(store):
    add(store, completion("own", "x", "y", user="bob"), completion("anns", "x", "y", user="ann", adapter="bob"))
    numbers = []
    for name in ("own", "anns"):
        refer(store, name, "bob")
        sides = Side("x", (1,), name, 0), Side("y", (2,), name, 1)
        numbers.append(
            store.write(lambda db, n=name, s=sides: insert_pair(db, pair(*s, f"fb-{n}", "bob"), "k")).result()
        )
    # An answer of one's and an answer of the other's, rated by bob.
    sides = Side("x", (1,), "own", 0), Side("y", (2,), "anns", 1)
    store.write(lambda db: insert_pair(db, pair(*sides, "fb-own", "bob"), "k")).result()
    made = asdict(VersionPublished("bob", 1, 0, "trained"))
    store.write(lambda db: insert_version(db, MOMENT, made)).result()
    deleted, _ = store.write(lambda db: forget_adapters(db, "ann")).result()
    assert (deleted["completions"], deleted["signals"], deleted["pairs"], deleted["adapter_versions"]) == (1, 1, 2, 0)
    assert ids(store) == ["own"]
    assert store.read(lambda db: pair_ids_of(db, "bob")) == numbers[:1]


def test_feedback_on_a_completion_that_is_not_there_is_refused_by_the_database(store):
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        refer(store, "nothing")


def test_the_document_lists_every_table_and_column(store):
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    described = {
        section.split("\n", 1)[0].strip("` "): re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
        for section in sections
        if section.startswith("`")
    }
    real = store.read(lambda db: {t.name: [column.name for column in t.columns] for t in db.tables})
    assert described == real
