"""Prompts that wait together and begin alike: who computes what they share, and who waits for it.

MACE (section 4.3, appendix A) walks the tree of the active prompts depth first, so that each shared beginning is
computed once. Here the tree is one of whole pages, kept as prompts come and go: a prompt waits for the one that shares
most of it, and goes on as soon as that one has computed what they share. Whoever is waited for comes earlier in the
policy's order. So no two prompts can wait for each other, and no prompt waits behind one that is due later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from edged.cache.prefix_trie import Key

Tokens = tuple[int, ...]
Rank = tuple[float, ...]
"""Where a prompt stands in the policy's order; unique among those that are pending."""


@dataclass(slots=True, eq=False)
class _SharedPages:
    """Pages [`start`, `end`) of all prompts in `through`, equal in all of them and up to the root."""

    parent: _SharedPages | None
    tokens: Tokens
    """A prompt that passes, whole."""
    start: int
    end: int
    children: dict[Tokens, _SharedPages] = field(default_factory=dict)
    """By the tokens of their first page."""
    through: list[_Prompt] = field(default_factory=list)
    """In the policy's order."""


@dataclass(slots=True, eq=False)
class _Prompt:
    name: int
    key: Key
    tokens: Tokens
    rank: Rank
    node: _SharedPages
    """Where its full pages end."""
    ready: int = 0
    """Pages that are known to be cached for it."""
    shared: int = 0
    """Pages that it waits for `leader` to compute."""
    leader: _Prompt | None = None
    followers: list[_Prompt] = field(default_factory=list)
    """By the pages that they wait for."""


_by_rank: Callable[[_Prompt], Rank] = attrgetter("rank")
_by_shared: Callable[[_Prompt], tuple[int, Rank]] = attrgetter("shared", "rank")


class InflightPrefixes:
    """Prompts from when they ask for the scheduler until they are computed, or end.

    `enter`, `computed` and `leave` say who waits and who goes on; names are the caller's, unique among the pending.
    Entering is linear in the prompt; whatever else happens costs the tree's depth for each prompt that it concerns.
    """

    def __init__(self, page_size: int, covered: Callable[[Key, Tokens], int]) -> None:
        """`covered(key, tokens)` says how many tokens of a prompt are cached, as `PrefixTrie.covered` does."""
        self._size = page_size
        self._covered = covered
        self._roots: dict[Key, _SharedPages] = {}
        self._prompts: dict[int, _Prompt] = {}

    def followed(self, name: int) -> bool:
        """Whether a prompt's pages are waited for, so that they should be cached as soon as they are computed."""
        prompt = self._prompts.get(name)
        return prompt is not None and bool(prompt.followers)

    def enter(self, name: int, key: Key, tokens: Tokens, rank: Rank, waits: bool = True) -> int | None:
        """Take a prompt in. Returns whom it must wait for, or None when it may be scheduled now.

        One that is scheduled already (`waits` False) enters only to be waited for. ValueError if `name` is pending.
        """
        if name in self._prompts:
            raise ValueError(f"prompt {name} is pending already: it must leave before it enters again")
        root = self._roots.setdefault(key, _SharedPages(None, (), 0, 0))
        prompt = self._prompts[name] = _Prompt(name, key, tokens, rank, root)
        self._insert(prompt, root)
        if waits:
            self._follow(prompt)
        return None if prompt.leader is None else prompt.leader.name

    def computed(self, name: int, tokens: int) -> list[int]:
        """The first `tokens` of a prompt are computed and cached: who waited for them and may be scheduled now."""
        prompt = self._prompts.get(name)
        if prompt is None:
            return []
        done = tokens // self._size
        count = bisect_right(prompt.followers, done, key=lambda follower: follower.shared)
        ready, prompt.followers = prompt.followers[:count], prompt.followers[count:]
        for follower in ready:
            follower.ready = max(follower.ready, follower.shared)
        return self._decide(ready)

    def leave(self, name: int) -> list[int]:
        """A prompt is computed, or ended, or lost its pages: who waited for it and may be scheduled now.

        The others who waited for it have found the next one to wait for. Unknown names are ignored.
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
                    del node.parent.children[self._page(node.tokens, node.start)]
            node = node.parent
        return self._decide(prompt.followers)

    # -- who waits ---------------------------------------------------------------------------------------------------

    def _decide(self, prompts: Iterable[_Prompt]) -> list[int]:
        """Those of `prompts`, which wait for nobody any more, that find nobody else to wait for."""
        free = []
        for prompt in sorted(prompts, key=_by_rank):
            prompt.leader = None
            if not self._follow(prompt):
                free.append(prompt.name)
        return free

    def _follow(self, prompt: _Prompt) -> bool:
        """Have `prompt` wait for the one that shares most pages with it, the first of them in the policy's order.

        False when nobody ahead shares more than what is cached. The last token is always left to compute.
        """
        most = (len(prompt.tokens) - 1) // self._size
        node: _SharedPages | None = prompt.node
        while node is not None and node.through[0] is prompt:
            node = node.parent
        if node is None or min(node.end, most) <= prompt.ready:
            return False
        prompt.ready = max(prompt.ready, self._covered(prompt.key, prompt.tokens) // self._size)
        shared = min(node.end, most)
        if shared <= prompt.ready:
            return False
        prompt.leader, prompt.shared = node.through[0], shared
        insort(prompt.leader.followers, prompt, key=_by_shared)
        return True

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _page(self, tokens: Tokens, page: int) -> Tokens:
        return tokens[page * self._size : (page + 1) * self._size]

    def _insert(self, prompt: _Prompt, node: _SharedPages) -> None:
        """Let `prompt` pass from the root `node` to the node that ends with its last full page."""
        tokens, pages = prompt.tokens, len(prompt.tokens) // self._size
        insort(node.through, prompt, key=_by_rank)
        while node.end < pages:
            first = self._page(tokens, node.end)
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _SharedPages(node, tokens, node.end, pages)
            else:
                child = self._upper(child, self._common(child, tokens, pages))
            insort(child.through, prompt, key=_by_rank)
            node = child
        prompt.node = node

    def _common(self, node: _SharedPages, tokens: Tokens, pages: int) -> int:
        """The page up to which `tokens`, whose first `pages` are full, agree with `node`; the first one does."""
        page, end = node.start + 1, min(node.end, pages)
        while page < end and self._page(node.tokens, page) == self._page(tokens, page):
            page += 1
        return page

    def _upper(self, node: _SharedPages, end: int) -> _SharedPages:
        """The node of `node`'s pages before `end`: itself, or a new one above it."""
        if end == node.end:
            return node
        parent = node.parent
        assert parent is not None
        below, first = self._page(node.tokens, end), self._page(node.tokens, node.start)
        upper = _SharedPages(parent, node.tokens, node.start, end, {below: node}, node.through.copy())
        parent.children[first] = upper
        node.parent, node.start = upper, end
        return upper


def _remove(items: list[_Prompt], prompt: _Prompt, key: Callable[[_Prompt], Any]) -> None:
    """Take `prompt` out of a list that is sorted by `key`, which is unique."""
    del items[bisect_left(items, key(prompt), key=key)]
