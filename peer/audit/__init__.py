"""Audited rounds: aggregates that are verified before they are committed, and who is banned for what
can be proved (BTARD, Gorbunov et al. 2022, with the differences that docs/audit.md lists)."""
