"""The errors of a reduction about frames that cannot be taken in."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.collectives.arrivals import Frame
from atoll.collectives.codecs import Codec
from atoll.collectives.errors import RemoteProtocolError, RoundTimeoutError

__all__ = ["held_too_long", "twice", "wrong_length"]


def wrong_length(
    peer: str, frame: Frame, length: int, codec: Codec, expected: int
) -> RemoteProtocolError:
    where = f" at {frame.offset}" if frame.offset else ""
    return RemoteProtocolError(
        f"peer {peer} sent {length} bytes{where} for chunk {frame.chunk}, which takes {expected} in"
        f" {codec.name}",
        fix="run the same version of atoll on all peers",
    )


def twice(peer: str, chunk: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"peer {peer} sent chunk {chunk} while the same frame arrives")


def held_too_long(peer: str, chunk: int, waited_s: float, late: Sequence[str]) -> RoundTimeoutError:
    """``late``: whom this peer waits for."""
    return RoundTimeoutError(
        f"peer {peer} has waited {waited_s:.1f} s to send chunk {chunk}, "
        f"because this peer still waits for {', '.join(late) or 'itself'}",
        fix="see `atoll status` for the links to those peers",
        phase="reduce",
        elapsed_s=waited_s,
    )
