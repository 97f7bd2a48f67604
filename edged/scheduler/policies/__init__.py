"""Who goes next."""
