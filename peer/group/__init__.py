"""How the peers of a run agree: views, rounds, commits, forks. All of it sans-I/O; the machine is
``membership.Node``."""
