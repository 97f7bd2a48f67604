"""Ray Serve as the engine of membership: it starts, watches and restarts what stands for a box."""
