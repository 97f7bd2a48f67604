"""Readings of the box: processor, memory, power, temperature."""
