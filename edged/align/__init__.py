"""Learning from preferences: signals, pairs, DPO steps, adapters and their versions."""
