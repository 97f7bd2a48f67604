"""`tools/fleet-demo`: three boxes as one service."""
