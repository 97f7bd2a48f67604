"""What others see of a running engine: Prometheus metrics and traces, made from its records and counters.

Owns names, units and shapes of what is shown. Must not know HTTP, nor do anything on the engine's thread.
"""
