"""The work that runs of applications are expected to need, learned from those that ended."""
