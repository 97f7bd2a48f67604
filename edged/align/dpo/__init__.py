"""The DPO step and its units."""
