"""What compares and simulates: loads, simulated devices and fleets, baselines and ablations, and their commands."""
