"""Pack and unpack the fixed header in front of every bulk frame on a data stream. Sans-I/O.

Big-endian, 40 bytes. A receiver knows from the header alone whether the frame belongs to what it
is reducing now and how long it is, before it takes a single byte of payload.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError

# The largest chunk is 1 MiB of float32 (collectives/chunks.py); four times that leaves room for
# a codec that needs more than its input.
DATA_FRAME_BYTES_MAX = 4 << 20

KEPT = 6  # kind of a frame with a kept chunk; without payload: "I do not have it" (salvage.py)

_STRUCT = struct.Struct(">BBHI8sIQIII")
DATA_HEADER_BYTES = _STRUCT.size


class DataHeader(NamedTuple):
    """Describe a bulk frame: its ``kind``, its attempt and round, and its payload length."""

    kind: int  # u8, the schedule's frame kind
    flags: int  # u8
    fragment: int  # u16
    length: int  # u32, payload bytes, at most DATA_FRAME_BYTES_MAX
    lineage8: bytes  # the first 8 bytes of the lineage
    view: int  # u32
    round: int  # u64
    attempt: int  # u32
    chunk: int  # u32
    offset: int = 0  # u32, of the payload in its chunk, where several streams share one


def pack_header(header: DataHeader) -> bytes:
    """Return the header as 40 bytes; raise LocalProtocolError if a field does not fit."""
    if header.length > DATA_FRAME_BYTES_MAX or len(header.lineage8) != 8:
        raise LocalProtocolError(f"a data frame that no receiver would take: {header}")
    try:
        return _STRUCT.pack(*header)
    except struct.error as error:
        raise LocalProtocolError(f"a data frame header does not fit ({error}): {header}") from error


def unpack_header(data: bytes | bytearray | memoryview) -> DataHeader:
    """Read a header of exactly 40 bytes; raise RemoteProtocolError if its length is too large."""
    header = DataHeader._make(_STRUCT.unpack(data))
    if header.length > DATA_FRAME_BYTES_MAX:
        raise RemoteProtocolError(
            f"a data frame of {header.length:,} bytes; at most {DATA_FRAME_BYTES_MAX:,} are allowed"
        )
    return header
