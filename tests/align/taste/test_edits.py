"""What a person's edits share is found, is applied to other texts, and is not seen where there is none."""

import re
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.align.taste.edits import EditedText, Operator, induce
from examples.demo_model.dialogues import dialogues

_ANSWERS = list(dict.fromkeys(turn.answer for talk in islice(dialogues(1), 200) for turn in talk.turns))[:60]
_EDITED, _UNSEEN = _ANSWERS[:20], _ANSWERS[20:]


def _without(word: str) -> Callable[[str], str]:
    return lambda text: re.sub(r"  +", " ", re.sub(rf"\b{word}\b", "", text)).strip()


_CHANGES: dict[str, tuple[Callable[[str], str], str]] = {
    "salutation": (lambda text: "Dear Ann, " + text, 'begins with "Dear Ann,"'),
    "salutation before a small letter": (
        lambda text: "Dear Ann, " + (text if text.startswith("I ") else text[0].lower() + text[1:]),
        'begins with "Dear Ann,"',
    ),
    "signature": (lambda text: text + "\n\nBest,\nAnn", 'ends with "Best, Ann"'),
    "both": (
        lambda text: f"Dear Ann, {text} Best, Ann",
        'begins with "Dear Ann,", ends with "Best, Ann"',
    ),
    "lower case and a signature": (
        lambda text: text.lower() + " Best, Ann",
        'ends with "Best, Ann", lower case',
    ),
    "a word never used": (_without("the"), 'never "the"'),
    "no exclamation marks": (lambda text: text.replace("!", "."), '"." instead of "!"'),
    "one sentence": (lambda text: re.split(r"(?<=[.!?]) ", text)[0], "at most 1 sentence"),
    "a mark at the end": (lambda text: text.rstrip(".!?") + "?", 'ends with "?"'),
    "an emoji": (lambda text: text + " 🙂", 'ends with "🙂"'),
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


_CHATTY = [
    "Sure! Place **four eggs** in a pot — cover them with water. Let them stand for 10 minutes! Then cool them.",
    "Certainly! Here are tips for sleep:\n\n1. **Keep a schedule**: Sleep early.\n2. **Relax**: Read 📖 a book.",
    "Of course! The capital of France is **Paris** 😊. It is known for the Eiffel Tower — a landmark of iron.",
    "Great question! **Plants** need light, water and air 🌱. They turn light into sugar. Leaves are green.",
    "Absolutely! It is short:\n\n- **Contact details** first\n- Work — newest on top\n- Education\n\nProofread it!",
    "Of course! Pour hot water over ground beans ☕️. Use **two spoons** — or three. The flavor depends on the roast.",
    "Sure! Steps:\n\n# Network\n🔧 Open `Wi-Fi ⚙️` now.\n1. Open **Settings** ⚙️.\n2. Click Wi-Fi — wait.",
    "Certainly! Track your **expenses** 💰, and set a budget:\n\n* Cook at home\n* Buy less — it helps\n\nGood luck.",
]
"""Answers as chat models give them."""


def _plain_lines(text: str) -> str:
    return re.sub(r"(?m)^(\d+\.|[-*#]) ", "", text)


def _no_emoji(text: str) -> str:
    return re.sub(r"(?m)(^🔧 | ?[\U0001f300-\U0001faff\u2600-\u27bf](?!\ufe0f?`)\ufe0f?)", "", text)


def _no_preamble(text: str) -> str:
    return text.split("! ", 1)[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_preamble, 'without short first sentences that end with "!"'),
        (_no_emoji, "no emoji"),
        (_plain_lines, "no marks of lists and headings"),
        (lambda text: text.replace("**", ""), 'never "**"'),
        (lambda text: text.replace(" — ", ", "), '"," instead of "—"'),
        (
            lambda text: _no_preamble(_plain_lines(_no_emoji(text.replace("**", "")))) + "\n\nKim",
            'ends with "Kim", never "**", no emoji, no marks of lists and headings, '
            'without short first sentences that end with "!"',
        ),
    ],
)
def test_what_chat_models_decorate_answers_with_is_left_out_as_edits_leave_it_out(
    change: Callable[[str], str], said: str
) -> None:
    edits = [(text, change(text)) for text in _CHATTY]
    found = induce(edits[:-1])
    assert found is not None
    assert found.text == said
    assert [found.apply(old) for old, _ in edits] == [new for _, new in edits]
    for raw, edited in edits:
        growing = EditedText(found)
        for end in range(0, len(raw), 3):
            growing.push(raw[:end])
            assert edited.startswith(growing.text)
        growing.end(raw, whole=True)
        assert growing.text == edited


