"""Benchmarks of parts of the engine."""
