"""Measure how fast, how far and how lossy the links to the others are, and tell the coordinator."""
