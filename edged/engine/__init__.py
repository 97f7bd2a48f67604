"""The engine thread: plan, run, complete."""
