"""Placement of requests over the boxes of a fleet: what is known of each, forecasts, policies, homes of users."""
