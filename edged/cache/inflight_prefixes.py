"""Prefixes in flight: which of the prompts with a common prefix computes it, and which ones wait for it.

MACE (section 4.3, appendix A) walks the tree of the active prompts depth first, so that each shared beginning is
computed once. Here the tree is one of whole pages, updated as prompts come and go: a prompt waits for the one that
shares most of it, and goes on as soon as that one has computed what they share. A prompt waits only for one that comes
earlier in the policy's order. So no two prompts can wait for each other, and none waits behind one that is due later.
Orders change: nobody waits any longer for a prompt that was put last (`put_last`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from edged.cache.prefix_trie import Key

Tokens = tuple[int, ...]
Rank = tuple[float, ...]
"""A prompt's position in the policy's order; unique among the pending ones."""


@dataclass(slots=True, eq=False)
class _SharedPages:
    """A tree node: pages [`start`, `end`) of all prompts in `through`, equal in all of them, as are those above."""

    parent: _SharedPages | None
    token_ids: Tokens
    """All tokens of one of these prompts."""
    start: int
    end: int
    children: dict[Tokens, _SharedPages] = field(default_factory=dict)
    """Child nodes by the tokens of their first page."""
    through: list[_Prompt] = field(default_factory=list)
    """The prompts that pass this node, in the policy's order."""


@dataclass(slots=True, eq=False)
class _Prompt:
    name: int
    key: Key
    token_ids: Tokens
    rank: Rank
    node: _SharedPages
    """The node that ends with its last full page."""
    ready: int = 0
    """Number of its pages that are known to be cached."""
    shared: int = 0
    """Number of pages that it waits for `leader` to compute."""
    leader: _Prompt | None = None
    followers: list[_Prompt] = field(default_factory=list)
    """Prompts that wait for this one, by the number of pages that they wait for."""


_by_rank: Callable[[_Prompt], Rank] = attrgetter("rank")
_by_shared: Callable[[_Prompt], tuple[int, Rank]] = attrgetter("shared", "rank")


