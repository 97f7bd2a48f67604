"""The laboratory: loads, simulated devices and fleets, baselines, ablations, a rebuild by TRL, and their commands."""
