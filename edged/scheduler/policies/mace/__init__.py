"""The MACE policy and its ablations."""
