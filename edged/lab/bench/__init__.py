"""Trace replay and comparisons that users run."""
