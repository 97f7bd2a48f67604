"""The paged K/V cache's bookkeeping: pool, prefix trie, spill, prompts that wait, pruning."""

from edged.cache.inflight_prefixes import InflightPrefixes
from edged.cache.offload import Spill
from edged.cache.page_pool import OutOfPages, PagePool
from edged.cache.prefix_trie import Key, PrefixTrie, TrieStats

__all__ = ["InflightPrefixes", "Key", "OutOfPages", "PagePool", "PrefixTrie", "Spill", "TrieStats"]
