"""Which tokens of which task the next iteration computes."""
