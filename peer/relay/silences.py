"""Count for how long nothing has come on links through relays. Pure.

The kernel knows whether the relay takes our bytes, and not whether the peer gets them. So each end
says that it is alive every ALIVE_S, and counts its looks, not seconds: where this process did not
run for a while, as on a starved machine, what has arrived meanwhile has not been read yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

ALIVE_S: Final = 1.0
# Five times what both say; a link over which a large message of a round goes takes less.
SILENT_LOOKS: Final = 5
SILENT_S: Final = SILENT_LOOKS * ALIVE_S


class Silences:
    """Remember when each link was heard last, and for how many looks it has been silent."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def look(self, heard: Mapping[Hashable, float]) -> None:
        """Take in when each link was heard last; links that are not named are forgotten."""
        self._seen = {link: (at_s, self._looks(link, at_s)) for link, at_s in heard.items()}

    def _looks(self, link: Hashable, at_s: float) -> int:
        before_s, looks = self._seen.get(link, (float("-inf"), 0))
        return looks + 1 if at_s <= before_s else 0

    def is_silent(self, link: Hashable) -> bool:
        """Return whether nothing has come on a link for SILENT_LOOKS looks."""
        return self._seen.get(link, (0.0, 0))[1] >= SILENT_LOOKS
