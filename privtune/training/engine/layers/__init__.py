"""Layers of a stack of candidates: norms and clipped sums from what they saw and sent."""
