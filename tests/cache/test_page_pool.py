"""The page pool gives each page to as many holders as it counted, and to nobody else."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edged.cache.page_pool import OutOfPages, PagePool
from tests.cache.integrity import check_pool


def test_allocation_is_all_or_nothing_and_says_what_is_missing() -> None:
    pool = PagePool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(OutOfPages, match="wanted 2 pages, 1 are free") as caught:
        pool.allocate(2)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert pool.free_pages == 1
    pool.release(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.free_pages == 1
    pool.release(pages)
    assert pool.free_pages == 2


def test_releasing_or_retaining_a_free_page_is_an_error() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(ValueError, match="released more often"):
        pool.release([0])
    with pytest.raises(ValueError, match="page 1 is free"):
        pool.retain([1])
    check_pool(pool)


def test_a_holder_cannot_release_the_tries_reference() -> None:
    pool = PagePool(1, 16)
    (page,) = pool.allocate(1)
    pool.adopt(page)
    pool.release([page])
    assert pool.evictable_pages == 1
    with pytest.raises(ValueError, match="released more often"):
        pool.release([page])
    with pytest.raises(ValueError, match="already"):
        pool.adopt(page)
    assert pool.abandon(page)
    with pytest.raises(ValueError, match="not in the prefix trie"):
        pool.abandon(page)
    assert (pool.evictable_pages, pool.free_pages) == (0, 1)


def test_pages_move_below_a_bound_or_the_missing_ones_are_counted() -> None:
    pool = PagePool(6, 16)
    held = pool.allocate(5)
    pool.release(held[:2])
    moved = pool.places(held[3:], below=2)
    assert sorted(moved.values()) == sorted(held[:2])
    with pytest.raises(OutOfPages, match="wanted 3 pages, 2 are free") as caught:
        pool.places(held[2:], below=2)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    # Page 5 is free and no place below itself.
    with pytest.raises(OutOfPages):
        pool.places(held[2:], below=5)
    pool.move(moved)
    assert pool.touched == 5
    pool.resize(3)
    assert pool.touched == 3
    for capacity in (0, 7):
        with pytest.raises(ValueError, match=f"a capacity of {capacity} pages is not between 1 and 6"):
            pool.resize(capacity)


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        PagePool(0, 16)


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations leaves the pool equal to a plain list of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, 4)
        self.holders: list[list[int]] = []
        self.adopted: set[int] = set()

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        free = self.pool.free_pages
        if count > free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            assert self.pool.free_pages == free
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & {page for holder in self.holders for page in holder}
        assert not set(pages) & self.adopted
        self.holders.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holders:
            pages = data.draw(st.sampled_from(self.holders))
            self.pool.retain(pages)
            self.holders.append(list(pages))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        candidates = sorted({page for holder in self.holders for page in holder} - self.adopted)
        if candidates:
            page = data.draw(st.sampled_from(candidates))
            self.pool.adopt(page)
            self.adopted.add(page)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        if self.adopted:
            page = data.draw(st.sampled_from(sorted(self.adopted)))
            self.adopted.remove(page)
            assert self.pool.abandon(page) == all(page not in holder for holder in self.holders)

    @rule(data=st.data(), capacity=st.integers(1, 6))
    def resize(self, data: st.DataObject, capacity: int) -> None:
        held = {page for holder in self.holders for page in holder} | self.adopted
        above = sorted(page for page in held if page >= capacity)
        if len(held) > capacity:
            with pytest.raises(OutOfPages):
                self.pool.places(above, capacity)
            with pytest.raises(ValueError, match="is held"):
                self.pool.resize(capacity)
            return
        moved = self.pool.places(above, capacity)
        self.pool.move(moved)
        assert sorted(moved) == above
        self.holders = [[moved.get(page, page) for page in holder] for holder in self.holders]
        self.adopted = {moved.get(page, page) for page in self.adopted}
        self.pool.resize(capacity)

    @invariant()
    def agrees_with_the_list_of_holders(self) -> None:
        check_pool(self.pool)
        held = [page for holder in self.holders for page in holder]
        for page in range(self.pool.pages):
            assert self.pool.references(page) == held.count(page) + (page in self.adopted)
        assert self.pool.evictable_pages == len(self.adopted - set(held))
        assert self.pool.free_pages == self.pool.capacity - len(self.adopted | set(held))
        assert all(page < self.pool.capacity for page in held)
        assert all(page < self.pool.touched for page in held)


TestPoolMachine = PoolMachine.TestCase
