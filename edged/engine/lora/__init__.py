"""Updates of many adapters in one packed batch."""
