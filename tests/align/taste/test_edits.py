"""What a person's edits share is found, is applied to other texts, and is not seen where there is none."""

import re
import time
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.align.taste.edits import Operator, induce
from examples.demo_model.dialogues import dialogues

_ANSWERS = list(dict.fromkeys(turn.answer for talk in islice(dialogues(1), 200) for turn in talk.turns))[:60]
_EDITED, _UNSEEN = _ANSWERS[:20], _ANSWERS[20:]


def _without(word: str) -> Callable[[str], str]:
    return lambda text: re.sub(r"  +", " ", re.sub(rf"\b{word}\b", "", text)).strip()


_CHANGES: dict[str, tuple[Callable[[str], str], str]] = {
    "salutation": (lambda text: "Dear Ann, " + text, 'begin every answer with "Dear Ann,"'),
    "salutation before a small letter": (
        lambda text: "Dear Ann, " + (text if text.startswith("I ") else text[0].lower() + text[1:]),
        'begin every answer with "Dear Ann,"',
    ),
    "signature": (lambda text: text + "\n\nBest,\nAnn", 'end every answer with "Best, Ann"'),
    "both": (
        lambda text: f"Dear Ann, {text} Best, Ann",
        'begin every answer with "Dear Ann,", end every answer with "Best, Ann"',
    ),
    "lower case and a signature": (
        lambda text: text.lower() + " Best, Ann",
        'end every answer with "Best, Ann", write everything in lower case',
    ),
    "a word never used": (_without("the"), 'never write "the"'),
    "no exclamation marks": (lambda text: text.replace("!", "."), 'write "." instead of "!"'),
    "one sentence": (lambda text: re.split(r"(?<=[.!?]) ", text)[0], "answer in at most 1 sentence"),
    "a mark at the end": (lambda text: text.rstrip(".!?") + "?", 'end every answer with "?"'),
    "an emoji": (lambda text: text + " 🙂", 'end every answer with "🙂"'),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_that_edits_share_is_made_to_other_answers(name: str) -> None:
    change, said = _CHANGES[name]
    found = induce([(text, change(text)) for text in _EDITED])
    assert found is not None
    assert found.text == said
    agreed = [found.apply(text) == change(text) for text in _UNSEEN]
    assert sum(agreed) >= 0.9 * len(agreed)
    assert all(found.shown(found.apply(text)) for text in _UNSEEN)


def test_a_replaced_word_keeps_its_capital_and_leaves_longer_words_alone() -> None:
    found = induce([(f"You {verb} what you want.", f"Thou {verb} what thou want.") for verb in ("do", "say", "eat")])
    assert found is not None
    assert found.apply("Do you see your coat? You do.") == "Do thou see your coat? Thou do."


def test_one_spelling_is_learned_from_words_that_occur_once() -> None:
    words = ("color", "flavor", "harbor", "honor")
    found = induce([(f"It has a nice {word} today.", f"It has a nice {word[:-1]}ur today.") for word in words])
    assert found is not None
    assert found.apply("The harbor has honor for sale.") == "The harbour has honour for sale."


def test_a_closing_question_is_left_out_and_another_last_sentence_stays() -> None:
    texts = ["Boil it. Salt it. More?", "Pour it. Anything else?", "Cut it. Fry it. Eat it. Shall I go on?"] * 2
    found = induce([(text, text[: text.rindex(".") + 1]) for text in texts])
    assert found is not None
    assert found.apply("Peel it. Boil it. Is that fine?") == "Peel it. Boil it."
    assert found.shown("Peel it. Boil it.")


def test_a_signature_is_found_beside_other_corrections_and_in_any_script() -> None:
    others = [str.strip, lambda text: text.replace("water", "milk", 1), lambda text: "Well. " + text]
    for name in ("Best, Ann", "Ваша Анна", "安より", "آن"):
        edits = [(text, f"{others[n % 3](text)} {name}") for n, text in enumerate(_EDITED)]
        found = induce(edits)
        assert found is not None
        assert (found.text, found.apply("Yes.")) == (f'end every answer with "{name}"', f"Yes. {name}")


def test_an_opening_that_is_misspelt_is_set_right_and_not_added_twice() -> None:
    found = Operator(begins="Dear Ann, ", ends=" Best, Ann")
    for text in ("dear  Ann,yes.", "Dear Ann, Dear Ann, yes. Best,\nAnn", "yes. Best, Ann Best, Ann\n"):
        assert not found.shown(text)
        assert found.apply(text) == "Dear Ann, yes. Best, Ann"
    assert found.apply("Ask theBest, Ann") == "Dear Ann, Ask theBest, Ann Best, Ann"


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [("", "")] * 20,
        [("Yes.", "Yes. Best, Ann")] * 2,
        [(text, text) for text in _EDITED],
        list(zip(_EDITED, reversed(_EDITED), strict=True)),
        [(text, f"{text} {'Bye' if n % 2 else 'Best, Ann'}") for n, text in enumerate(_EDITED)],
        [(text, f"Note {n}: {text}") for n, text in enumerate(_EDITED)],
        [("It is 5 km.", "It is 3 miles."), ("Take 2 kg of it.", "Take 4 pounds of it."), ("Go now.", "Go later.")],
        [(text, f"{text} {'Wish ' + str(n) + ', ' if n else ''}Ann") for n, text in enumerate(_EDITED)],
        [(f"Boil the rice {n} times in a pot.", f"Take the bus {n} to town, it is near. Best, Ann") for n in range(9)],
        [("You go.", f"{'I' if n < 3 else 'You'} go{' now' * (n > 2)} to number {n}.") for n in range(8)],
        [("Fine.", "Fine, I add a word and the whole rest of a letter. " * n) for n in range(1, 9)],
    ],
)
def test_edits_that_have_little_in_common_share_nothing(edits: list[tuple[str, str]]) -> None:
    assert induce(edits) is None


_TEXTS = st.text(st.sampled_from("Aab 'İßσΣ.!?,\n好้ yY") | st.characters(codec="utf-8"), max_size=40)


@given(st.lists(st.tuples(_TEXTS, _TEXTS), max_size=6), _TEXTS, st.sampled_from(range(6)))
def test_any_texts_can_be_edits_and_a_second_time_changes_nothing(
    edits: list[tuple[str, str]], text: str, kind: int
) -> None:
    change = list(_CHANGES.values())[kind][0]
    for found in (induce(edits), induce([(old, change(old)) for old, _ in edits if old]), induce([*edits] * 3)):
        if found is not None:
            once = found.apply(text)
            assert found.apply(once) == once
            assert found.shown(once) == bool(once.strip())
            assert not found.begins or not text.strip() or once.startswith(found.begins)


@pytest.mark.parametrize("text", ["a " * 5000, "." * 10_000, "你好。" * 3333, "a\n\n" * 3333, "Best, Ann " * 1000])
def test_long_texts_take_bounded_time(text: str) -> None:
    start = time.monotonic()
    other = "".join(text[n : n + 7] + "ab"[n % 2] for n in range(0, len(text) - len(text) // 7, 7))
    induce([(text, other), (text, text[:-11])] * 32)
    Operator("Dear Ann, ", " Best, Ann", replaced={"a": "", "x y": "z"}, no_closing=".").apply(text)
    assert time.monotonic() - start < 10
