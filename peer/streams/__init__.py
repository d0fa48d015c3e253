"""Carry bulk bytes between daemons: data streams, their keys, and whose frame goes next."""
