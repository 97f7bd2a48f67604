"""The prefix trie: finds the pages of a prompt's longest prefix that was computed before.

One node stands for one full page, so that a lookup hashes each page of the prompt once. A key says which weights
computed K/V, which depend on them, and for whom where tenants shall not see each other's; nothing is shared between two
keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from edged.cache.page_pool import PagePool


class Key(NamedTuple):
    """Who may use K/V: adapter and version; (None, 0) is the base model. `tenant` "" is everybody."""

    adapter: str | None
    version: int
    tenant: str = ""


@dataclass(slots=True)
class TrieStats:
    """What the lookups brought since the start; all in tokens, except pages."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    restored_tokens: int = 0
    """Those of the hits that were brought back from the spill."""
    evicted_pages: int = 0
    spilled_pages: int = 0
    """Those of the evicted pages that went to the spill."""


@dataclass(slots=True, eq=False)
class _TrieNode:
    """A cached page: `run` are its tokens, given the tokens of all nodes above it.

    It has a page, or a handle of the spill; a root, and a node that was dropped, has neither (-1, None).
    """

    key: Key
    run: tuple[int, ...]
    page: int
    parent: _TrieNode | None
    handle: int | None = None
    children: dict[tuple[int, ...], _TrieNode] = field(default_factory=dict)


class Spill(Protocol):
    """Keeps copies of pages under handles. The trie decides which copies are given up when it is full."""

    @property
    def full(self) -> bool:
        """Whether `save` finds no room until a handle is dropped."""

    def save(self, page: int) -> int | None:
        """A handle of a copy of `page`, which may be overwritten from now on; None when it cannot be taken now."""

    def load(self, handle: int, page: int) -> bool:
        """Copy back into `page`, which the caller has allocated; False when that cannot be done now, or at all."""

    def drop(self, handle: int) -> None:
        """Forget a copy."""


