"""The engine's scheduler and request lifecycle, simulated in virtual time."""
