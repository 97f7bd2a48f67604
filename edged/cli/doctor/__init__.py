"""`edged doctor`: what stands in edged's way on this box, and the way out of each."""
