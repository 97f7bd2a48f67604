"""Policies that only compare: baselines of papers, and ablations. They come in by entry points `edged.policies`."""
