"""Carry bytes between two peers that cannot dial each other."""
