"""Examples of edged at work, run from a checkout; not installed."""
