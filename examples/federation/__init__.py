"""`tools/federation-demo`: boxes that teach starts together, over a hub."""
