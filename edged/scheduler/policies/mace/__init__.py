"""MACE, and MACE without one part."""
