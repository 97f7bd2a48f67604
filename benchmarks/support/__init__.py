"""Modules that several benchmarks share."""
