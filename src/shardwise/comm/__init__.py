"""Collectives, the simulated world, and the ranks that are present."""
