"""The prefix trie finds the pages of the longest prefix of a prompt that was computed before.

One node stands for one full page, so that a lookup hashes each page of the prompt once. A key has the weights that
computed the first K/V (later versions may have gone on), and the tenant where tenants must not share; nothing is shared
between two keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from edged.cache.page_pool import PagePool


class Key(NamedTuple):
    """The adapter, version and tenant whose requests may share K/V; (None, 0) is the base model, tenant "" all."""

    adapter: str | None
    version: int
    tenant: str = ""


@dataclass(slots=True)
class TrieStats:
    """Counts of lookups and evictions since the start, in tokens or pages."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    restored_tokens: int = 0
    """Hit tokens that were copied back from the offload."""
    earlier_tokens: int = 0
    """Hit tokens that an earlier version of the adapter had computed."""
    evicted_pages: int = 0
    spilled_pages: int = 0
    """Evicted pages that were copied to the offload."""


@dataclass(slots=True, eq=False)
class _TrieNode:
    """A cached page with the tokens `run`, given the tokens of all nodes above it.

    It has a page, or a handle of the offload; a root, or a node that was dropped, has neither (-1, None).
    """

    key: Key
    run: tuple[int, ...]
    page: int
    parent: _TrieNode | None
    handle: int | None = None
    state: int = 0
    """Slot of a copy of the layers' states after its tokens, where layers keep any and one was made; 0: none."""
    children: dict[tuple[int, ...], _TrieNode] = field(default_factory=dict)


class PageOffload(Protocol):
    """A store of copies of evicted pages, by handle. When it is full, the trie decides which copies to drop."""

    @property
    def full(self) -> bool:
        """Whether `save` has no room until a copy is dropped."""

    def save(self, page: int) -> int | None:
        """Copy `page`, which may be overwritten from now on. Returns a handle; None when it cannot be copied now."""

    def load(self, handle: int, page: int) -> bool:
        """Copy back into `page`, which the caller has allocated; False when that is not possible."""

    def drop(self, handle: int) -> None:
        """Delete a copy."""


