"""Aggregate robustly: by rules that bear peers which send wrong numbers."""

from __future__ import annotations

from atoll.collectives.robust.rule import RobustRule, get_rule

__all__ = ["RobustRule", "get_rule"]
