"""The taste model: which of several answers a person would choose, fitted to that person's signals."""
