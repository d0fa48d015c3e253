"""What fewer than 20 of 5,000 seeds reach, and why that is right."""

from __future__ import annotations

__all__ = ["UNREACHED"]

UNREACHED: dict[str, str] = {}
