"""Audited rounds: what participants commit to, what they tell of it, and how that is checked."""
