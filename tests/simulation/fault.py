"""One line of a script: what goes wrong, when, with whom, for how long."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault"]


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    who: str = ""  # names of hosts
    lasts_s: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at_s:7.3f} {self.kind} {self.who}{lasts} {self.detail}".rstrip()
