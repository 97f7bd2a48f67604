"""The tree as a whole: its documents, its recipes, its quick lane."""