class PrefixTrie:
    """A radix trie of whole pages over one PagePool.

    Eviction is least recently used, a node before its parent. A page that only the trie holds can always be evicted:
    where a running sequence holds a page further down, that one merely stops being found. With a spill, what is evicted
    is kept there, and comes back when it is matched; what the spill has no room for is dropped, the oldest first.
    """

    def __init__(self, pool: PagePool, spill: Spill | None = None) -> None:
        self.stats = TrieStats()
        self._pool = pool
        self._spill = spill
        self._roots: dict[Key, _TrieNode] = {}
        self._recency: OrderedDict[_TrieNode, None] = OrderedDict()  # least recently used first
        self._spilled: OrderedDict[_TrieNode, None] = OrderedDict()  # likewise

    def __len__(self) -> int:
        """Pages that the trie keeps in the pool."""
        return len(self._recency)

    @property
    def spilled_pages(self) -> int:
        """Pages that the trie keeps in the spill."""
        return len(self._spilled)

    def match(self, key: Key, tokens: Sequence[int], reserve: int = 0, counted: bool = True) -> list[int]:
        """Pages of the longest cached prefix of `tokens`, in order, retained for the caller.

        Covers at most `len(tokens) - 1` tokens, so that the last one is always computed and gives logits. Spilled pages
        are brought back, as long as that leaves `reserve` pages free or evictable. `stats` hear of it where `counted`.
        """
        path = self._path(key, tokens, len(tokens) - 1)
        resident = [node.page for node in path if node.handle is None]
        self._pool.retain(resident)
        self._touch(path)
        pages = resident if len(resident) == len(path) else self._restored(path, reserve)
        self._pool.release(set(resident).difference(pages))
        if counted:
            self.stats.prompt_tokens += len(tokens)
            self.stats.hit_tokens += len(pages) * self._pool.page_size
        return pages

    def covered(self, key: Key, tokens: Sequence[int]) -> int:
        """How many of `tokens` are cached in the pool, in whole pages; a question only, which counts as no use."""
        resident = takewhile(lambda node: node.handle is None, self._path(key, tokens, len(tokens)))
        return sum(len(node.run) for node in resident)

    def insert(self, key: Key, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make a sequence's full pages findable: page i holds the K/V of tokens [i * page_size, (i + 1) * page_size).

        The caller keeps its references. Where a run is cached already, the page that the trie has stays. A page that is
        cached under another key ends the insertion: its K/V was computed by other weights.
        """
        size = self._pool.page_size
        node = self._roots.get(key)
        path: list[_TrieNode] = []
        for index in range(min(len(tokens) // size, len(pages))):
            run = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(run) if node is not None else None
            if child is None or child.handle is not None:
                if self._pool.is_adopted(pages[index]):
                    break
                if child is None:
                    node = node or self._roots.setdefault(key, _TrieNode(key, (), -1, None))
                    child = node.children[run] = _TrieNode(key, run, -1, node)
                else:
                    self._unspill(child)
                self._keep(child, pages[index])
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Free `count` pages that only the trie holds, or all of them when there are fewer; returns how many.

        More where the spill has no room and what it drops goes on in the pool.
        """
        freed = 0
        wanted = min(count, self._pool.evictable_pages)
        while freed < wanted:
            node = next(iter(self._recency))
            if self._pool.references(node.page) > 1:
                self._recency.move_to_end(node)  # in use now, so it is not the least recently used
                continue
            freed += self._make_room()
            if node.page < 0 or freed >= wanted:
                continue
            handle = self._spill.save(node.page) if self._spill is not None else None
            if handle is not None:
                freed += self._put_away(node, handle)
                continue
            for part in _from_the_leaves(node):
                freed += self._drop(part)
                if freed == wanted:
                    break
        self.stats.evicted_pages += freed
        return freed

    def move(self, moved: Mapping[int, int]) -> None:
        """Pages that the pool has moved: what was in the keys is in the values."""
        for node in self._recency:
            node.page = moved.get(node.page, node.page)

    def expire(self, key: Key) -> int:
        """Forget everything under `key` (its version was replaced); returns the number of pages that this freed.

        Pages that sequences still hold are freed when those let go of them.
        """
        root = self._roots.get(key)
        if root is None:
            return 0
        freed = sum(self._drop(node) for node in list(_from_the_leaves(root)) if node is not root)
        self.stats.evicted_pages += freed
        return freed

    def expire_version(self, adapter: str, version: int) -> None:
        """Forget everything that a version of an adapter computed, for whomever."""
        for key in [key for key in self._roots if (key.adapter, key.version) == (adapter, version)]:
            self.expire(key)

    def expire_all(self, name: str) -> None:
        """Forget what a user may have said, or an adapter of that name computed.

        Where all share, nobody knows whose a prefix is: all of those go, of the base and of every adapter.
        """
        for key in [key for key in self._roots if key.adapter == name or key.tenant in ("", name)]:
            self.expire(key)

    def _path(self, key: Key, tokens: Sequence[int], stop: int) -> list[_TrieNode]:
        """The nodes of the first `stop` of `tokens`, in whole pages, as far as they are cached or spilled."""
        size = self._pool.page_size
        path: list[_TrieNode] = []
        node = self._roots.get(key)
        for start in range(0, stop - size + 1, size):
            node = node.children.get(tuple(tokens[start : start + size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, path: list[_TrieNode]) -> None:
        """The deepest node is touched first, so that eviction meets a leaf before its parent."""
        for node in reversed(path):
            (self._recency if node.handle is None else self._spilled).move_to_end(node)

    def _keep(self, node: _TrieNode, page: int) -> None:
        """`node`'s K/V are in `page` of the pool."""
        self._pool.adopt(page)
        node.page = page
        self._recency[node] = None

    # -- the spill ---------------------------------------------------------------------------------------------------

    def _restored(self, path: list[_TrieNode], reserve: int) -> list[int]:
        """Pages of `path`, whose pages in the pool are retained, up to the first that cannot be brought back."""
        room = self._pool.free_pages + self._pool.evictable_pages - reserve
        spilled = sum(node.handle is not None for node in path)
        # All at once, before any of them is taken out of the spill.
        self.evict(min(room, spilled) - self._pool.free_pages)
        pages: list[int] = []
        for node in path:
            if node.handle is not None and room > 0:
                room -= 1
                self._restore(node)
            if node.page < 0:
                break
            pages.append(node.page)
        self._touch(path[: len(pages)])
        return pages

    def _restore(self, node: _TrieNode) -> None:
        """Bring a spilled page back, retained for the caller, if a page is free and the spill can."""
        assert self._spill is not None
        assert node.handle is not None
        if not self._pool.free_pages:
            return
        pages = self._pool.allocate(1)
        if not self._spill.load(node.handle, pages[0]):
            self._pool.release(pages)
            return
        self._unspill(node)
        self._keep(node, pages[0])
        self.stats.restored_tokens += self._pool.page_size

    def _put_away(self, node: _TrieNode, handle: int) -> bool:
        """`node`'s page, of which the spill has a copy, goes back to the pool."""
        page, node.page, node.handle = node.page, -1, handle
        del self._recency[node]
        self._spilled[node] = None
        self.stats.spilled_pages += 1
        return self._pool.abandon(page)

    def _unspill(self, node: _TrieNode) -> None:
        assert self._spill is not None
        assert node.handle is not None
        self._spill.drop(node.handle)
        node.handle = None
        del self._spilled[node]

    def _make_room(self) -> int:
        """Drop the spilled page that was not used for longest, and what lies below it, if the spill is full.

        Returns how many pages of the pool that freed.
        """
        freed = 0
        if self._spill is not None and self._spill.full and self._spilled:
            for part in list(_from_the_leaves(next(iter(self._spilled)))):
                freed += self._drop(part)
        return freed

    def _drop(self, node: _TrieNode) -> bool:
        """Take a childless node out, and a root that it leaves empty; True when its page became free."""
        assert node.parent is not None
        del node.parent.children[node.run]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.key]
        if node.handle is not None:
            self._unspill(node)
            return False
        page, node.page = node.page, -1
        del self._recency[node]
        return self._pool.abandon(page)


def _from_the_leaves(node: _TrieNode) -> Iterator[_TrieNode]:
    """`node` and all below it, children before their parents; iterative, for prompts of thousands of pages."""
    order = [node]
    for part in order:
        order.extend(part.children.values())
    return reversed(order)
