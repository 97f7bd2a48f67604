"""Measurements of a fleet of real daemons."""
