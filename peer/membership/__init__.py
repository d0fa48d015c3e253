"""Agree, as the peers of a run, on views, rounds, commits and forks.

All of it is sans-I/O; the machine is ``membership.Node``.
"""
