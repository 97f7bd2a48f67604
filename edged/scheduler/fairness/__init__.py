"""Fairness: the turn of each user or application, by virtual token counters or by fair queuing."""
