"""Compute what audited rounds need: pure functions on arrays and bytes.

Before anybody sends, everybody commits to its encoded parts (``shard_roots`` in
collectives/merkle.py), and owners commit to their results. Only then a common seed is drawn. From
it everybody computes a few numbers of its own part (sketch.py); owners, who have the parts, look
whether they are right to the bit, and everybody checks the results by them (checks.py), with room
for what an honest encoding does (``error_bounds``). What fails a check is computed again from the
parts themselves (recompute.py).

After BTARD (Gorbunov, Borzunov, Diskin, Ryabinin 2022), with signs instead of a unit vector, eight
numbers instead of one, and results that are encoded.
"""
