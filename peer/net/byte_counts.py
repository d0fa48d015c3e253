"""Count the bytes that go over the network, by what they are for.

Counted is what is given to sockets and what comes out of them: with the framing of TLS and of
sealed streams, without the headers of TCP and IP and what the kernel sends again. A daemon that has
caps is charged here for what it moves without asking them first (peer/caps/caps.py).
"""

from __future__ import annotations

import threading
from typing import Final

from atoll.peer.caps.caps import Cap, Caps

ROUNDS: Final = "rounds"  # reductions, exchanged vectors, audits
STATE: Final = "state"  # parameters, log entries and results for those who lack them
PROBES: Final = "probes"  # measurements of links
CONTROL: Final = "control"  # everything else: handshakes, heartbeats, votes, plans
PURPOSES: Final = (ROUNDS, STATE, PROBES, CONTROL)
# Whose bytes have to wait where there is a cap: the larger number, for the smaller.
URGENCY: Final = {CONTROL: 0, ROUNDS: 1, STATE: 2, PROBES: 3}


class ByteCounts:
    """Add up the bytes that one daemon sends and receives. Any thread may count and ask.

    ``caps``: what the daemon keeps to; None where everything is allowed. ``asked``, below: the
    bytes have asked their cap before they moved, as those of data streams do.
    """

    def __init__(self, caps: Caps | None = None) -> None:
        self.up: Cap | None = caps.up if caps is not None else None
        self.down: Cap | None = caps.down if caps is not None else None
        self._lock = threading.Lock()
        self._sent = dict.fromkeys(PURPOSES, 0)
        self._received = dict.fromkeys(PURPOSES, 0)
        self._relayed = 0

    def add_sent(self, purpose: str, count: int, *, asked: bool = False) -> None:
        with self._lock:
            self._sent[purpose] += count
        if self.up is not None and not asked:
            self.up.charge(count)

    def add_received(self, purpose: str, count: int, *, asked: bool = False) -> None:
        with self._lock:
            self._received[purpose] += count
        if self.down is not None and not asked:
            self.down.charge(count)

    def add_relayed(self, count: int) -> None:
        """Count bytes that were received from one peer and sent to another, for these two.

        They are in no purpose: they are none of this peer's.
        """
        with self._lock:
            self._relayed += count
        for cap in (self.up, self.down):
            if cap is not None:
                cap.charge(count)

    @property
    def relayed(self) -> int:
        with self._lock:
            return self._relayed

    def wake(self) -> None:
        """Let all that wait for a cap look whether their stream was closed."""
        for cap in (self.up, self.down):
            if cap is not None:
                cap.wake()

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
