"""Who goes next among users or applications: virtual token counters and fair queuing."""
