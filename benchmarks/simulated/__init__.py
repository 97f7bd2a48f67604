"""Benchmarks of policies on simulated devices, in virtual time."""
