"""Copies of tensors between host and device, torch's threads, and out-of-memory errors."""
