"""What others see of a running engine: Prometheus metrics and traces, made from its records and counters."""
