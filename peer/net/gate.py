"""Who may begin a handshake: limits on connections that have not yet proved anything. Sans-I/O.

A stranger costs a descriptor, some kilobytes and a millisecond of signatures. These limits keep a
flood of strangers from taking what the members need (reliability_and_security.md 3.2).
"""

from __future__ import annotations

from collections import Counter

__all__ = ["PENDING_MAX", "PENDING_PER_ADDRESS_MAX", "STARTS_PER_ADDRESS_MAX", "Gate"]

# All handshakes in progress: 64 x (8 KiB read + TLS state of about 100 KiB) is under 8 MiB.
PENDING_MAX = 64
# One address, so that it cannot take all of them.
PENDING_PER_ADDRESS_MAX = 8
# Handshakes begun by one address in a second; about 490 per second fill a core.
STARTS_PER_ADDRESS_MAX = 10


class Gate:
    """Counts unproved connections; :meth:`enter` and :meth:`leave` go in pairs."""

    def __init__(self) -> None:
        self._pending: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()
        self._second = 0

    def enter(self, address: str, now_s: float, *, exempt: bool) -> str | None:
        """None if a connection from the IP ``address`` may begin, else the reason why not.

        ``exempt`` (loopback, current members) lifts the limits per address, not the total.
        """
        if self._pending.total() >= PENDING_MAX:
            return f"{PENDING_MAX} connections are already waiting to be admitted"
        if not exempt and (reason := self._over_limit(address, now_s)):
            return reason
        self._pending[address] += 1
        return None

    def leave(self, address: str) -> None:
        """A connection that entered is closed, or has proved itself."""
        self._pending[address] -= 1
        if self._pending[address] <= 0:
            del self._pending[address]

    def _over_limit(self, address: str, now_s: float) -> str | None:
        # Counting by whole seconds keeps no more than one second of addresses. It lets twice the
        # rate pass across a boundary, which is harmless.
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._starts.clear()
        if self._pending[address] >= PENDING_PER_ADDRESS_MAX:
            return f"{PENDING_PER_ADDRESS_MAX} connections of this address wait to be admitted"
        if self._starts[address] >= STARTS_PER_ADDRESS_MAX:
            return f"more than {STARTS_PER_ADDRESS_MAX} connections of this address in a second"
        self._starts[address] += 1
        return None
