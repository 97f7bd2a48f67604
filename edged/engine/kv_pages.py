"""KV-cache pages of sequences: allocated, found in the prefix trie, shared, freed."""

from dataclasses import asdict
from typing import Any

from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import PrefixTrie
from edged.engine.kv.offload import KvOffload
from edged.engine.sequence import Sequence


class KvPages:
    """The page pool, the trie of shared prefixes and their offload store.

    The engine thread alone changes them; others call `report` and read `available`.
    """

    def __init__(self, pool: PagePool, shares_prefixes: bool, offload: KvOffload | None = None) -> None:
        """The trie stays empty unless `shares_prefixes`; without an `offload` evicted prefixes are lost."""
        self.pool, self.shares_prefixes, self.offload = pool, shares_prefixes, offload
        self.trie = PrefixTrie(pool, offload)
        self.page_size = pool.page_size

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give."""
        return self.pool.free_pages + self.pool.evictable_pages

    def allocate(self, pages: int) -> list[int]:
        """Allocate pages, evicting shared prefixes that no sequence uses. Raises OutOfPages."""
        if pages > self.pool.free_pages:
            self.trie.evict(pages - self.pool.free_pages)
        return self.pool.allocate(pages)

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a sequence pages for up to `num_tokens` more; returns how many of them it has now. Raises OutOfPages."""
        num_tokens = min(num_tokens, len(sequence.token_ids) - sequence.computed)
        needed = -(-(sequence.rows + num_tokens) // self.page_size) - len(sequence.pages)
        if needed > 0:
            sequence.add_pages(self.allocate(needed))
        return num_tokens

    def reach(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a sequence free pages for up to `num_tokens` beyond its own; returns for how many it has them now."""
        room = len(sequence.pages) * self.page_size - sequence.rows - 1
        needed = -(-(num_tokens - room) // self.page_size)
        # Pages that are few are for prompts.
        if 0 < needed <= self.pool.free_pages - self.pool.capacity // 4:
            sequence.add_pages(self.pool.allocate(needed))
            room += needed * self.page_size
        return max(0, min(num_tokens, room))

    def match_prefix(self, sequence: Sequence, reserve: int, first: bool) -> None:
        """Give an admitted sequence the pages of the longest shared prefix, if there is one.

        Offloaded pages are copied into free ones, of which `reserve` are left to the others of this iteration. When a
        sequence is not admitted for the `first` time, the prefix found is its own and counts as no hit.
        """
        if not self.shares_prefixes:
            return
        pages = self.trie.match(sequence.trie_key, sequence.token_ids, reserve, counted=first)
        if pages:
            sequence.add_pages(pages)
            sequence.computed = len(pages) * self.page_size
            if first:
                sequence.cached_tokens = sequence.computed

    def share(self, sequence: Sequence) -> None:
        """Let later sequences of the same adapter version use the full pages that this one computed."""
        if self.shares_prefixes and sequence.shareable and sequence.computed:
            full = sequence.computed // self.page_size
            self.trie.insert(sequence.trie_key, sequence.token_ids[: full * self.page_size], sequence.pages[:full])

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's pages and reset it to nothing computed."""
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
        sequence.compacted = sequence.watch = sequence.draft = None

    def report(self, page_bytes: int) -> dict[str, Any]:
        """Return the status' parts on pages, of `page_bytes` each, and on shared prefixes.

        `hit_tokens` were not computed again, `restored_tokens` of them were offloaded.
        """
        pool, trie, stats, offload = self.pool, self.trie, self.trie.stats, self.offload
        return {
            "pages": {
                "total": pool.pages - 1,
                "free": pool.free_pages,
                "cached": pool.evictable_pages,
                "retired": pool.pages - pool.capacity,
                "page_size": pool.page_size,
                "bytes_per_page": page_bytes,
            },
            "prefix": {
                **asdict(stats),
                "hit_share": stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
                "spill": {
                    "kind": offload.kind if offload is not None else "off",
                    "pages": trie.offloaded_pages,
                    "capacity": offload.capacity if offload is not None else 0,
                },
            },
        }
