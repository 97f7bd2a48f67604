"""The paged K/V cache's bookkeeping: pool, prefix trie, spill, prompts that wait, pruning."""
