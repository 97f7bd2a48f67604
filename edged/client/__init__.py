"""Requests to a running daemon, over its socket."""