class InflightPrefixes:
    """The pending prompts, from when they are to be scheduled until they are computed, or end.

    `enter`, `computed` and `leave` return which prompts wait or go on; names are the caller's, unique among the
    pending. Entering is linear in the prompt; other calls cost the tree's depth for each prompt concerned.
    """

    def __init__(self, page_size: int, covered: Callable[[Key, Tokens], int]) -> None:
        """`covered(key, tokens)` returns how many tokens of a prompt are cached, as `PrefixTrie.covered` does."""
        self._size = page_size
        self._covered = covered
        self._roots: dict[Key, _SharedPages] = {}
        self._prompts: dict[int, _Prompt] = {}

    def followed(self, name: int) -> bool:
        """Whether others wait for a prompt, so that its pages should be cached as soon as they are computed."""
        prompt = self._prompts.get(name)
        return prompt is not None and bool(prompt.followers)

    def enter(self, name: int, key: Key, token_ids: Tokens, rank: Rank, waits: bool = True) -> int | None:
        """Add a prompt. Returns the name of the one to wait for, or None when it may be scheduled now.

        A prompt that is scheduled already (`waits` False) is added to be waited for. ValueError if `name` is pending.
        """
        if name in self._prompts:
            raise ValueError(f"prompt {name} is pending already: it must leave before it enters again")
        root = self._roots.setdefault(key, _SharedPages(None, (), 0, 0))
        prompt = self._prompts[name] = _Prompt(name, key, token_ids, rank, root)
        self._insert(prompt, root)
        if waits:
            self._follow(prompt)
        return None if prompt.leader is None else prompt.leader.name

    def waits(self) -> list[tuple[int, list[int]]]:
        """Return each prompt that others wait for, with these."""
        leaders = [prompt for prompt in self._prompts.values() if prompt.followers]
        return [(leader.name, [follower.name for follower in leader.followers]) for leader in leaders]

    def put_last(self, name: int) -> list[int]:
        """Let nobody wait for a pending prompt, which the others have overtaken. Returns those that need not wait."""
        prompt = self._prompts[name]
        freed = self.leave(name)
        self.enter(name, prompt.key, prompt.token_ids, (math.inf, name), waits=False)
        return freed

    def computed(self, name: int, num_tokens: int) -> list[int]:
        """Note that a prompt's first `num_tokens` are computed and cached. Returns those that need not wait longer."""
        prompt = self._prompts.get(name)
        if prompt is None:
            return []
        done = num_tokens // self._size
        count = bisect_right(prompt.followers, done, key=lambda follower: follower.shared)
        ready, prompt.followers = prompt.followers[:count], prompt.followers[count:]
        for follower in ready:
            follower.ready = max(follower.ready, follower.shared)
        return self._decide(ready)

    def leave(self, name: int) -> list[int]:
        """Remove a prompt that is computed, ended or lost its pages. Returns those that need not wait any more.

        Others that waited for it now wait for another one. Unknown names are ignored.
        """
        prompt = self._prompts.pop(name, None)
        if prompt is None:
            return []
        if prompt.leader is not None:
            _remove(prompt.leader.followers, prompt, _by_shared)
        node: _SharedPages | None = prompt.node
        while node is not None:
            _remove(node.through, prompt, _by_rank)
            if not node.through:
                if node.parent is None:
                    del self._roots[prompt.key]
                else:
                    del node.parent.children[self._page(node.token_ids, node.start)]
            node = node.parent
        return self._decide(prompt.followers)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _decide(self, prompts: Iterable[_Prompt]) -> list[int]:
        """Find a new leader for each of `prompts`, whose wait is over. Returns those that find none."""
        free = []
        for prompt in sorted(prompts, key=_by_rank):
            prompt.leader = None
            if not self._follow(prompt):
                free.append(prompt.name)
        return free

    def _follow(self, prompt: _Prompt) -> bool:
        """Have `prompt` wait for the one that shares most pages with it, the first of them in the policy's order.

        False when none ahead shares more than what is cached. The last token is always left to compute.
        """
        most = (len(prompt.token_ids) - 1) // self._size
        node: _SharedPages | None = prompt.node
        while node is not None and node.through[0] is prompt:
            node = node.parent
        if node is None or min(node.end, most) <= prompt.ready:
            return False
        prompt.ready = max(prompt.ready, self._covered(prompt.key, prompt.token_ids) // self._size)
        shared = min(node.end, most)
        if shared <= prompt.ready:
            return False
        prompt.leader, prompt.shared = node.through[0], shared
        insort(prompt.leader.followers, prompt, key=_by_shared)
        return True

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _page(self, token_ids: Tokens, page: int) -> Tokens:
        return token_ids[page * self._size : (page + 1) * self._size]

    def _insert(self, prompt: _Prompt, node: _SharedPages) -> None:
        """Add `prompt` to the nodes from the root `node` to the one that ends with its last full page."""
        token_ids, pages = prompt.token_ids, len(prompt.token_ids) // self._size
        insort(node.through, prompt, key=_by_rank)
        while node.end < pages:
            first = self._page(token_ids, node.end)
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _SharedPages(node, token_ids, node.end, pages)
            else:
                child = self._upper(child, self._common(child, token_ids, pages))
            insort(child.through, prompt, key=_by_rank)
            node = child
        prompt.node = node

    def _common(self, node: _SharedPages, token_ids: Tokens, pages: int) -> int:
        """Return the page up to which `token_ids`, with `pages` full pages, agree with `node`; its first page does."""
        page, end = node.start + 1, min(node.end, pages)
        while page < end and self._page(node.token_ids, page) == self._page(token_ids, page):
            page += 1
        return page

    def _upper(self, node: _SharedPages, end: int) -> _SharedPages:
        """Return the node of `node`'s pages before `end`: itself, or a new one above it."""
        if end == node.end:
            return node
        parent = node.parent
        assert parent is not None
        below, first = self._page(node.token_ids, end), self._page(node.token_ids, node.start)
        upper = _SharedPages(parent, node.token_ids, node.start, end, {below: node}, node.through.copy())
        parent.children[first] = upper
        node.parent, node.start = upper, end
        return upper


def _remove(items: list[_Prompt], prompt: _Prompt, key: Callable[[_Prompt], Any]) -> None:
    """Remove `prompt` from a list that is sorted by `key`, which is unique."""
    del items[bisect_left(items, key(prompt), key=key)]
