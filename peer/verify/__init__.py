"""Verify aggregates before they are committed, and ban whoever can be shown to have lied.

These are audited rounds (BTARD, Gorbunov et al. 2022, with the differences that docs/audit.md
lists).
"""
