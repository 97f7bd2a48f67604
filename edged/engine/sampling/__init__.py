"""Sampling of tokens."""
