"""Copies of tensors, the threads that compute them, and want of memory."""
