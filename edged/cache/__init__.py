"""The paged K/V cache's bookkeeping: pool, prefix trie, spill, prompts that wait, pruning. Must not know torch."""

from edged.cache.pending import Pending
from edged.cache.pool import OutOfPages, PagePool
from edged.cache.spill import Spill
from edged.cache.trie import Key, PrefixTrie, TrieStats

__all__ = ["Key", "OutOfPages", "PagePool", "Pending", "PrefixTrie", "Spill", "TrieStats"]
