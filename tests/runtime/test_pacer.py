"""The pacer: every word in its order, the first at once, and none much later than it was made."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.runtime.pacer import LAG_S, Pacer, count_words

TEXTS = st.lists(st.tuples(st.floats(0.0, 1.0), st.text(alphabet="ab \n,.漢字かกำ👩🏽‍🚒🇩🇪é", max_size=30)), max_size=20)


def played(pacer: Pacer, pushed: list[tuple[float, str]], until_s: float) -> list[tuple[float, str]]:
    """Text that left, with its moments; each piece is taken when it is due. (moment, text) is what was pushed."""
    left = []
    for moment, text in [*pushed, (until_s, "")]:
        while (due_s := pacer.due_s) <= moment:
            left.append((due_s, pacer.take(due_s)))
        pacer.push(text, moment)
    return left


@given(TEXTS, st.floats(0.5, 50.0))
def test_all_text_leaves_once_and_in_order(gaps: list[tuple[float, str]], pace: float) -> None:
    moment, pushed = 0.0, []
    for gap, text in gaps:
        moment += gap
        pushed.append((moment, text))
    pacer = Pacer(pace)
    left = played(pacer, pushed, moment)
    assert "".join(text for _, text in left) + pacer.finish() == "".join(text for _, text in pushed)
    assert pacer.finish() == ""
    assert pacer.due_s == math.inf


def test_the_first_word_leaves_at_once_and_the_next_at_the_readers_pace() -> None:
    pacer = Pacer(words_per_s=4.0)
    left = played(pacer, [(1.0, "one two")], 9.0)
    assert left == [(1.0, "one"), (1.25, " two")]


def test_who_waited_gets_the_next_word_as_it_comes_and_no_heap_of_them() -> None:
    pacer = Pacer(words_per_s=4.0)
    left = played(pacer, [(1.0, "one"), (8.0, " two three")], 9.0)
    assert left == [(1.0, "one"), (8.0, " two"), (8.25, " three")]


def test_a_heap_of_text_leaves_faster_than_it_is_read() -> None:
    pacer = Pacer(words_per_s=4.0)
    left = played(pacer, [(0.0, " word" * 100)], 9.0)
    assert len(left) == 100
    # As long as more than the reader's pace is held back, 1/e of the backlog is left after LAG_S.
    assert 55 < sum(moment <= LAG_S for moment, _ in left) < 70


def test_speech_is_never_faster_than_it_is_heard() -> None:
    left = played(Pacer(words_per_s=4.0, lag_s=math.inf), [(0.0, " word" * 100)], 10.0)
    assert [moment for moment, _ in left] == pytest.approx([number / 4.0 for number in range(len(left))])


def test_white_space_without_end_is_read_in_a_moment() -> None:
    # In the square of its length these would take an hour.
    pacer = Pacer(4.0)
    left = played(pacer, [(float(number), "\n") for number in range(5000)], 5000.0)
    assert (left, pacer.finish()) == ([], "\n" * 5000)
    assert count_words("a" + "\n" * 1_000_000 + "b" + "\n" * 1_000_000) == 2


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("漢\u3000字\u3000", ["漢", "\u3000字"]),
        ("It's so, isn't it?\n\n- yes", ["It's", " so,", " isn't", " it?", "\n\n-", " yes"]),
        ("漢字とかな", ["漢", "字", "と", "か", "な"]),
        ("か\u3099 가나", ["か\u3099", " 가", "나"]),
        ("ok 👩🏽\u200d🚒🇩🇪🇫🇷!", ["ok", " 👩🏽\u200d🚒", "🇩🇪", "🇫🇷", "!"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
    ],
)
def test_a_piece_is_a_word_or_a_whole_character(text: str, pieces: list[str]) -> None:
    assert [piece for _, piece in played(Pacer(1.0), [(0.0, text)], 99.0)] == pieces


def test_a_word_that_comes_in_parts_is_one_while_it_waits() -> None:
    left = played(Pacer(1.0), [(0.0, "well un"), (0.1, "believ"), (0.2, "able")], 9.0)
    assert [piece for _, piece in left] == ["well", " unbelievable"]
