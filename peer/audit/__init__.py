"""Audited rounds: aggregates are verified before they are committed, and whoever can be shown to
have lied is banned (BTARD, Gorbunov et al. 2022, with the differences that docs/audit.md lists)."""
