"""Prompts that wait together and begin alike are computed once, and no prompt waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edged.cache.inflight_prefixes import InflightPrefixes
from edged.cache.prefix_trie import Key
from tests.cache.integrity import check_prefixes, waits

BASE = Key(None, 0)
ALICE = Key("alice", 1)
SIZE = 4


def make(cached: int = 0) -> InflightPrefixes:
    return InflightPrefixes(SIZE, lambda key, tokens: cached)


def prompt(text: str, tail: int = 1) -> tuple[int, ...]:
    """One full page per letter, then `tail` tokens that nobody shares."""
    return (*(ord(letter) for letter in text for _ in range(SIZE)), *range(1000, 1000 + tail))


def enter(pending: InflightPrefixes, name: int, text: str, due: float | None = None, key: Key = BASE) -> int | None:
    return pending.enter(name, key, prompt(text), (float(name) if due is None else due, name))


def test_a_prompt_waits_for_the_one_ahead_until_their_shared_pages_are_computed() -> None:
    pending = make()
    assert enter(pending, 1, "abcd") is None
    assert enter(pending, 2, "abxy") == 1
    assert waits(pending, 2)
    assert pending.followed(1)
    assert pending.computed(1, SIZE) == []
    assert pending.computed(1, 2 * SIZE - 1) == []
    assert pending.computed(1, 2 * SIZE) == [2]
    assert not waits(pending, 2)
    assert not pending.followed(1)
    check_prefixes(pending)


def test_shared_beginnings_are_followed_depth_first() -> None:
    pending = make()
    enter(pending, 1, "abcd")
    assert enter(pending, 2, "abxy") == 1
    assert enter(pending, 3, "abxz") == 2, "it shares more with 2 than with 1"
    assert pending.computed(1, 4 * SIZE) == [2]
    assert pending.computed(2, 3 * SIZE) == [3]
    check_prefixes(pending)


def test_nobody_waits_for_less_than_a_page_for_what_is_cached_or_for_another_key() -> None:
    pending = make()
    enter(pending, 1, "abcd")
    assert pending.enter(2, BASE, (*prompt("a")[: SIZE - 1], 7, 7), (2.0, 2)) is None
    assert enter(pending, 3, "abcd", key=ALICE) is None
    warm = make(cached=2 * SIZE)
    enter(warm, 1, "abcd")
    assert enter(warm, 2, "abxy") is None
    assert enter(warm, 3, "abcx") == 1


def test_equal_prompts_leave_the_last_token_to_each() -> None:
    pending = make()
    whole = prompt("abc", tail=0)
    assert pending.enter(1, BASE, whole, (1.0, 1)) is None
    assert pending.enter(2, BASE, whole, (2.0, 2)) == 1
    assert pending.enter(3, BASE, whole, (3.0, 3)) == 1
    assert pending.computed(1, 2 * SIZE) == [2, 3], "the third page holds the last token"
    assert pending.enter(4, BASE, prompt("a", tail=0), (4.0, 4)) is None


def test_a_prompt_that_is_due_sooner_does_not_wait_for_one_that_is_due_later() -> None:
    pending = make()
    enter(pending, 1, "abcdefgh", due=20.0)
    assert enter(pending, 2, "abx", due=1.0) is None
    assert enter(pending, 3, "aby", due=2.0) == 2, "the second one that is due soon waits for the first"
    check_prefixes(pending)


def test_followers_of_one_that_leaves_find_the_next_leader() -> None:
    pending = make()
    enter(pending, 1, "abcd")
    for name, text in ((2, "abxy"), (3, "abxz"), (4, "abxyq"), (5, "azzz")):
        enter(pending, name, text)
    assert pending.leave(1) == [2]
    assert waits(pending, 3)
    assert pending.computed(2, SIZE) == [5]
    assert pending.computed(2, 5 * SIZE) == [3, 4]
    check_prefixes(pending)


def test_followers_of_one_that_leaves_go_on_where_the_cache_has_what_the_next_leader_would_compute() -> None:
    cached = [0]
    pending = InflightPrefixes(SIZE, lambda key, tokens: cached[0])
    for name, text in ((1, "abcd"), (2, "abxy"), (3, "abxz")):
        enter(pending, name, text)
    cached[0] = 2 * SIZE
    assert pending.leave(2) == [3]
    assert not waits(pending, 3)


def test_one_that_waits_may_leave_and_its_followers_move_up() -> None:
    pending = make()
    enter(pending, 1, "abcd")
    enter(pending, 2, "abxy")
    enter(pending, 3, "abxz")
    assert pending.leave(2) == []
    assert pending.computed(1, 2 * SIZE) == [3]
    assert pending.leave(7) == []
    assert pending.computed(7, 100) == []


def test_one_that_is_scheduled_already_is_only_waited_for() -> None:
    pending = make()
    enter(pending, 1, "abcd")
    assert pending.enter(2, BASE, prompt("abcd"), (2.0, 2), waits=False) is None
    assert enter(pending, 3, "abcd") == 1
    assert pending.leave(1) == []
    assert pending.leave(2) == [3]


def test_two_of_one_name_are_refused() -> None:
    pending = make()
    enter(pending, 1, "ab")
    with pytest.raises(ValueError, match="prompt 1 is pending already"):
        enter(pending, 1, "ab")


def test_a_thousand_that_wait_are_all_handed_on() -> None:
    rng = np.random.default_rng(0)
    pending = InflightPrefixes(16, lambda key, tokens: 0)
    common = rng.integers(0, 50_000, 500).tolist()
    prompts = [
        (*common[: int(rng.integers(0, 500))], *rng.integers(0, 50_000, 1_000).tolist())[:1_000] for _ in range(1_100)
    ]
    for name, tokens in enumerate(prompts):
        pending.enter(name, BASE, tokens, (float(name), name))
    check_prefixes(pending)
    # All of them are computed, each handing its followers on.
    ready = [name for name in range(len(prompts)) if not waits(pending, name)]
    for name in ready:
        ready += pending.computed(name, 1_000)
        ready += pending.leave(name)
    assert sorted(ready) == list(range(len(prompts)))
    assert not pending._prompts
    assert not pending._roots


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
keys = st.sampled_from([BASE, ALICE])


class PendingMachine(RuleBasedStateMachine):
    """A scheduler computes whoever does not wait, in any order; a plain comparison of prompts says who must wait."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[Key, set[tuple[int, ...]]] = {BASE: set(), ALICE: set()}
        self.pending = InflightPrefixes(2, self.covered)
        self.prompts: dict[int, tuple[Key, tuple[int, ...], tuple[float, int]]] = {}
        self.scheduled: dict[int, int] = {}
        self.names = 0

    def covered(self, key: Key, tokens: tuple[int, ...]) -> int:
        end = 0
        while end + 2 <= len(tokens) and tokens[: end + 2] in self.cached[key]:
            end += 2
        return end

    def shared(self, name: int, other: int) -> int:
        """Pages that `name` could have from `other`."""
        (key, tokens, _), (other_key, others, _) = self.prompts[name], self.prompts[other]
        pages = 0
        while (
            key == other_key
            and 2 * (pages + 1) < len(tokens)
            and 2 * (pages + 1) <= len(others)
            and tokens[: 2 * (pages + 1)] == others[: 2 * (pages + 1)]
        ):
            pages += 1
        return pages

    def release(self, names: list[int]) -> None:
        for name in names:
            assert name not in self.scheduled
            self.scheduled[name] = 0

    @rule(key=keys, tokens=prompts, due=st.integers(0, 3))
    def come(self, key: Key, tokens: tuple[int, ...], due: int) -> None:
        name = self.names = self.names + 1
        self.prompts[name] = (key, tokens, (float(due), name))
        ahead = [other for other in self.prompts if self.prompts[other][2] < self.prompts[name][2]]
        most = max((self.shared(name, other) for other in ahead), default=0)
        leader = self.pending.enter(name, key, tokens, (float(due), name))
        if most <= self.covered(key, tokens) // 2:
            assert leader is None
            self.release([name])
        else:
            assert leader in ahead
            assert self.shared(name, leader) == most

    def one(self, data: st.DataObject, names: list[int]) -> int:
        return names[data.draw(st.integers(0, len(names) - 1))]

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        name = self.one(data, list(self.scheduled))
        key, tokens, _ = self.prompts[name]
        done = self.scheduled[name] = min(self.scheduled[name] + count, len(tokens))
        if self.pending.followed(name) or done == len(tokens):
            self.cached[key] |= {tokens[:end] for end in range(2, done + 1, 2)}
        self.release(self.pending.computed(name, done))
        if done == len(tokens):
            self.go(name)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.go(self.one(data, list(self.prompts)))

    def go(self, name: int) -> None:
        del self.prompts[name]
        self.scheduled.pop(name, None)
        self.release(self.pending.leave(name))

    @rule(key=keys)
    def evict(self, key: Key) -> None:
        self.cached[key].clear()

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        check_prefixes(self.pending)
        for name in self.prompts:
            assert waits(self.pending, name) == (name not in self.scheduled)

    def teardown(self) -> None:
        """Whatever happened, everybody is computed in the end."""
        while self.prompts:
            assert self.scheduled, "all wait"
            self.go(next(iter(self.scheduled)))
        assert not self.pending._prompts


TestPendingMachine = PendingMachine.TestCase
TestPendingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
