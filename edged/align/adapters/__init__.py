"""Adapters: weights and optimizer, in memory and in files."""
