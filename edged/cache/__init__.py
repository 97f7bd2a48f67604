"""The paged K/V cache's bookkeeping: page pool, prefix trie, prefixes in flight, pruning budgets."""
