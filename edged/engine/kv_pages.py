"""Pages of KV cache in the hands of sequences: allocated, found in the prefix trie, shared, freed."""

from __future__ import annotations

import numpy as np

from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import PrefixTrie
from edged.engine.kv.offload import KvOffload
from edged.engine.sequence import Sequence


class KvPages:
    """The page pool with the trie of shared prefixes and the place of evicted ones; used by the engine thread alone."""

    def __init__(self, pool: PagePool, trie: PrefixTrie | None, offload: KvOffload | None = None) -> None:
        """Without a `trie` no prefix is shared; without an `offload` evicted prefixes are lost."""
        self.pool, self.trie, self.offload = pool, trie, offload

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pool.page_size

    @property
    def evictable(self) -> int:
        """Pages of shared prefixes that no sequence uses."""
        return self.trie.evictable_pages if self.trie is not None else 0

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self.pool.free_pages + self.evictable

    def allocate(self, pages: int) -> list[int]:
        """Free pages, evicting shared prefixes that no sequence uses. Raises OutOfPages."""
        missing = pages - self.pool.free_pages
        if missing > 0 and self.trie is not None:
            self.trie.evict(missing)
        return self.pool.allocate(pages)

    def allocate_to_write(self, pages: int) -> list[int]:
        """As `allocate`, for what writes before the next forward: after the copies of what was evicted for it."""
        taken = self.allocate(pages)
        if self.offload is not None:
            self.offload.settle()
        return taken

    def grow(self, sequence: Sequence, tokens: int) -> int:
        """Give a sequence the pages for up to `tokens` more; how many of them it has. Raises OutOfPages."""
        tokens = min(tokens, len(sequence.tokens) - sequence.computed)
        needed = -(-(sequence.rows + tokens) // self.page_size) - len(sequence.pages)
        if needed > 0:
            sequence.add_pages(self.allocate(needed))
        return tokens

    def match_prefix(self, sequence: Sequence, reserve: int, first: bool) -> None:
        """Give an admitted sequence the pages of the longest shared prefix, if there is one.

        Offloaded pages come back into free ones, of which `reserve` are left to the others of this iteration. A prefix
        found by a sequence that was admitted before, and not for the `first` time, is its own and counts as no hit.
        """
        if self.trie is None:
            return
        pages = self.trie.match(sequence.trie_key, sequence.tokens, reserve, counted=first)
        if pages:
            sequence.add_pages(pages)
            sequence.computed = len(pages) * self.page_size
            if first:
                sequence.cached_tokens = sequence.computed

    def share(self, sequence: Sequence) -> None:
        """Let later sequences of the same adapter version use the full pages that this one computed."""
        if self.trie is not None and sequence.shareable and sequence.computed:
            full = sequence.computed // self.page_size
            self.trie.insert(sequence.trie_key, sequence.tokens[: full * self.page_size], sequence.pages[:full])

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; it has computed nothing from here on."""
        if sequence.pages:
            self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0
        sequence.compacted = sequence.watch = None

    def release(self, pages: np.ndarray) -> None:
        """Take back the pages of a fine-tune stream."""
        self.pool.release(pages.tolist())
