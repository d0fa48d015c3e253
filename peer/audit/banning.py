"""A daemon's part in bans: keeps the evidence, tells everybody, and lets nobody in who is banned.

Lives in the event loop. On a new link both sides say which evidence counts for them; what one lacks
it asks for, and checks before it believes anything. Evidence is kept in the home, one file for
each, as `atoll verify` reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from atoll.collectives.errors import AtollError, BannedError, EvidenceError
from atoll.peer.audit.bans import BANS_MAX, Ban, Bans
from atoll.peer.audit.evidence import EVIDENCE_BYTES_MAX, Evidence, parse_evidence
from atoll.peer.group.views import short
from atoll.peer.identity import write_atomic
from atoll.peer.net.wire import Within, message

__all__ = ["AskEvidence", "BanKeeper", "EvidencePiece", "KnownBans"]

PIECE_BYTES: Final = 256 * 1024  # a control frame carries it among others
ARRIVING_MAX: Final = 4  # pieces of evidence that come at a time, from all peers together
ASKED_MAX: Final = 64  # times that one peer may ask for evidence over one link: files are large

_Digest = Annotated[bytes, Within(32, 32)]
_Size = Annotated[int, Within(0, EVIDENCE_BYTES_MAX)]


@message
class KnownBans:
    """The evidence that counts for the sender."""

    digests: Annotated[tuple[_Digest, ...], Within(0, BANS_MAX)]


@message
class AskEvidence:
    digest: _Digest


@message
class EvidencePiece:
    """A piece of the file, of ``total`` bytes."""

    digest: _Digest
    offset: _Size
    total: _Size
    data: Annotated[bytes, Within(1, PIECE_BYTES)]


class BanKeeper:
    """``drop`` ends the link to a peer and all its streams; ``stop``: this peer may not go on;
    ``on_ban``: the running attempts have to know. ``note`` takes the kind and the text of a line in
    the log, and fields."""

    def __init__(
        self,
        me: bytes,
        folder: Path,
        *,
        send: Callable[[bytes, object], bool],
        links: Callable[[], Sequence[bytes]],
        members: Callable[[], Collection[bytes]],
        drop: Callable[[bytes, str], None],
        note: Callable[..., None],
        stop: Callable[[AtollError], None],
        spawn: Callable[[Any], None],
        on_ban: Callable[[Collection[bytes]], None],
    ) -> None:
        self.bans = Bans(me)
        self._me, self._folder = me, folder
        self._send, self._links, self._members = send, links, members
        self._drop, self._note, self._stop, self._spawn = drop, note, stop, spawn
        self._on_ban = on_ban
        self._arriving: dict[
            bytes, tuple[bytes, bytearray, int]
        ] = {}  # digest -> source, data, total
        self._told: dict[bytes, set[bytes]] = {}  # digest -> peers for whom it counts
        self._asked: dict[bytes, int] = {}
        self._load()

    # ------------------------------------------------------------ what others ask

    def check(self, peer: bytes) -> None:
        """BannedError if ``peer`` is out; for the door."""
        if (ban := self.bans.of(peer)) is not None:
            raise BannedError(
                f"this peer is banned: {ban.finding.text}",
                fix=f"a member's `atoll status` shows evidence {ban.evidence.digest.hex()[:16]}",
            )

    def is_out(self, peer: bytes) -> bool:
        return peer in self.bans

    def linked(self, peer: bytes) -> None:
        self._asked.pop(peer, None)
        if self.bans.digests:
            self._send(peer, KnownBans(self.bans.digests))

    def unlinked(self, peer: bytes) -> None:
        for digest in [d for d, (source, _, _) in self._arriving.items() if source == peer]:
            del self._arriving[digest]
            self._told.get(digest, set()).discard(peer)
            self._ask_again(digest)

    # ------------------------------------------------------------ evidence

    def convict(self, evidence: Evidence) -> None:
        """What this peer has found itself, in an attempt that it took part in."""
        self._adopted(self.bans.learn(evidence, first_hand=True))

    def on_message(self, peer: bytes, message: object) -> bool:
        """False if it is about something else."""
        if isinstance(message, KnownBans):
            for digest in message.digests:
                self._hear_known(digest, peer)
        elif isinstance(message, AskEvidence):
            self._answer(message.digest, peer)
        elif isinstance(message, EvidencePiece):
            self._take(message, peer)
        else:
            return False
        return True

    def _hear_known(self, digest: bytes, peer: bytes) -> None:
        self._told.setdefault(digest, set()).add(peer)
        if len(self._told) > BANS_MAX:
            del self._told[next(iter(self._told))]
        if self.bans.knows(digest):
            self._adopted(self.bans.told(digest, peer, self._members()))
        elif digest not in self._arriving and len(self._arriving) < ARRIVING_MAX:
            self._ask(digest, peer)

    def _ask(self, digest: bytes, peer: bytes) -> None:
        if self._send(peer, AskEvidence(digest)):
            self._arriving[digest] = (peer, bytearray(), 0)

    def _ask_again(self, digest: bytes) -> None:
        """Of somebody else who has said that it knows this."""
        linked = set(self._links())
        for peer in self._told.get(digest, ()):
            if peer in linked and not self.is_out(peer):
                self._ask(digest, peer)
                return

    def _answer(self, digest: bytes, peer: bytes) -> None:
        evidence, count = self.bans.evidence(digest), self._asked.get(peer, 0)
        if evidence is None or count >= ASKED_MAX:
            return
        self._asked[peer] = count + 1
        data = evidence.encoded
        for offset in range(0, len(data), PIECE_BYTES):
            piece = data[offset : offset + PIECE_BYTES]
            self._send(peer, EvidencePiece(digest, offset, len(data), piece))

    def _take(self, piece: EvidencePiece, peer: bytes) -> None:
        source, data, total = self._arriving.get(piece.digest, (b"", bytearray(), 0))
        if source != peer or piece.offset != len(data) or (data and total != piece.total):
            return
        data += piece.data
        self._arriving[piece.digest] = (peer, data, piece.total)
        if len(data) < piece.total:
            return
        del self._arriving[piece.digest]
        if len(data) > piece.total or hashlib.sha256(data).digest() != piece.digest:
            self._note("forged", f"{short(peer)} sent evidence with another digest than it said")
            return
        try:
            evidence = parse_evidence(bytes(data))
            found = self.bans.learn(evidence)
        except EvidenceError as error:
            self._note("forged", f"{short(peer)} sent evidence that proves nothing: {error.what}")
            return
        for teller in self._told.get(piece.digest, ()):
            found = found or self.bans.told(piece.digest, teller, self._members())
        self._adopted(found)

    def reconsider(self) -> None:
        """The view is another one: whose word counts may have changed."""
        for digest, tellers in list(self._told.items()):
            for peer in tuple(tellers):
                self._adopted(self.bans.told(digest, peer, self._members()))

    def _adopted(self, found: list[Ban]) -> None:
        if not found:
            return
        for ban in found:
            digest = ban.evidence.digest
            self._note(
                "banned",
                f"{short(ban.peer)} is out: {ban.finding.text}; evidence {digest.hex()[:16]}",
                peer=ban.peer.hex(),
                evidence=digest.hex(),
            )
            if ban.peer == self._me:
                fix = "see docs/errors.md: E34"
                self._stop(BannedError(f"this peer is banned: {ban.finding.text}", fix=fix))
        self._spawn(self._write(found[0].evidence))
        self._on_ban([ban.peer for ban in found])
        known = KnownBans((found[0].evidence.digest,))
        for peer in self._links():
            self._send(peer, known)  # the banned too: so that they know why
        loop = asyncio.get_running_loop()
        for ban in found:  # not at once: we may have been called by that very link
            if ban.peer != self._me:
                loop.call_later(LAST_WORDS_S, self._drop, ban.peer, f"banned: {ban.finding.kind}")

    # ------------------------------------------------------------ the home

    async def _write(self, evidence: Evidence) -> None:
        path = self._folder / f"{evidence.digest.hex()}.evidence"
        try:
            await asyncio.to_thread(_save, path, evidence.encoded)
        except OSError as error:  # a full disk must not end the training
            self._note("disk", f"cannot save the evidence {path.name[:16]}: {error}")

    def _load(self) -> None:
        """What an earlier life of this peer knew: it has believed all of it."""
        for path in sorted(self._folder.glob("*.evidence"))[:BANS_MAX]:
            try:
                if path.stat().st_size > EVIDENCE_BYTES_MAX:
                    raise EvidenceError("it is too long")
                self.bans.learn(parse_evidence(path.read_bytes()), first_hand=True)
            except (EvidenceError, OSError) as error:
                self._note("forged", f"{path} is left alone: {error}")


LAST_WORDS_S: Final = 1.0  # for the banned to ask for the evidence, before its link ends


def _save(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, data)
