"""Carry the bytes of rounds, from submissions to the state that they change: the data plane."""
