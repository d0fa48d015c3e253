"""Count the bytes that go over the network, by what they are for.

Counted is what is given to sockets and what comes out of them: with the framing of TLS and of
sealed streams, without the headers of TCP and IP and what the kernel sends again.
"""

from __future__ import annotations

import threading
from typing import Final

ROUNDS: Final = "rounds"  # reductions, exchanged vectors, audits
STATE: Final = "state"  # parameters, log entries and results for those who lack them
PROBES: Final = "probes"  # measurements of links
CONTROL: Final = "control"  # everything else: handshakes, heartbeats, votes, plans
PURPOSES: Final = (ROUNDS, STATE, PROBES, CONTROL)


class ByteCounts:
    """Add up the bytes that one daemon sends and receives. Any thread may count and ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = dict.fromkeys(PURPOSES, 0)
        self._received = dict.fromkeys(PURPOSES, 0)

    def add_sent(self, purpose: str, count: int) -> None:
        with self._lock:
            self._sent[purpose] += count

    def add_received(self, purpose: str, count: int) -> None:
        with self._lock:
            self._received[purpose] += count

    @property
    def sent(self) -> dict[str, int]:
        """Return the bytes sent so far, by purpose."""
        with self._lock:
            return dict(self._sent)

    @property
    def received(self) -> dict[str, int]:
        """Return the bytes received so far, by purpose."""
        with self._lock:
            return dict(self._received)
