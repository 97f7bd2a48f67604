"""The prefix trie returns what was computed for equal tokens by equal weights, and gives pages back under pressure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import Key, PrefixTrie
from tests.cache.integrity import check_trie

BASE = Key(None, 0)
ALICE = Key("alice", 1)


def cached(trie: PrefixTrie, pool: PagePool, key: Key, tokens: Sequence[int]) -> list[int]:
    """Run a sequence of `tokens` to its end: its pages, which only the trie holds afterwards."""
    pages = pool.allocate(-(-len(tokens) // pool.page_size))
    trie.insert(key, tokens, pages)
    pool.release(pages)
    return pages


def make(pages: int = 8, page_size: int = 2) -> tuple[PagePool, PrefixTrie]:
    pool = PagePool(pages, page_size)
    return pool, PrefixTrie(pool)


def test_tenants_find_nothing_of_each_other() -> None:
    pool = PagePool(8, 2)
    trie = PrefixTrie(pool)
    tokens = [1, 2, 3, 4, 5]
    for tenant in ("ann", "bob"):
        cached(trie, pool, Key("shared", 1, tenant), tokens[:4])
        cached(trie, pool, Key(None, 0, tenant), tokens[:4])
    assert trie.match(Key("shared", 1), tokens) == trie.match(Key("shared", 1, "cy"), tokens) == []
    assert len(trie.match(Key("shared", 1, "ann"), tokens, counted=False)) == 2
    trie.expire_all("ann")
    assert trie.match(Key(None, 0, "ann"), tokens) == trie.match(Key("shared", 1, "ann"), tokens) == []
    assert trie.covered(Key(None, 0, "bob"), tokens) == 4
    trie.expire_versions("shared", 1)
    assert trie.covered(Key("shared", 1, "bob"), tokens) == 0
    assert trie.covered(Key(None, 0, "bob"), tokens) == 4


def test_where_all_share_a_forgotten_users_prefixes_go_whatever_adapter_computed_them() -> None:
    pool, trie = make(20)
    keys = [Key(None, 0), Key("ann", 1), Key("recipes", 3), Key(None, 0, "ann"), Key("recipes", 3, "ann")]
    for key in keys:
        cached(trie, pool, key, [1, 2, 3, 4])
    cached(trie, pool, Key("recipes", 3, "bob"), [1, 2, 3, 4])
    trie.expire_all("ann")
    assert [trie.covered(key, [1, 2, 3, 4, 5]) for key in keys] == [0] * len(keys)
    assert trie.covered(Key("recipes", 3, "bob"), [1, 2, 3, 4, 5]) == 4
    check_trie(trie)


def test_the_longest_cached_prefix_is_found_in_whole_pages() -> None:
    pool, trie = make()
    pages = cached(trie, pool, BASE, [1, 2, 3, 4, 5])
    assert trie.match(BASE, [1, 2, 3, 4, 5, 6]) == pages[:2]
    assert trie.match(BASE, [1, 2, 3, 9, 5, 6]) == pages[:1]
    assert trie.match(BASE, [9, 2, 3, 4]) == []
    check_trie(trie)


def test_one_token_is_always_left_to_compute() -> None:
    pool, trie = make()
    pages = cached(trie, pool, BASE, [1, 2, 3, 4])
    assert trie.match(BASE, [1, 2, 3, 4]) == pages[:1]
    assert trie.match(BASE, [1, 2]) == []
    assert trie.match(BASE, []) == []


def test_a_match_is_retained_for_the_caller() -> None:
    pool, trie = make(pages=3)
    cached(trie, pool, BASE, [1, 2, 3, 4])
    pages = trie.match(BASE, [1, 2, 3, 4, 5])
    assert pool.evictable_pages == 0
    assert trie.evict(2) == 0
    pool.release(pages)
    assert trie.evict(2) == 2


def test_nothing_is_shared_between_adapters_or_versions() -> None:
    pool, trie = make()
    cached(trie, pool, ALICE, [1, 2, 3, 4])
    assert trie.match(BASE, [1, 2, 3, 4, 5]) == []
    assert trie.match(Key("alice", 2), [1, 2, 3, 4, 5]) == []
    assert len(trie.match(ALICE, [1, 2, 3, 4, 5])) == 2


def test_the_page_that_was_cached_first_stays_and_the_copy_is_freed() -> None:
    pool, trie = make()
    first = cached(trie, pool, BASE, [1, 2, 3, 4])
    twin = pool.allocate(3)
    trie.insert(BASE, [1, 2, 3, 4, 5, 6], twin)
    pool.release(twin)
    assert trie.match(BASE, [1, 2, 3, 4, 5, 6, 7]) == [*first, twin[2]]
    assert pool.free_pages == pool.pages - 3


def test_the_least_recently_used_branch_is_evicted_from_its_leaves() -> None:
    pool, trie = make()
    old = cached(trie, pool, BASE, [1, 1, 2, 2])
    new = cached(trie, pool, BASE, [1, 1, 3, 3])
    pool.release(trie.match(BASE, [1, 1, 2, 2, 0]))
    assert trie.evict(1) == 1
    assert trie.match(BASE, [1, 1, 3, 3, 0]) == [old[0]], f"page {new[1]} was used before {old[1]}"
    assert trie.match(BASE, [1, 1, 2, 2, 0]) == old
    check_trie(trie)


def test_a_parent_that_nobody_holds_can_be_evicted_below_a_held_page() -> None:
    pool, trie = make()
    cached(trie, pool, BASE, [1, 2])
    running = pool.allocate(2)
    trie.insert(BASE, [1, 2, 3, 4], running)  # adopts only the second page: the first is cached already
    assert pool.evictable_pages == 1
    assert trie.evict(5) == 1
    check_trie(trie)
    assert trie.match(BASE, [1, 2, 3, 4, 5]) == []
    pool.release(running)
    assert pool.free_pages == pool.pages


def test_a_page_in_use_is_still_found_after_an_eviction() -> None:
    pool, trie = make()
    used = cached(trie, pool, BASE, [1, 2, 3, 4])
    idle = cached(trie, pool, BASE, [5, 6])
    running = trie.match(BASE, [1, 2, 3, 4, 0])
    cached(trie, pool, BASE, [7, 8])
    assert trie.evict(2) == 2
    assert trie.match(BASE, [5, 6, 0]) == [], f"page {idle} was idle"
    assert trie.match(BASE, [1, 2, 3, 4, 0]) == used == running


def test_no_more_pages_are_evicted_than_asked_for() -> None:
    pool, trie = make()
    cached(trie, pool, BASE, [1, 2])
    running = pool.allocate(2)
    trie.insert(BASE, [1, 2, 3, 4], running)
    cached(trie, pool, BASE, [5, 6])
    pool.release(trie.match(BASE, [1, 2, 0]))  # oldest first: [3, 4] in use, [5, 6], [1, 2]
    assert trie.evict(1) == 1
    pool.release(running)
    assert trie.evict(1) == 1
    assert len(trie.match(BASE, [1, 2, 3, 4, 0])) == 1


def test_expiring_a_version_frees_its_pages_and_leaves_the_running_ones_alone() -> None:
    pool, trie = make()
    running = pool.allocate(2)
    trie.insert(ALICE, [1, 2, 3, 4], running)
    cached(trie, pool, ALICE, [1, 2, 7, 8])
    kept = cached(trie, pool, BASE, [1, 2])
    assert trie.expire(ALICE) == 1
    assert trie.match(ALICE, [1, 2, 3, 4, 5]) == []
    assert trie.match(BASE, [1, 2, 3]) == kept
    assert trie.expire(ALICE) == 0
    pool.release(running)
    check_trie(trie)
    assert pool.free_pages == pool.pages - 1


def test_earlier_versions_are_found_newest_first_of_the_same_adapter_and_tenant() -> None:
    pool = PagePool(40, 2)
    trie, tokens = PrefixTrie(pool), [1, 2, 3, 4, 5, 6, 7]
    for version, count in ((1, 6), (3, 2), (9, 6)):
        cached(trie, pool, Key("ann", version), tokens[:count])
    for other in (Key(None, 0), Key("bob", 2), Key("ann", 2, "cy")):
        cached(trie, pool, other, tokens[:6])
    assert list(trie.earlier(Key("ann", 8), tokens)) == [(3, 2), (1, 6)]
    assert trie.reach(Key("ann", 9), tokens) == 6


@pytest.mark.parametrize("keeps_states", [False, True])
def test_a_copy_takes_the_place_of_earlier_ones_as_far_as_a_prompt_goes_on_from_it(keeps_states: bool) -> None:
    pool, released = PagePool(40, 2), list[int]()
    trie = PrefixTrie(pool, release_states=released.extend if keeps_states else None)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for version in (1, 2):
        cached(trie, pool, Key("ann", version), tokens[:6])
    cached(trie, pool, Key("ann", 1), [*tokens[:2], 8, 9])
    if keeps_states:
        trie.keep_state(Key("ann", 1), tokens[:6], 5)
        trie.supersede(Key("ann", 2), tokens[:6])
        assert trie.reach(Key("ann", 1), tokens) == 6, "the newer copy has no states to go on from"
        trie.keep_state(Key("ann", 2), tokens[:6], 7)
    trie.supersede(Key("ann", 2), tokens[:6])
    assert trie.covered(Key("ann", 1), tokens) == 2, "another talk begins alike"
    assert trie.covered(Key("ann", 1), [1, 2, 8, 9]) == 4
    assert trie.covered(Key("ann", 2), tokens) == 6
    assert released == ([5] if keeps_states else [])
    check_trie(trie)


def test_a_page_of_another_version_is_never_taken_over() -> None:
    pool, trie = make()
    pages = pool.allocate(3)
    trie.insert(ALICE, [1, 2, 3, 4], pages)
    trie.insert(Key("alice", 2), [1, 2, 3, 4, 5, 6], pages)
    check_trie(trie)
    assert trie.match(Key("alice", 2), [1, 2, 3, 4, 5, 6, 7]) == []


def test_the_hit_share_is_counted() -> None:
    pool, trie = make()
    cached(trie, pool, BASE, [1, 2, 3, 4])
    trie.match(BASE, [1, 2, 3, 4, 5])
    trie.match(BASE, [9, 9, 9])
    assert (trie.stats.prompt_tokens, trie.stats.hit_tokens) == (2 * 4, 4)
    pool.release([0, 1])
    trie.evict(1)
    assert trie.stats.evicted_pages == 1


def test_a_lookup_is_linear_in_the_prompt_however_deep() -> None:
    pool, trie = make(pages=20_000, page_size=1)
    cached(trie, pool, BASE, list(range(20_000)))
    pages = trie.match(BASE, list(range(20_001)))
    assert len(pages) == 20_000
    pool.release(pages)
    assert trie.expire(BASE) == 20_000


@dataclass
class Running:
    key: Key
    token_ids: list[int]
    pages: list[int]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
keys = st.sampled_from([BASE, ALICE, Key("alice", 2)])


class TrieMachine(RuleBasedStateMachine):
    """Sequences come, share, are cached and go; a plain dict of (key, prefix) -> page says what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.trie = make(pages=10)
        self.running: list[Running] = []
        self.known: dict[tuple[Key, tuple[int, ...]], int] = {}

    def prefixes(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[: 2 * (index + 1)]) for index in range(count)]

    def forget_dropped_pages(self) -> None:
        self.known = {name: page for name, page in self.known.items() if self.pool.is_adopted(page)}

    @rule(key=keys, tokens=prompts)
    def start(self, key: Key, tokens: list[int]) -> None:
        expected = []
        for prefix in self.prefixes(tokens, (len(tokens) - 1) // 2):
            if (key, prefix) not in self.known:
                break
            expected.append(self.known[key, prefix])
        pages = self.trie.match(key, tokens)
        assert pages == expected
        missing = -(-len(tokens) // 2) - len(pages)
        if missing > self.pool.free_pages:
            evictable, free = self.pool.evictable_pages, self.pool.free_pages
            wanted = missing - free
            assert self.trie.evict(wanted) == min(wanted, evictable)
            assert self.pool.free_pages == free + min(wanted, evictable)
            self.forget_dropped_pages()
        if missing > self.pool.free_pages:
            self.pool.release(pages)
            return
        fresh = self.pool.allocate(missing)
        assert not set(fresh) & {page for other in self.running for page in other.pages}
        assert not set(fresh) & set(self.known.values())
        self.running.append(Running(key, tokens, pages + fresh))

    def draw_running(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        sequence = self.draw_running(data)
        self.insert(sequence.key, sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), key=keys)
    def cache_under_the_version_that_was_published_meanwhile(self, data: st.DataObject, key: Key) -> None:
        self.insert(key, self.draw_running(data))

    def insert(self, key: Key, sequence: Running) -> None:
        for prefix, page in zip(
            self.prefixes(sequence.token_ids, len(sequence.token_ids) // 2), sequence.pages, strict=False
        ):
            if (key, prefix) not in self.known:
                if page in self.known.values():
                    break
                self.known[key, prefix] = page
        self.trie.insert(key, sequence.token_ids, sequence.pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = self.draw_running(data)
        self.running.remove(sequence)
        self.pool.release(sequence.pages)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        free, evictable = self.pool.free_pages, self.pool.evictable_pages
        assert self.trie.evict(count) == min(count, evictable)
        assert self.pool.free_pages == free + min(count, evictable)
        self.forget_dropped_pages()

    @rule(key=keys)
    def expire(self, key: Key) -> None:
        free = self.pool.free_pages
        freed = self.trie.expire(key)
        assert self.pool.free_pages == free + freed
        self.known = {name: page for name, page in self.known.items() if name[0] != key}

    @invariant()
    def no_page_leaks_or_is_shared_wrongly(self) -> None:
        check_trie(self.trie)
        held = [page for sequence in self.running for page in sequence.pages]
        kept = set(self.known.values())
        assert len(kept) == len(self.known) == len(self.trie)
        for page in range(self.pool.pages):
            assert self.pool.references(page) == held.count(page) + (page in kept)
        assert self.pool.evictable_pages == len(kept - set(held))


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
