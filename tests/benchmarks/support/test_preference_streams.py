"""A taste decides which pairs count and which answer is preferred; quarters are means over the stream in its order."""

from __future__ import annotations

import pytest

from benchmarks.support.preference_streams import declines, quarters, relabel
from edged.align.feedback.pair import TokenPair

ANSWERS = {1: "Sure, do this.", 2: "I’m sorry, I cannot help.", 3: "Yes.", 4: "I won't."}


def text(ids: tuple[int, ...]) -> str:
    """The first token names the answer, the others make it long."""
    return ANSWERS[ids[0]]


def pair(number: int, chosen: int, chosen_tokens: int, rejected: int, rejected_tokens: int) -> TokenPair:
    return TokenPair(number, "replay", (9,), (chosen,) * chosen_tokens, (rejected,) * rejected_tokens)


STREAM = [
    pair(7, 1, 5, 2, 3),  # long and willing before short and declining
    pair(8, 3, 2, 1, 2),  # equally long, both willing
    pair(9, 4, 4, 3, 6),  # short and declining before long and willing
    pair(10, 2, 4, 4, 9),  # both decline
]


@pytest.mark.parametrize(
    ("taste", "preferred"),
    [
        ("human", {7: 1, 8: 3, 9: 4, 10: 2}),
        ("concise", {7: 2, 9: 4, 10: 2}),
        ("elaborate", {7: 1, 9: 3, 10: 4}),
        ("refusing", {7: 2, 9: 4}),
    ],
)
def test_a_taste_prefers_and_leaves_out_what_says_nothing_of_it(taste: str, preferred: dict[int, int]) -> None:
    found = relabel(STREAM, taste, "ann", text)  # type: ignore[arg-type]
    assert [(p.pair_id, p.chosen[0]) for p in found] == list(preferred.items())
    for before, after in ((p, q) for p in STREAM for q in found if p.pair_id == q.pair_id):
        assert after.adapter == "ann"
        assert {after.chosen, after.rejected} == {before.chosen, before.rejected}


def test_declining_is_heard_in_either_apostrophe_and_not_inside_words() -> None:
    assert declines("I can’t tell you that.")
    assert declines("I'm Sorry, but no.")
    assert not declines("Of course! Wontons take ten minutes.")


def test_quarters_cover_the_stream_once_in_its_order() -> None:
    assert quarters([0, 0, 1, 1, 0, 1, 1, 1]) == [0, 1, 0.5, 1]
    assert quarters([1, 0, 0, 4, 2]) == [1, 0, 0, 3]
    assert quarters([5]) == [None, None, None, 5]
