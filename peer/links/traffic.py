"""Say what this peer's streams did between two readings, and what disturbs what. Sans-I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.peer.links.tcp_intervals import LOAD_BYTES, Slice

Slices = Mapping[bytes, Sequence[Slice]]  # of all streams to, or from, each peer


class Traffic:
    """Hold what all streams to, and from, each peer did between two readings.

    ``sending``, ``arriving``: the peers to which, and from which, there was load.
    """

    def __init__(self, out: Slices, into: Slices) -> None:
        self.out, self.into = out, into
        self.sending = frozenset(
            peer for peer, slices in out.items() if any(one.is_load for one in slices)
        )
        self.arriving = frozenset(
            peer for peer, slices in into.items() if sum(one.arrived for one in slices) > LOAD_BYTES
        )

    def is_alone(self, peer: bytes) -> bool:
        """Return whether nothing shared this peer's links with what went to ``peer``.

        What goes to others takes its part of the uplink. What arrives, from whomever, fills the
        queue of the downlink, and in it wait the acknowledgements of what goes to ``peer``: TCP
        takes that for a longer way than its window is made for, and sends less than it could.
        """
        return not self.arriving and self.sending <= {peer}
