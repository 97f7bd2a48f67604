"""The tables of a fleet: who writes an adapter, and copies of what a user has said."""
