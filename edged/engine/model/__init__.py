"""A checkpoint on the device: its linears, layers and memory."""
