"""Attacks on rules of aggregation: what peers send that want to harm a run.

They know all that honest peers send in a round, and the rule, and they act together (base.py).
``crude`` attacks are far from what is honest, ``hidden`` ones lie among it, ``search`` tries on the
rule itself what harms it most. ``catalogue`` has them by name; ``swarm`` lets workers of a run in
one process attack it.
"""