class PrefixTrie:
    """A radix trie of whole pages over one PagePool.

    Eviction is least recently used, a node before its parent. A page that only the trie holds can always be evicted:
    where a running sequence holds a page further down, that one is merely not found any more. With a spill, evicted
    pages are kept there and copied back when they are matched; when it is full, the oldest are dropped.

    Of a model whose layers keep states, nodes may have copies of these: a prompt goes on from such a node alone.
    """

    def __init__(
        self,
        pool: PagePool,
        offload: PageOffload | None = None,
        release_states: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`release_states` is given the slots of copies that are dropped."""
        self.stats = TrieStats()
        self._pool = pool
        self._offload = offload
        self._release_states = release_states
        self._roots: dict[Key, _TrieNode] = {}
        self._recency: OrderedDict[_TrieNode, None] = OrderedDict()  # least recently used first
        self._offloaded: OrderedDict[_TrieNode, None] = OrderedDict()  # likewise
        self._with_state: OrderedDict[_TrieNode, None] = OrderedDict()  # likewise

    def __len__(self) -> int:
        """Number of pages that the trie keeps in the pool."""
        return len(self._recency)

    @property
    def offloaded_pages(self) -> int:
        """Number of pages that the trie keeps in the offload."""
        return len(self._offloaded)

    def match(self, key: Key, token_ids: Sequence[int], reserve: int = 0, counted: bool = True) -> list[int]:
        """Return the pages of the longest cached prefix of `token_ids`, in order, retained for the caller.

        Covers at most `len(token_ids) - 1` tokens, so that the last one is always computed and gives logits. Offloaded
        pages are copied back, as long as that leaves `reserve` pages free or evictable. `counted` adds it to `stats`.
        """
        pages = self._taken(self._path(key, token_ids, len(token_ids) - 1), reserve)
        if counted:
            self._count(token_ids, pages)
        return pages

    def match_state(
        self, key: Key, token_ids: Sequence[int], reserve: int = 0, counted: bool = True
    ) -> tuple[list[int], int, int]:
        """Return (pages, state, met): as `match`, up to the deepest copy of the layers' states, and its slot.

        Without a copy there are no pages, and the slot is 0. `met` of `token_ids` are cached, in whole pages.
        """
        path = self._path(key, token_ids, len(token_ids) - 1)
        met = len(path) * self._pool.page_size
        taken = self._taken(_up_to_a_state(path), reserve)
        path = _up_to_a_state(path[: len(taken)])
        pages = taken[: len(path)]
        self._pool.release(taken[len(path) :])
        if path:
            self._with_state.move_to_end(path[-1])
        if counted:
            self._count(token_ids, pages)
        return pages, path[-1].state if path else 0, met

    def has_room_for_state(self, key: Key, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids`, whole pages, are cached without a copy of the states after them."""
        path = self._path(key, token_ids, len(token_ids))
        return bool(path) and len(path) * self._pool.page_size == len(token_ids) and not path[-1].state

    def keep_state(self, key: Key, token_ids: Sequence[int], state: int) -> None:
        """Keep the slot of a copy of the states after `token_ids`, which has room for it."""
        node = self._path(key, token_ids, len(token_ids))[-1]
        node.state = state
        self._with_state[node] = None

    def take_state(self, key: Key, token_ids: Sequence[int]) -> int:
        """Take back the copy after `token_ids`: it returns its slot, 0 where there is none any more."""
        path = self._path(key, token_ids, len(token_ids))
        whole = bool(path) and len(path) * self._pool.page_size == len(token_ids)
        return self._without_state(path[-1]) if whole else 0

    def drop_oldest_state(self) -> None:
        """Drop the copy that no prompt went on from for the longest time."""
        self._drop_state(next(iter(self._with_state)))

    @property
    def states(self) -> int:
        """Number of copies of states."""
        return len(self._with_state)

    def reach(self, key: Key, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` `match` or `match_state` would find, copies of the offload among them."""
        path = self._path(key, token_ids, len(token_ids) - 1)
        path = path if self._release_states is None else _up_to_a_state(path)
        return len(path) * self._pool.page_size

    def earlier(self, key: Key, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the earlier versions of the key's adapter, the newest first, each with how far it reaches."""
        for each in self._before(key):
            yield each.version, self.reach(each, token_ids)

    def supersede(self, key: Key, token_ids: Sequence[int]) -> None:
        """Remove the copies of `token_ids`, whole pages, by earlier versions, as far as no other tokens follow them.

        Where layers keep states, only as far as the key has a copy of these to go on from.
        """
        if self._release_states is not None:
            kept = _up_to_a_state(self._path(key, token_ids, len(token_ids)))
            token_ids = token_ids[: len(kept) * self._pool.page_size]
        for each in self._before(key):
            for node in reversed(self._path(each, token_ids, len(token_ids))):
                if node.children:
                    break
                self.stats.evicted_pages += self._drop(node)

    def _before(self, key: Key) -> list[Key]:
        """Return the keys of earlier versions of the key's adapter, of its tenant, the newest first."""
        found = [each for each in self._roots if each == (key.adapter, each.version, key.tenant) and each < key]
        return sorted(found, reverse=True)

    def covered(self, key: Key, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` are cached in the pool, in whole pages; this does not count as a use."""
        resident = takewhile(lambda node: node.handle is None, self._path(key, token_ids, len(token_ids)))
        return sum(len(node.run) for node in resident)

    def insert(self, key: Key, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Add a sequence's full pages: page i holds the K/V of tokens [i * page_size, (i + 1) * page_size).

        The caller keeps its references. Where a run is cached already, the page that the trie has stays. A page that is
        cached under another key ends the insertion: its K/V was computed by other weights.
        """
        size = self._pool.page_size
        node = self._roots.get(key)
        path: list[_TrieNode] = []
        for index in range(min(len(token_ids) // size, len(pages))):
            run = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(run) if node is not None else None
            if child is None or child.handle is not None:
                if self._pool.is_adopted(pages[index]):
                    break
                if child is None:
                    node = node or self._roots.setdefault(key, _TrieNode(key, (), -1, None))
                    child = node.children[run] = _TrieNode(key, run, -1, node)
                else:
                    self._forget_copy(child)
                self._keep(child, pages[index])
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Free `count` pages that only the trie holds, or all of them when there are fewer; returns how many.

        It frees more where a full offload drops a node with descendants in the pool.
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
            handle = self._offload.save(node.page) if self._offload is not None else None
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
        """Update page numbers after the pool moved pages: `moved` maps old numbers to new ones."""
        for node in self._recency:
            node.page = moved.get(node.page, node.page)

    def expire(self, key: Key) -> int:
        """Remove everything under `key`, whose version was replaced; returns the number of pages that this freed.

        Pages that sequences still hold are freed when these release them.
        """
        root = self._roots.get(key)
        if root is None:
            return 0
        freed = sum(self._drop(node) for node in list(_from_the_leaves(root)) if node is not root)
        self.stats.evicted_pages += freed
        return freed

    def expire_versions(self, adapter: str, last: int) -> None:
        """Remove everything that versions of an adapter computed, up to the `last`, for all tenants."""
        for key in [key for key in self._roots if key.adapter == adapter and key.version <= last]:
            self.expire(key)

    def expire_short(self, adapter: str, version: int, tokens: int) -> None:
        """Remove what a version of an adapter computed of texts of less than so many tokens, for all tenants."""
        for key in [key for key in self._roots if (key.adapter, key.version) == (adapter, version)]:
            depths = {self._roots[key]: 0}
            order = list(depths)
            for node in order:
                depths.update(dict.fromkeys(node.children.values(), depths[node] + 1))
                order.extend(node.children.values())
            for node in reversed(order[1:]):
                if not node.children and depths[node] * self._pool.page_size < tokens:
                    self.stats.evicted_pages += self._drop(node)

    def expire_all(self, name: str) -> None:
        """Remove all prefixes that a user may have sent, or that an adapter of that name computed.

        It is not known whose the prefixes that all tenants share are: all of them go, whatever their adapter.
        """
        for key in [key for key in self._roots if key.adapter == name or key.tenant in ("", name)]:
            self.expire(key)

    def _path(self, key: Key, token_ids: Sequence[int], stop: int) -> list[_TrieNode]:
        """Return the nodes of the first `stop` of `token_ids`, in whole pages, as far as cached or offloaded."""
        size = self._pool.page_size
        path: list[_TrieNode] = []
        node = self._roots.get(key)
        for start in range(0, stop - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _taken(self, path: list[_TrieNode], reserve: int) -> list[int]:
        """Return the pages of `path`, retained, up to the first offloaded one that cannot be copied back."""
        resident = [node.page for node in path if node.handle is None]
        self._pool.retain(resident)
        self._touch(path)
        pages = resident if len(resident) == len(path) else self._restored(path, reserve)
        self._pool.release(set(resident).difference(pages))
        return pages

    def _count(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        self.stats.prompt_tokens += len(token_ids)
        self.stats.hit_tokens += len(pages) * self._pool.page_size

    def _without_state(self, node: _TrieNode) -> int:
        state, node.state = node.state, 0
        self._with_state.pop(node, None)
        return state

    def _drop_state(self, node: _TrieNode) -> None:
        if (state := self._without_state(node)) and self._release_states is not None:
            self._release_states([state])

    def _touch(self, path: list[_TrieNode]) -> None:
        """Mark nodes as used, the deepest first, so that eviction meets a leaf before its parent."""
        for node in reversed(path):
            (self._recency if node.handle is None else self._offloaded).move_to_end(node)

    def _keep(self, node: _TrieNode, page: int) -> None:
        """Keep `page` of the pool, which has `node`'s K/V."""
        self._pool.adopt(page)
        node.page = page
        self._recency[node] = None

    # -- the offload ---------------------------------------------------------------------------------------------------

    def _restored(self, path: list[_TrieNode], reserve: int) -> list[int]:
        """Return the pages of `path` up to the first that cannot be copied back; those in the pool are retained."""
        room = self._pool.free_pages + self._pool.evictable_pages - reserve
        offloaded = sum(node.handle is not None for node in path)
        # Evict all at once, before any of them is taken out of the offload.
        self.evict(min(room, offloaded) - self._pool.free_pages)
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
        """Copy an offloaded page back, retained for the caller, if a page is free and the offload can."""
        assert self._offload is not None
        assert node.handle is not None
        if not self._pool.free_pages:
            return
        pages = self._pool.allocate(1)
        if not self._offload.load(node.handle, pages[0]):
            self._pool.release(pages)
            return
        self._forget_copy(node)
        self._keep(node, pages[0])
        self.stats.restored_tokens += self._pool.page_size

    def _put_away(self, node: _TrieNode, handle: int) -> bool:
        """Give `node`'s page, of which the offload has a copy, back to the pool; True when that freed it."""
        page, node.page, node.handle = node.page, -1, handle
        del self._recency[node]
        self._offloaded[node] = None
        self.stats.spilled_pages += 1
        return self._pool.abandon(page)

    def _forget_copy(self, node: _TrieNode) -> None:
        assert self._offload is not None
        assert node.handle is not None
        self._offload.drop(node.handle)
        node.handle = None
        del self._offloaded[node]

    def _make_room(self) -> int:
        """Drop the least recently used offloaded page, and the nodes below it, if the offload is full.

        Returns how many pages of the pool that freed.
        """
        if self._offload is None or not self._offload.full or not self._offloaded:
            return 0
        return sum(self._drop(part) for part in list(_from_the_leaves(next(iter(self._offloaded)))))

    def _drop(self, node: _TrieNode) -> bool:
        """Remove a childless node, and its root if that is empty then; True when its page became free."""
        assert node.parent is not None
        del node.parent.children[node.run]
        self._drop_state(node)
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.key]
        if node.handle is not None:
            self._forget_copy(node)
            return False
        page, node.page = node.page, -1
        del self._recency[node]
        return self._pool.abandon(page)


def _up_to_a_state(path: list[_TrieNode]) -> list[_TrieNode]:
    """Return the beginning of `path` that ends with the deepest copy of states."""
    deepest = max((depth for depth, node in enumerate(path, 1) if node.state), default=0)
    return path[:deepest]


def _from_the_leaves(node: _TrieNode) -> Iterator[_TrieNode]:
    """Iterate over `node` and all below it, children before parents; not recursive, since paths have thousands."""
    order = [node]
    for part in order:
        order.extend(part.children.values())
    return reversed(order)
