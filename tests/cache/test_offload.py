"""What the prefix trie gives up comes back from the offload, for the same tokens and the same weights only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import Key, PrefixTrie
from tests.cache.integrity import check_trie
from tests.cache.shelf import Shelf
from tests.cache.test_prefix_trie import ALICE, BASE, cached

PROMPT = [1, 1, 2, 2, 3, 3]


def make(pages: int = 8, capacity: int = 8) -> tuple[PagePool, PrefixTrie, Shelf]:
    pool = PagePool(pages, 2)
    shelf = Shelf(capacity, {})
    return pool, PrefixTrie(pool, shelf), shelf


def test_evicted_pages_come_back_when_they_are_matched() -> None:
    pool, trie, shelf = make()
    for page, run in zip(cached(trie, pool, BASE, PROMPT), ("1", "2", "3"), strict=True):
        shelf.contents[page] = run
    assert trie.evict(3) == 3
    assert pool.free_pages == pool.pages
    assert trie.offloaded_pages == 3
    assert trie.covered(BASE, PROMPT) == 0
    assert trie.match(ALICE, [*PROMPT, 9]) == []
    shelf.contents.clear()
    pages = trie.match(BASE, [*PROMPT, 9])
    assert [shelf.contents[page] for page in pages] == ["1", "2", "3"]
    assert shelf.copies == {}
    assert (trie.stats.spilled_pages, trie.stats.restored_tokens, trie.stats.hit_tokens) == (3, 6, 6)
    check_trie(trie)
    pool.release(pages)
    assert pool.evictable_pages == 3


def test_only_as_many_come_back_as_pages_may_be_taken() -> None:
    pool, trie, _ = make(pages=6)
    cached(trie, pool, BASE, PROMPT)
    trie.evict(3)
    pool.allocate(2)
    pages = trie.match(BASE, [*PROMPT, 9], reserve=2)
    assert len(pages) == 2
    pool.release(pages)
    check_trie(trie)
    assert trie.offloaded_pages == 1


def test_colder_pages_make_room_for_what_comes_back() -> None:
    pool, trie, _ = make(pages=3)
    cached(trie, pool, BASE, PROMPT)
    trie.evict(3)
    cached(trie, pool, BASE, [7, 7, 8, 8])
    pages = trie.match(BASE, [*PROMPT, 9])
    assert len(pages) == 3
    assert trie.offloaded_pages == 2
    check_trie(trie)


def test_no_more_is_evicted_than_what_comes_back_needs() -> None:
    pool, trie, _ = make(pages=6)
    cached(trie, pool, BASE, PROMPT)
    trie.evict(3)
    cached(trie, pool, BASE, [7, 7, 8, 8, 9, 9, 4, 4])
    pages = trie.match(BASE, [*PROMPT, 9])
    assert len(pages) == 3
    # Two pages were free, so one of the four was evicted for the third.
    assert (trie.offloaded_pages, pool.evictable_pages) == (1, 3)


def test_a_full_offload_drops_what_was_not_used_for_longest() -> None:
    pool, trie, _ = make(capacity=2)
    cached(trie, pool, BASE, [1, 1, 2, 2])
    trie.evict(2)
    cached(trie, pool, BASE, [3, 3])
    trie.evict(1)
    assert trie.offloaded_pages == 2
    pages = trie.match(BASE, [1, 1, 2, 2, 9])
    assert len(pages) == 1, "the leaf went before its parent"
    pool.release(pages)
    assert len(trie.match(BASE, [3, 3, 9])) == 1
    check_trie(trie)


def test_an_offload_that_cannot_now_costs_the_pages_or_the_hit_but_nothing_else() -> None:
    pool, trie, shelf = make()
    cached(trie, pool, BASE, PROMPT)
    trie.evict(2)
    shelf.busy = True
    assert len(trie.match(BASE, [*PROMPT, 9])) == 1
    check_trie(trie)
    pool.release([node.page for node in trie._recency])
    assert trie.evict(1) == 1
    assert trie.offloaded_pages == 0, "what lay below the dropped page is not found any more"
    assert shelf.copies == {}
    check_trie(trie)


def test_a_page_behind_one_that_does_not_come_back_is_not_kept_for_nobody() -> None:
    pool, trie, shelf = make()
    cached(trie, pool, BASE, [1, 1])
    running = pool.allocate(2)
    trie.insert(BASE, [1, 1, 2, 2], running)  # adopts only the second page: the first is cached already
    assert trie.evict(1) == 1
    shelf.busy = True
    assert trie.match(BASE, [1, 1, 2, 2, 9]) == []
    pool.release(running)
    assert pool.evictable_pages == 1
    shelf.busy = False
    assert trie.match(BASE, [1, 1, 2, 2, 9])[1] == running[1]
    check_trie(trie)


def test_a_replaced_version_drops_its_copies() -> None:
    pool, trie, shelf = make()
    cached(trie, pool, ALICE, PROMPT)
    cached(trie, pool, BASE, [1, 1])
    trie.evict(4)
    trie.expire(ALICE)
    assert trie.offloaded_pages == len(shelf.copies) == 1
    assert trie.match(ALICE, [*PROMPT, 9]) == []
    check_trie(trie)


def test_what_was_computed_again_takes_the_place_of_its_copy() -> None:
    pool, trie, shelf = make()
    cached(trie, pool, BASE, PROMPT)
    trie.evict(3)
    again = cached(trie, pool, BASE, PROMPT)
    assert shelf.copies == {}
    assert trie.match(BASE, [*PROMPT, 9]) == again
    check_trie(trie)


@dataclass
class Running:
    key: Key
    token_ids: list[int]
    pages: list[int]


keys = st.sampled_from([BASE, ALICE])


class OffloadMachine(RuleBasedStateMachine):
    """Every page is written with its key and all tokens up to its end; whatever is matched must read so."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[int, object] = {}
        self.shelf = Shelf(4, self.contents)
        self.pool = PagePool(8, 2)
        self.trie = PrefixTrie(self.pool, self.shelf)
        self.running: list[Running] = []

    def holds(self, key: Key, tokens: Sequence[int], index: int) -> object:
        return key, tuple(tokens[: 2 * (index + 1)])

    @rule(key=keys, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), reserve=st.integers(0, 3))
    def start(self, key: Key, tokens: list[int], reserve: int) -> None:
        pages = self.trie.match(key, tokens, reserve)
        for index, page in enumerate(pages):
            assert self.contents[page] == self.holds(key, tokens, index)
        missing = -(-len(tokens) // 2) - len(pages)
        self.trie.evict(missing - self.pool.free_pages)
        if missing > self.pool.free_pages:
            self.pool.release(pages)
            return
        fresh = self.pool.allocate(missing)
        for index, page in enumerate(fresh, len(pages)):
            self.contents[page] = self.holds(key, tokens, index)
        self.running.append(Running(key, tokens, pages + fresh))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), shared=st.booleans())
    def finish(self, data: st.DataObject, shared: bool) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if shared:
            self.trie.insert(sequence.key, sequence.token_ids, sequence.pages)
        self.pool.release(sequence.pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        sequence = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        self.trie.insert(sequence.key, sequence.token_ids, sequence.pages)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        free, wanted = self.pool.free_pages, min(count, self.pool.evictable_pages)
        freed = self.trie.evict(count)
        assert freed >= wanted
        assert self.pool.free_pages == free + freed

    @rule(key=keys)
    def expire(self, key: Key) -> None:
        self.trie.expire(key)
        assert self.trie.match(key, [0, 0, 0]) == []

    @rule(busy=st.booleans())
    def busy(self, busy: bool) -> None:
        self.shelf.busy = busy

    @invariant()
    def nothing_leaks(self) -> None:
        check_trie(self.trie)
        assert len(self.shelf.copies) == self.trie.offloaded_pages <= 4
        held = {page for sequence in self.running for page in sequence.pages}
        assert self.pool.free_pages + self.pool.evictable_pages + len(held) == 8


TestOffloadMachine = OffloadMachine.TestCase
TestOffloadMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
