"""Benchmarks, run from a checkout; not installed."""
