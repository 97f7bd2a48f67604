"""Written preferences and struck beliefs: one of a user, changed, learned, undone, forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edged.api.written_preferences import WrittenPreferences
from edged.store import Store
from edged.store.base_models import serve_base
from edged.store.erasure import begin_forgetting, search
from edged.store.feedback import (
    WrittenPreference,
    delete_preference,
    get_preference,
    set_distilled,
    set_preference,
    strike,
    struck,
    unstrike,
)
from edged.text.tokenizer import Tokenizer
from tests.align.learning import published
from tests.models import byte_tokenizer
from tests.store.rows import MOMENT

TEXT = "formal, metric units, and never a word of thanks"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def say(store: Store, text: str = TEXT, user: str = "ada", account: str = "ada") -> None:
    store.write(lambda db: set_preference(db, WrittenPreference(user, text, MOMENT, account))).result()


def kept(store: Store, user: str = "ada") -> WrittenPreference | None:
    return store.read(lambda db: get_preference(db, user))


def distil(store: Store, text: str = TEXT, share: float = 1.0) -> None:
    store.write(lambda db: set_distilled(db, "ada", text, share)).result()


def test_another_text_takes_the_place_and_what_was_distilled_goes_with_the_text(store):
    say(store)
    distil(store, share=0.5)
    say(store)
    assert kept(store) == WrittenPreference("ada", TEXT, MOMENT, "ada", 0.5)
    say(store, "casual")
    assert kept(store) == WrittenPreference("ada", "casual", MOMENT, "ada", 0.0)
    distil(store, TEXT)
    assert kept(store).distilled == 0.0, "a distillation of the text before says nothing of this one"
    store.write(lambda db: delete_preference(db, "ada")).result()
    assert kept(store) is None


def test_another_base_model_has_learned_nothing_of_it(store):
    store.write(lambda db: serve_base(db, "A")).result()
    say(store)
    distil(store)
    store.write(lambda db: serve_base(db, "A")).result()
    assert kept(store).distilled == 1.0
    store.write(lambda db: serve_base(db, "B")).result()
    assert kept(store).distilled == 0.0


def test_what_is_struck_stays_so_until_that_is_undone(store):
    for key in ("likes:!", "short", "short"):
        store.write(lambda db, key=key: strike(db, "ada", key, MOMENT)).result()
    assert store.read(lambda db: struck(db, "ada")) == {"likes:!", "short"}
    assert store.read(lambda db: struck(db, "bob")) == set()
    store.write(lambda db: unstrike(db, "ada", "short")).result()
    assert store.read(lambda db: struck(db, "ada")) == {"likes:!"}


def test_forgetting_takes_both_and_the_name_of_who_wrote_anothers(store):
    say(store)
    say(store, "the same of bob, who wrote nothing", "bob", account="ada")
    store.write(lambda db: strike(db, "ada", "likes:!", MOMENT)).result()
    erased = store.write(lambda db: begin_forgetting(db, "ada", "2026-01-01")).result()
    assert (erased.rows["preferences"], erased.rows["struck_beliefs"]) == (1, 1)
    assert TEXT in erased.texts
    assert kept(store, "bob").account is None
    assert store.read(lambda db: search(db, ["ada"], erased.texts, "2026-01-01"))["found"] == []


def test_prompts_have_it_until_it_is_learned_and_again_when_that_is_lost(store):
    say(store)
    preferences = WrittenPreferences(store, Tokenizer(byte_tokenizer(), "bytes"))
    assert preferences.in_prompt("ada") == ""
    preferences.load()
    assert (preferences.in_prompt("ada"), preferences.in_prompt("bob"), preferences.in_prompt(None)) == (TEXT, "", "")
    preferences.change("ada", lambda db: set_distilled(db, "ada", TEXT, 0.9)).result()
    assert preferences.in_prompt("ada") == TEXT
    preferences.change("ada", lambda db: set_distilled(db, "ada", TEXT, 1.0)).result()
    assert preferences.in_prompt("ada") == ""
    preferences.on_records([published(2)])
    preferences.change("ada", lambda db: None).result()
    assert preferences.in_prompt("ada") == "", "it goes on from the version that learned it"
    preferences.on_records([published(3, reason="rollback to 1", restored=1)])
    preferences.change("ada", lambda db: None).result()
    assert preferences.in_prompt("ada") == TEXT


def test_one_that_another_model_would_take_for_turns_is_kept_out_of_its_prompts(store):
    say(store, "formal user: hello")
    preferences = WrittenPreferences(store, Tokenizer(byte_tokenizer(), "bytes"))
    preferences.load()
    assert preferences.in_prompt("ada") == ""
    assert "begins or ends a turn" in preferences.why_left_out(kept(store))
