"""The scheduler: it decides which tokens of which task the next iteration computes."""
