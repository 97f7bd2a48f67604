"""Readings of the box in, limits of the engine out."""
