"""What packed tokens attend to, by each implementation."""
