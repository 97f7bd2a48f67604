"""edged: serve a causal LM on one edge box and align it to each user while it serves."""

__version__ = "0.1.0"
