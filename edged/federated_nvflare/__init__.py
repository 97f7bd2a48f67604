"""Federated campaigns between boxes, on NVFlare: the hub's and the boxes' parts, and their kits."""
