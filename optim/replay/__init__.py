"""Let others take local steps again: what a trainer keeps of its work, and the comparison.

A trainer cuts the local steps of a round into segments, keeps a checkpoint at each boundary and
the numbers of the samples of each step, and commits to all of it with 32 bytes. A validator asks
for one segment, takes its steps again and compares. ``docs/replay.md`` says what that costs, and
what it finds.

``checkpoint``, ``step_disclosure`` and ``difference`` are pure; ``recorder``, ``replaying`` and
``validating`` need torch. No daemon imports any of it: only trainers have the model.
"""