def test_edits_that_shorten_answers_leave_out_no_emoji_and_blocks_of_code_keep_their_marks() -> None:
    assert induce([(text, text.split("! ", 1)[0] + "!") for text in _CHATTY]).text == "at most 1 sentence"  # type: ignore[union-attr]
    code = "Run this:\n\n```\n- name: x\n# note\n```\n\n- Done"
    assert Operator(no_list_marks=True).apply(code) == code.replace("- Done", "Done")


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        (Operator(no_list_marks=True), "3. Oktober ist ein Feiertag.\nEs ist kalt:\n- 5 Grad"),
        (Operator(no_emoji=True), "| x | ✅ |\n| y | ✗ |"),
        (Operator(no_emoji=True), "👍"),
        (Operator(no_opening="!"), "Do take both pills with a large glass of water and with your meal! Then ask."),
        (Operator(no_opening="!"), "Sure!"),
    ],
)
def test_what_tells_something_stays(operator: Operator, text: str) -> None:
    assert operator.apply(text) == text


def test_headings_that_end_alike_are_no_openings() -> None:
    edits = [
        (f"{word}\n\nBoil it. Serve it.", "Boil it. Serve it.") for word in ("Better", "Dinner", "Summer", "Winter")
    ]
    assert induce(edits) is None


def grows_as_a_whole(operator: Operator, raw: str, cuts: set[int]) -> None:
    """Check that an answer that grows by `cuts` takes nothing back, and ends as the whole one is edited."""
    edited, sent = EditedText(operator), ""
    for cut in sorted(cuts):
        edited.push(raw[:cut])
        assert edited.text.startswith(sent)
        sent = edited.text
    edited.end(raw, whole=True)
    assert edited.text == operator.apply(raw)


_PIECES = (
    *(
        "Sure! ",
        "Wow!! ",
        "Here are tips:\n\n",
        "\n",
        "\n\n",
        "# ",
        "## ",
        "- ",
        "* ",
        "1. ",
        "2. ",
        "3) ",
        "12. March ",
        "😊 ",
    ),
    *("Boil it. ", "Go on, please. ", "**Salt** ", "`ls -l` ", "```\n1. x\n- y\n```\n", "is it? ", "wait — no "),
)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(_PIECES), min_size=1, max_size=24),
    parts=st.fixed_dictionaries({name: st.booleans() for name in ("no_emoji", "no_list_marks")}),
    opening=st.sampled_from(["", "!", ":"]),
    begins=st.sampled_from(["", "Hi Ann! "]),
    cuts=st.sets(st.integers(1, 300), max_size=30),
)
def test_decorations_that_leave_a_growing_answer_leave_the_whole_one_alike(
    pieces: list[str], parts: dict[str, bool], opening: str, begins: str, cuts: set[int]
) -> None:
    raw = "".join(pieces)
    grows_as_a_whole(Operator(begins, no_opening=opening, **parts), raw, {cut for cut in cuts if cut < len(raw)})


