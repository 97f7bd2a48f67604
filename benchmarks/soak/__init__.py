"""A soak test: a real daemon under load for a long time, with random faults and checks for leaks."""
