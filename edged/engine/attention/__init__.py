"""Attention of packed tokens over the paged K/V cache: the interface and a file for each implementation."""
