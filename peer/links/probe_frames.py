"""Define the frames of a probe: nobody wants them, so whoever receives one drains it. Sans-I/O."""

from __future__ import annotations

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership.view import View
from atoll.peer.streams.frames import DataHeader

PROBE = 7  # frame kind, beside those of attempts and transfers (see state_sync/incoming.py)
# Small, because a frame of a round waits for the one at hand: 13 ms at 10 Mbit/s. Every reader
# keeps so much memory to drain them into.
PROBE_FRAME_BYTES = 16 << 10


def probe_header(view: View) -> DataHeader:
    return DataHeader(PROBE, 0, 0, PROBE_FRAME_BYTES, view.lineage[:8], view.number, 0, 0, 0)


def check_probe(header: DataHeader) -> None:
    """Raise RemoteProtocolError for a probe that takes more memory than a probe may."""
    if header.length > PROBE_FRAME_BYTES:
        raise RemoteProtocolError(
            f"a probe of {header.length:,} bytes; at most {PROBE_FRAME_BYTES:,} are allowed"
        )
