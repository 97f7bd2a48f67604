"""The settings, and how they are read."""
