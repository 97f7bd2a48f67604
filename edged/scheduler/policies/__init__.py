"""Scheduling policies: MACE, its ablations and the baselines."""
