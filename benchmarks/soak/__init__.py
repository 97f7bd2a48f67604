"""A soak: a real daemon under load for a long time, with faults drawn at random, and what may not grow meanwhile."""
