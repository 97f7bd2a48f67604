"""The HTTP API: an aiohttp application over a table of routes."""
