"""Counters, latencies and iterations of the engine."""
