"""What policies make plans with."""
