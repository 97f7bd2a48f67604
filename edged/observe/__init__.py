"""Prometheus metrics and traces, made from its records and counters."""
