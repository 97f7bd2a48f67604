"""Checks of `edged doctor`: problems on this machine that hinder edged, each with its remedy."""
