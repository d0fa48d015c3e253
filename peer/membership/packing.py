"""Shorten long messages inside a view by what both ends know: the identities of its members.

Theory. What is long in a message of a large view are the names of peers, of 32 random bytes each,
and their addresses: a BEGIN names all who take part, an ACCEPT all members of the next view. Both
ends have the view that the message is of. So it is compressed with the view as a preset dictionary
(DEFLATE, RFC 1951, and FDICT of RFC 1950): a name becomes a reference of a few bytes, and a
whole view that differs from this one in a member little more than that member. Who is in another
view cannot read it; but it would do nothing with it either, since messages of another view are
answered with that one, or by asking for it, by lineage and number alone, which stand outside.

What is signed or hashed is the message itself, never how it travels.
"""

from __future__ import annotations

import zlib

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership.messages import Accept, Begin, CoordinatorBeat, InView, Packed
from atoll.peer.membership.view import View
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, decode, encode

PACKED = (Accept, Begin, CoordinatorBeat)  # what may be long: all others are short, or blobs
PACK_FROM_MEMBERS = 8  # of a smaller view a message would be encoded twice for little
PACK_FROM_BYTES = 512  # a BEGIN of eight members; below it there is little to find
BLOB_BYTES_MAX = 1 << 12  # of a BEGIN: what trainers give is packed already, or does not shrink
VIEWS_KEPT = 3  # of which messages may still be on their way
WINDOW_BYTES = 1 << 15  # of DEFLATE: what lies farther back is not found
LEVEL = 1  # the names are found by any, and the rest is short


class Packing:
    """Pack messages to members of the views that this peer was in lately, and unpack theirs."""

    def __init__(self) -> None:
        self._dictionaries: dict[tuple[bytes, int], bytes] = {}
        self._members: dict[tuple[bytes, int], frozenset[bytes]] = {}
        self._last: tuple[InView, InView] | None = None  # a message, and how it travels

    def enter(self, view: View) -> None:
        """Take a view that this peer has entered."""
        tag = (view.lineage, view.number)
        self._dictionaries[tag] = dictionary_of(view)
        self._members[tag] = view.peer_set
        for old in list(self._dictionaries)[:-VIEWS_KEPT]:
            del self._dictionaries[old], self._members[old]

    def packed(self, peer: bytes, message: object) -> object:
        """Return the message to send to a peer in place of this one: often the same."""
        if not isinstance(message, PACKED):
            return message
        if isinstance(message, Begin) and len(message.blob) > BLOB_BYTES_MAX:
            return message
        tag = (message.lineage, message.view)
        members = self._members.get(tag, frozenset())
        if peer not in members or len(members) < PACK_FROM_MEMBERS:
            return message
        if self._last is None or self._last[0] is not message:  # one for all who get it
            self._last = (message, _pack(message, self._dictionaries[tag]))
        return self._last[1]

    def unpacked(self, peer: bytes, message: Packed) -> InView:
        """Return what a peer has packed; the message itself if we were not in its view together.

        So nobody outside makes this peer inflate anything. RemoteProtocolError for bytes that
        nobody has packed so.
        """
        tag = (message.lineage, message.view)
        if peer not in self._members.get(tag, ()):
            return message
        dictionary = self._dictionaries[tag]
        inner = decode(_inflated(message.data, dictionary), PACKED)
        assert isinstance(inner, InView)
        if (inner.lineage, inner.view) != (message.lineage, message.view):
            raise RemoteProtocolError("a packed message is of another view than it says")
        return inner


def dictionary_of(view: View) -> bytes:
    """Return the bytes that messages of a view are compressed with.

    It is the view as it travels. Of one that is longer than DEFLATE can look back, which are about
    370 members, it is the identities alone, and messages are shortened by less.
    """
    whole = encode(view)
    if len(whole) > WINDOW_BYTES:
        whole = b"".join(sorted(view.peers))
    return whole[-WINDOW_BYTES:]


def _pack(message: InView, dictionary: bytes) -> InView:
    plain = encode(message)
    if len(plain) < PACK_FROM_BYTES:
        return message
    packer = zlib.compressobj(LEVEL, zdict=dictionary)
    data = packer.compress(plain) + packer.flush()
    return Packed(message.lineage, message.view, data) if len(data) < len(plain) else message


def _inflated(data: bytes, dictionary: bytes) -> bytes:
    unpacker = zlib.decompressobj(zdict=dictionary)
    try:
        plain = unpacker.decompress(data, CONTROL_FRAME_BYTES_MAX)
    except zlib.error as error:
        raise RemoteProtocolError(f"a packed message cannot be read: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        what = f"a packed message is cut, has a tail or is over {CONTROL_FRAME_BYTES_MAX:,} bytes"
        raise RemoteProtocolError(what)
    return plain
