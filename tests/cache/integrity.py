"""Invariants of the page pool, the prefix trie and the prompts that wait: AssertionError on any inconsistency."""

from __future__ import annotations

from edged.cache.inflight_prefixes import InflightPrefixes, _SharedPages
from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import Key, PrefixTrie, _from_the_leaves, _TrieNode


def check_pool(pool: PagePool) -> None:
    """Linear in the pool."""
    free = set(pool._free)
    assert len(free) == len(pool._free), "a page is in the free list twice"
    for page, references in enumerate(pool._references):
        assert references >= 0, f"page {page} has {references} references"
        retired = page >= pool.capacity
        unheld = page in free or retired
        assert (references == 0) == unheld, f"page {page}: {references} references, free: {page in free}"
        assert not (retired and page in free), f"page {page} is retired and in the free list"
        assert references >= pool._adopted[page], f"page {page} is in the trie without a reference"
    evictable = sum(pool._adopted[page] and pool._references[page] == 1 for page in range(pool.pages))
    assert evictable == pool.evictable_pages, f"{evictable} pages are evictable, {pool.evictable_pages} counted"


def check_trie(trie: PrefixTrie) -> None:
    """The trie and its pool; linear in both."""
    check_pool(trie._pool)
    seen: set[int] = set()
    handles: set[int] = set()
    for key, root in trie._roots.items():
        assert root.children, f"the root of {key} is empty"
        for node in _from_the_leaves(root):
            if node is not root:
                _check_node(node, key, trie._pool.page_size)
                (seen if node.handle is None else handles).add(node.page if node.handle is None else node.handle)
                kept = trie._recency if node.handle is None else trie._offloaded
                assert node in kept, f"page {node.page} of {key} can never be given up"
                assert node.handle is not None or trie._pool.is_adopted(node.page), f"{node.page} is not the trie's"
    assert len(seen) == len(trie._recency), f"{len(seen)} pages are reachable, {len(trie._recency)} are kept"
    assert len(handles) == len(trie._offloaded), (
        f"{len(handles)} handles are reachable, {len(trie._offloaded)} are kept"
    )
    adopted = sum(trie._pool.is_adopted(page) for page in range(trie._pool.pages))
    assert adopted == len(seen), f"the pool counts {adopted} pages of the trie, {len(seen)} are reachable"


def _check_node(node: _TrieNode, key: Key, page_size: int) -> None:
    assert node.key == key, f"page {node.page} of {node.key} is under {key}"
    assert len(node.run) == page_size, f"page {node.page} has {len(node.run)} tokens"
    assert node.parent is not None, f"page {node.page} has no parent"
    assert node.parent.children[node.run] is node, f"page {node.page} is not its parent's child"
    assert (node.page < 0) == (node.handle is not None), f"page {node.page} has the handle {node.handle}, too"


def waits(prefixes: InflightPrefixes, name: int) -> bool:
    """Whether a prompt waits for another one."""
    return name in prefixes._prompts and prefixes._prompts[name].leader is not None


def check_prefixes(prefixes: InflightPrefixes) -> None:
    """Who waits for whom, and the tree."""
    for prompt in prefixes._prompts.values():
        if (leader := prompt.leader) is not None:
            assert leader is prefixes._prompts[leader.name], f"{prompt.name} waits for {leader.name}, who is gone"
            assert leader.rank < prompt.rank, f"{prompt.name} waits for {leader.name}, who comes later"
            assert prompt in leader.followers, f"{leader.name} does not know that {prompt.name} waits"
            end = prompt.shared * prefixes._size
            assert 0 < end < len(prompt.token_ids), f"{prompt.name} waits for all of its {len(prompt.token_ids)} tokens"
            assert leader.token_ids[:end] == prompt.token_ids[:end], f"{prompt.name} waits for another's pages"
        assert all(follower.leader is prompt for follower in prompt.followers), f"{prompt.name} keeps a follower"
        node: _SharedPages | None = prompt.node
        while node is not None:
            assert prompt in node.through, f"{prompt.name} is missing on its path"
            node = node.parent
    passing = sum(len(root.through) for root in prefixes._roots.values())
    assert passing == len(prefixes._prompts), f"{passing} prompts pass the roots, {len(prefixes._prompts)} are pending"