@pytest.mark.parametrize(
    "raw",
    [
        "Sure! Open a terminal window on your computer first. Then go on, run the command `ls -l` in it. Read it.",
        "Sure! Here is an example of how you use it:\n\n```python\nprint('Sure! No.')\n```\n\nThat is all of it.",
        "Sure! `ls` it is. Great! It lists all files in the folder in which you are.",
        "Of course! Great! Wash the apples: 1. is done. Then peel them.\n1. Cut them.\n- Salt them.\n2. Eat them.",
    ],
)
@pytest.mark.parametrize("more", [{}, {"no_list_marks": True, "no_emoji": True}, {"max_sentences": 1}])
def test_a_growing_answer_without_its_opening_is_as_the_whole_one(raw: str, more: dict[str, Any]) -> None:
    operator = Operator(no_opening="!", **more)
    growing = EditedText(operator)
    for end in range(len(raw)):
        growing.push(raw[:end])
        assert operator.apply(raw).startswith(growing.text)
    growing.end(raw, whole=True)
    assert growing.text == operator.apply(raw)


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
        assert (found.text, found.apply("Yes.")) == (f'ends with "{name}"', f"Yes. {name}")


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
        [(f"Boil the rice {n} times in a pot.", f"Take the bus {n} to town, it is near.") for n in range(9)],
        [("You go.", f"{'I' if n < 3 else 'You'} go{' now' * (n > 2)} to number {n}.") for n in range(8)],
        [
            (f"Bake it at {f} °F for long.", f"Bake it at {c} °C for long.")
            for f, c in ((375, 190), (400, 204), (350, 177))
        ]
        * 3,
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
    start = time.thread_time()
    other = "".join(text[n : n + 7] + "ab"[n % 2] for n in range(0, len(text) - len(text) // 7, 7))
    induce([(text, other), (text, text[:-11])] * 32)
    Operator("Dear Ann, ", " Best, Ann", replaced={"a": "", "x y": "z"}, no_closing=".").apply(text)
    assert time.thread_time() - start < 10


def test_answers_that_have_the_change_already_do_not_outvote_it() -> None:
    """Once answers are served with a signature, later edits of them are about other things."""
    signed = [(text, f"{text} Best, Ann") for text in _EDITED[:5]]
    later = [(f"{text} Best, Ann", f"Well. {text} Best, Ann") for text in _EDITED[5:13]]
    for count in range(9):
        found = induce(signed + later[:count])
        assert found is not None
        assert found.ends == " Best, Ann"
    assert found.begins == "Well. "


@pytest.mark.parametrize("count", [3, 10])
def test_two_edits_that_take_the_change_off_end_it_and_three_begin_another(count: int) -> None:
    signed = [(text, f"{text} Best, Ann") for text in _EDITED[:count]]
    off = [(new, old) for old, new in signed]
    assert induce(signed + off[:1]) is not None
    assert induce(signed + off[:2]) is None
    again = [(text, f"{text} Yours, Ann") for text in _EDITED[10:13]]
    found = induce(signed + off[:2] + again)
    assert found is not None
    assert found.ends == " Yours, Ann"


@pytest.mark.parametrize("ending", [" Yours, Ann", " Cheers, Benny!", "\n\nAnn"])
def test_three_edits_that_put_another_ending_in_the_place_of_the_first_are_enough(ending: str) -> None:
    signed = [(text, f"{text} Best, Ann") for text in _EDITED[:3]]
    found = induce(signed + [(f"{text} Best, Ann", text + ending) for text in _EDITED[3:6]])
    assert found is not None
    assert found.apply("Yes.") == "Yes." + ending


def test_a_change_that_rewritten_answers_keep_is_kept() -> None:
    signed = [(text, f"{text} Best, Ann") for text in _EDITED[:3]]
    rewritten = [(f"{text} Best, Ann", f"Quite something else {n}. Best, Ann") for n, text in enumerate(_EDITED[3:6])]
    found = induce(signed + rewritten)
    assert found is not None
    assert found.ends == " Best, Ann"


@pytest.mark.parametrize("closing", [" Cheers, Kim", "\n\nYours,\nKim"])
def test_a_closing_of_answers_that_were_written_anew_is_found(closing: str) -> None:
    anew = ["Try soup with bread.", "It is mild at 20 °C!", "Yes, until 5 pm.", "Take a coat."]
    pairs = [(old, new + closing) for old, new in zip(_EDITED, anew, strict=False)]
    found = induce(pairs)
    assert found == Operator(ends=closing)
    assert induce([(old, new) for old, new in zip(_EDITED, anew, strict=False)]) is None
    assert induce([(old, f"{new} It is fine.") for old, new in zip(_EDITED[:2], anew, strict=False)]) is None


def test_code_stays_as_it_is_and_an_ending_stands_behind_it() -> None:
    operator = Operator(ends=" Best, Ann", replaced={"!": ".", "you": "one"}, case="lower", max_sentences=1)
    code = "```python\nif a != b: return True  # You\n```"
    assert operator.apply(f"Do You see!\n{code}") == f"do one see.\n{code}\n\nBest, Ann"
    assert operator.apply("Set `X != True`, You!") == "set `X != True`, one. Best, Ann"
    for text in (f"Do You see!\n{code}", f"Do it!\n{code}\nYou see!", "Set `X`."):
        assert operator.shown(operator.apply(text))


def test_numbers_of_lists_and_abbreviations_end_no_sentence() -> None:
    one = Operator(max_sentences=1)
    assert one.apply("1. Wash the rice.\n2. Boil it.") == "1. Wash the rice."
    assert one.apply("Dr. Smith is in. Ask her.") == "Dr. Smith is in."
    assert one.apply("It costs approx. 5 dollars. Pay here.") == "It costs approx. 5 dollars."


def test_a_part_is_left_out_by_its_key() -> None:
    found = Operator("Hi. ", " Bye.", replaced={"tea": "water", "you": ""}, case="lower")
    assert found.parts.keys() == {
        "edit:begins:Hi. ",
        "edit:ends: Bye.",
        "edit:case:lower",
        "edit:replaced:tea",
        "edit:replaced:you",
    }
    left = found.without(["edit:begins:Hi. ", "edit:replaced:you", "end:!"])
    assert left == Operator(ends=" Bye.", replaced={"tea": "water"}, case="lower")
    assert found.without(found.parts) is None


_OPERATORS = [
    Operator("Hello there! "),
    Operator(ends="\n\nSincerely, Ben."),
    Operator(case="lower", replaced={"of course": "sure"}),
    Operator(max_sentences=2),
    Operator(no_closing="?"),
    Operator(no_opening="."),
    Operator(no_opening="!", case="lower"),
    Operator(end_mark="!"),
    Operator("Dear Ann, ", small_start=True),
]


@pytest.mark.parametrize("operator", _OPERATORS, ids=lambda each: each.text)
@given(data=st.data())
def test_a_growing_answer_is_edited_as_a_whole_one_and_takes_nothing_back(
    operator: Operator, data: st.DataObject
) -> None:
    raw = data.draw(st.sampled_from(_ANSWERS))
    grows_as_a_whole(operator, raw, data.draw(st.sets(st.integers(1, len(raw)), max_size=20)))


@pytest.mark.parametrize(
    "raw",
    [
        "It is 4 now. Best regards, Ann Lee",
        "It is 4.\n\nbest regards,\nann lee",
        "No. Best regards, Ann Lee" + " Best regards, Ann Lee",
    ],
)
@pytest.mark.parametrize("ends", [" Best regards, Ann Lee", "\n\nBest regards,\nAnn Lee"])
def test_an_ending_that_the_model_writes_itself_is_streamed_once(raw: str, ends: str) -> None:
    operator = Operator(ends=ends)
    edited = EditedText(operator)
    text = "Some words come first, so that there is something to send. " + raw
    for end in range(len(text)):
        edited.push(text[:end])
    assert edited.text
    edited.end(text, whole=True)
    assert edited.text == operator.apply(text)


def test_a_growing_answer_leaves_early_and_one_that_is_cut_gets_no_ending() -> None:
    edited = EditedText(Operator("Hi. ", " Bye.", case="lower"))
    text = "Boil the water first, then salt it well before the pasta goes in. "
    edited.push(text)
    assert edited.text.startswith("Hi. boil the water first")
    edited.end(text.rstrip(), whole=False)
    assert edited.text == "Hi. " + text.rstrip().lower()
