"""The prefix trie: finds the pages of a prompt's longest prefix that was computed before.

Owns the index from tokens to pages and the order of eviction. Must not know torch, models or policies.

One node stands for one full page, so that a lookup hashes each page of the prompt once. Keys are (adapter, version):
K/V depends on the weights that computed it, so nothing is shared between two keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edged.cache.pool import PagePool

Key = tuple[str | None, int]
"""(adapter, version); (None, 0) is the base model."""


@dataclass(slots=True)
class TrieStats:
    """What the lookups brought since the start; all in tokens, except lookups and pages."""

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    """A cached page: `run` are its tokens, given the tokens of all nodes above it. A root has no page (-1)."""

    key: Key
    run: tuple[int, ...]
    page: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixTrie:
    """A radix trie of whole pages over one PagePool.

    Eviction is least recently used, a node before its parent. A page that only the trie holds can always be evicted:
    where a running sequence holds a page further down, that one merely stops being found.
    """

    def __init__(self, pool: PagePool) -> None:
        self.stats = TrieStats()
        self._pool = pool
        self._roots: dict[Key, _Node] = {}
        self._recency: OrderedDict[_Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Pages that the trie keeps."""
        return len(self._recency)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        return self._pool.evictable_pages

    def match(self, key: Key, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix of `tokens`, in order, retained for the caller.

        Covers at most `len(tokens) - 1` tokens, so that the last one is always computed and gives logits.
        """
        size = self._pool.page_size
        path: list[_Node] = []
        node = self._roots.get(key)
        for start in range(0, len(tokens) - size, size):
            if node is None:
                break
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is not None:
                path.append(node)
        pages = [node.page for node in path]
        self._pool.retain(pages)
        self._touch(path)
        self.stats.lookups += 1
        self.stats.prompt_tokens += len(tokens)
        self.stats.hit_tokens += len(pages) * size
        return pages

    def covered(self, key: Key, tokens: Sequence[int]) -> int:
        """How many of `tokens` are cached, in whole pages; a question only, which counts as no use."""
        size = self._pool.page_size
        node = self._roots.get(key)
        for start in range(0, len(tokens) - size + 1, size):
            node = node.children.get(tuple(tokens[start : start + size])) if node is not None else None
            if node is None:
                return start
        return len(tokens) // size * size

    def insert(self, key: Key, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make a sequence's full pages findable: page i holds the K/V of tokens [i * page_size, (i + 1) * page_size).

        The caller keeps its references. Where a run is cached already, the page that the trie has stays. A page that is
        cached under another key ends the insertion: its K/V was computed by other weights.
        """
        size = self._pool.page_size
        node = self._roots.get(key)
        path: list[_Node] = []
        for index in range(min(len(tokens) // size, len(pages))):
            run = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(run) if node is not None else None
            if child is None:
                if self._pool.is_adopted(pages[index]):
                    break
                if node is None:
                    node = self._roots[key] = _Node(key, (), -1, None)
                child = _Node(key, run, pages[index], node)
                self._pool.adopt(child.page)
                node.children[run] = child
                self._recency[child] = None
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Free `count` pages that only the trie holds, or all of them when there are fewer; returns how many."""
        freed = 0
        wanted = min(count, self._pool.evictable_pages)
        while freed < wanted:
            node = next(iter(self._recency))
            if self._pool.references(node.page) > 1:
                self._recency.move_to_end(node)  # in use now, so it is not the least recently used
                continue
            for part in _from_the_leaves(node):
                freed += self._drop(part)
                if freed == wanted:
                    break
        self.stats.evicted_pages += freed
        return freed

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

    def expire_all(self, owner: object) -> None:
        """Forget everything under every key whose first part is `owner`."""
        for key in [key for key in self._roots if key[0] == owner]:
            self.expire(key)

    def check(self) -> None:
        """AssertionError on any inconsistency of the trie or its pool; linear in both."""
        self._pool.check()
        seen: set[int] = set()
        for key, root in self._roots.items():
            assert root.children, f"the root of {key} is empty"
            for node in _from_the_leaves(root):
                if node is root:
                    continue
                assert node.key == key, f"page {node.page} of {node.key} is under {key}"
                assert len(node.run) == self._pool.page_size, f"page {node.page} has {len(node.run)} tokens"
                assert node.parent is not None, f"page {node.page} has no parent"
                assert node.parent.children[node.run] is node, f"page {node.page} is not its parent's child"
                assert node in self._recency, f"page {node.page} can never be evicted"
                assert self._pool.is_adopted(node.page), f"page {node.page} is not the trie's"
                assert node.page not in seen, f"page {node.page} stands for two runs"
                seen.add(node.page)
        assert len(seen) == len(self._recency), f"{len(seen)} pages are reachable, {len(self._recency)} are kept"
        adopted = sum(self._pool.is_adopted(page) for page in range(self._pool.pages))
        assert adopted == len(seen), f"the pool counts {adopted} pages of the trie, {len(seen)} are reachable"

    def _touch(self, path: list[_Node]) -> None:
        """The deepest node is touched first, so that eviction meets a leaf before its parent."""
        for node in reversed(path):
            self._recency.move_to_end(node)

    def _drop(self, node: _Node) -> bool:
        """Take a childless node out, and a root that it leaves empty; True when its page became free."""
        assert node.parent is not None
        del node.parent.children[node.run]
        del self._recency[node]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.key]
        return self._pool.abandon(node.page)


def _from_the_leaves(node: _Node) -> Iterator[_Node]:
    """`node` and all below it, children before their parents; iterative, for prompts of thousands of pages."""
    order = [node]
    for part in order:
        order.extend(part.children.values())
    return reversed(order)
