"""Attacks: what peers send that want to harm a run.

Those on rules of aggregation know all that honest peers send in a round, and the rule, and they act
together (base.py). ``crude`` ones are far from what is honest, ``hidden`` ones lie among it,
``search`` tries on the rule itself what harms it most. ``catalogue`` has them by name; ``swarm``
lets workers of a run in one process attack it. Those on the protocol are liars of the simulator
(simulation/liars.py); ``test_protocol`` has them by name, with what must follow.
"""
