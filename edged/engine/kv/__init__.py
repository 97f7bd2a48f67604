"""Where the KV cache lies."""
