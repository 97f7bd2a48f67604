"""Governors: they turn readings of the box into limits of the engine."""
