"""The KV cache on the device: storage, its memory, pruned layouts, and offload of evicted pages."""
