"""Do a daemon's part in bans: keep evidence, tell everybody, and let nobody in who is banned.

Lives in the event loop. On a new link both sides say which evidence counts for them; what one lacks
it asks for, piece by piece, and checks in a thread before it believes anything. Evidence is kept in
the home, one file for each, as `atoll verify` reads it. What counts here, and for whom else, goes
to the membership machine, which has the members agree on it (peer/membership/bans.py); what a view
names comes back from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from atoll.collectives.errors import BannedError, EvidenceError
from atoll.peer.daemon.ports import BanPort
from atoll.peer.membership.bans import BansBelieved, BelievedBan
from atoll.peer.membership.view import Banned, short
from atoll.peer.net.admission_policy import PeersMet
from atoll.peer.net.identity import write_atomic
from atoll.peer.net.wire import Within, message
from atoll.peer.verify.ban_record import BANS_MAX, UNSURE_MAX, Ban, Bans, EvidenceIndex
from atoll.peer.verify.evidence import (
    EVIDENCE_BYTES_MAX,
    Evidence,
    Finding,
    parse_evidence,
    verify_evidence,
)

# Sent at a time, and no more before it is asked for: heartbeats wait behind it half a second on a
# line of 1 Mbit/s, and links with too much to send are ended.
PIECE_BYTES: Final = 64 * 1024
ARRIVING_MAX: Final = 4  # pieces of evidence that come at a time, each from another peer
ASKED_MAX: Final = 64  # times that one peer may begin to ask over one link: files are large
ARRIVAL_S: Final = 10.0  # without a piece, and somebody else is asked
# A line of 1 Mbit/s brings four times as much: whoever sends less keeps a place that others need.
SLOWEST_BYTES_PER_S: Final = 32 * 1024
STALLS_MAX: Final = 3  # files that one peer does not send; then it is asked for no more
VAIN_MAX: Final = 64  # files of one peer that count for nothing here; then neither
WORD_S: Final = 2.0  # before we say that a pair is to go: the accuser may be found out meanwhile

_Digest = Annotated[bytes, Within(32, 32)]
_Size = Annotated[int, Within(0, EVIDENCE_BYTES_MAX)]


@message(wire="KnownBans")
class KnownBans:
    """Tell which evidence counts for the sender.

    ``words``: evidence about pairs that the sender says are to go, which does not count for it yet.
    """

    digests: Annotated[tuple[_Digest, ...], Within(0, BANS_MAX)]
    words: Annotated[tuple[_Digest, ...], Within(0, UNSURE_MAX)] = ()


@message(wire="AskEvidence")
class AskEvidence:
    """Ask for the piece of an evidence file that begins at ``offset``, in bytes."""

    digest: _Digest
    offset: _Size = 0


@message(wire="EvidencePiece")
class EvidencePiece:
    """Carry a piece of an evidence file of ``total`` bytes."""

    digest: _Digest
    offset: _Size
    total: _Size
    data: Annotated[bytes, Within(1, PIECE_BYTES)]


AboutBans = KnownBans | AskEvidence | EvidencePiece


@dataclass(slots=True)
class _Arriving:
    source: bytes
    begun_s: float
    data: bytearray = field(default_factory=bytearray)
    total: int = 0
    stalled: asyncio.TimerHandle | None = None


class BanList:
    """Do a daemon's part in bans: evidence in the home, over links, and for the membership machine.

    ``folder`` keeps the files of evidence; ``met``: who was a member of our views so far.
    """

    def __init__(
        self, me: bytes, folder: Path, daemon: BanPort, met: PeersMet | None = None
    ) -> None:
        self.bans = Bans(me)
        self._me, self._folder = me, folder
        self._daemon = daemon
        self._arriving: dict[bytes, _Arriving] = {}  # by digest
        self._evidence_index = EvidenceIndex()
        self._publishing = False
        self._published: tuple[BelievedBan, ...] = ()
        self._met = (
            met if met is not None else PeersMet()
        )  # members of our views, also of earlier ones
        self._forgers: set[bytes] = set()  # over this link
        self._stalls: dict[bytes, int] = {}  # files that did not come, over this link, by whom
        self._vain: dict[bytes, int] = {}  # files that count for nothing, over this link, by whom
        self._asked: dict[bytes, int] = {}  # by whom, how often
        self._lent: dict[bytes, bytes] = {}  # to whom: digest
        self._load()

    # ------------------------------------------------------------ what others ask

    def check(self, peer: bytes) -> None:
        """Raise BannedError if ``peer`` is out, for admission."""
        if peer in self.bans:
            ban = self.bans.of(peer)
            why = ban.finding.text if ban is not None else "the members have agreed on it"
            fix = "`atoll status` of a member shows the evidence"
            raise BannedError(f"this peer is banned: {why}", fix=fix)

    def is_out(self, peer: bytes) -> bool:
        return peer in self.bans

    def linked(self, peer: bytes) -> None:
        if self.bans.digests or self.bans.words:
            self._daemon.send(peer, KnownBans(self.bans.digests, self.bans.words))

    def unlinked(self, peer: bytes) -> None:
        self._asked.pop(peer, None)
        self._lent.pop(peer, None)
        self._forgers.discard(peer)
        self._evidence_index.forget(peer)
        self._stalls.pop(peer, None)
        self._vain.pop(peer, None)
        for digest in [d for d, each in self._arriving.items() if each.source == peer]:
            self._give_up(digest)

    # ------------------------------------------------------------ evidence

    def convict(self, evidence: Evidence) -> None:
        """Take evidence that this peer has found itself, in an attempt that it took part in."""
        self._believe(evidence, verify_evidence(evidence), first_hand=True)

    def installed(self, members: Iterable[bytes], banned: Iterable[Banned]) -> None:
        """Take the members of a view that was installed, and the bans that it names.

        Other words than before count now.
        """
        self._met.add(members)
        self._adopted(self.bans.met(self._met))
        self._adopted(self.bans.named({ban.peer: ban.evidence for ban in banned}))
        for digest in self.bans.unsure:
            self._weigh_words(digest)
        self._ask_more()
        self._publish()

    def _weigh_words(self, digest: bytes) -> None:
        members = self._daemon.member_peers()
        for teller in self._evidence_index.of(digest):
            self._adopted(self.bans.told(digest, teller, members))

    def on_message(self, peer: bytes, message: AboutBans) -> None:
        """Take a message about bans and their evidence."""
        if isinstance(message, KnownBans):
            self._evidence_index.hear(peer, message.digests, message.words)
            members = self._daemon.member_peers()
            for digest in (*message.digests, *message.words):
                self._adopted(self.bans.told(digest, peer, members))
            self._ask_more()
            self._publish()
        elif isinstance(message, AskEvidence):
            self._answer(message, peer)
        else:
            self._take(message, peer)

    def _ask_more(self) -> None:
        """Ask for evidence that we were told of and lack, while there is room; each peer for one.

        Not before we have met anybody: nearly all of it would be about strangers.
        """
        if not self._met:
            return
        idle = {peer for peer, count in self._stalls.items() if count >= STALLS_MAX}
        vain = {peer for peer, count in self._vain.items() if count >= VAIN_MAX}
        shut = self._forgers | idle | vain
        linked = {
            peer for peer in self._daemon.link_peers() if peer not in shut and not self.is_out(peer)
        }
        while len(self._arriving) < ARRIVING_MAX:
            able = linked - {each.source for each in self._arriving.values()}
            chosen = self._evidence_index.next(able, self._lacks)
            if chosen is None:
                return
            peer, digest = chosen
            if self._daemon.send(peer, AskEvidence(digest)):
                self._arriving[digest] = _Arriving(peer, _now_s())
                self._watch(digest)
            else:
                self._evidence_index.has_not(peer, digest)

    def _lacks(self, digest: bytes) -> bool:
        return digest not in self._arriving and not self.bans.knows(digest)

    def _watch(self, digest: bytes) -> None:
        loop, arriving = asyncio.get_running_loop(), self._arriving[digest]
        if arriving.stalled is not None:
            arriving.stalled.cancel()
        arriving.stalled = loop.call_later(ARRIVAL_S, self._stall, digest)

    def _stall(self, digest: bytes) -> None:
        source = self._arriving[digest].source
        self._stalls[source] = self._stalls.get(source, 0) + 1
        self._give_up(digest)

    def _give_up(self, digest: bytes) -> None:
        """Stop waiting for evidence from its sender; somebody else who knows it may be asked."""
        arriving = self._arriving.pop(digest)
        if arriving.stalled is not None:
            arriving.stalled.cancel()
        self._evidence_index.has_not(arriving.source, digest)
        self._ask_more()

    def _answer(self, ask: AskEvidence, peer: bytes) -> None:
        if not ask.offset:
            count = self._asked.get(peer, 0)
            if count >= ASKED_MAX or not self.bans.has(ask.digest):
                return
            self._asked[peer] = count + 1
            self._lent[peer] = ask.digest
        if self._lent.get(peer) != ask.digest:
            return
        total, data = self._piece(ask.digest, ask.offset)
        if not data:
            return
        self._daemon.send(peer, EvidencePiece(ask.digest, ask.offset, total, data))
        if ask.offset + len(data) >= total:
            del self._lent[peer]

    def _piece(self, digest: bytes, offset: int) -> tuple[int, bytes]:
        """Return how long a file is, and its piece that begins there: b"" if there is none."""
        end, evidence = offset + PIECE_BYTES, self.bans.evidence(digest)
        if evidence is not None:
            return len(evidence.encoded), evidence.encoded[offset:end]
        try:
            with self._path(digest).open("rb") as file:
                total = file.seek(0, os.SEEK_END)
                file.seek(offset)
                return total, file.read(PIECE_BYTES)
        except OSError:  # it could not be written, or has been replaced meanwhile
            return 0, b""

    def _take(self, piece: EvidencePiece, peer: bytes) -> None:
        arriving = self._arriving.get(piece.digest)
        if arriving is None or (arriving.source, len(arriving.data)) != (peer, piece.offset):
            return
        whole = min(PIECE_BYTES, piece.total - piece.offset)
        if len(piece.data) != whole or (arriving.data and arriving.total != piece.total):
            return
        if _now_s() - arriving.begun_s > ARRIVAL_S + len(arriving.data) / SLOWEST_BYTES_PER_S:
            self._stall(piece.digest)
            return
        arriving.data += piece.data
        arriving.total = piece.total
        if len(arriving.data) < piece.total:
            self._watch(piece.digest)
            self._daemon.send(peer, AskEvidence(piece.digest, len(arriving.data)))
        elif arriving.stalled is not None:  # else it is being looked at
            arriving.stalled.cancel()
            arriving.stalled = None
            self._daemon.spawn(self._look_at(piece.digest, arriving))

    async def _look_at(self, digest: bytes, arriving: _Arriving) -> None:
        """Verify evidence that has arrived, in a thread as it may take a second, and weigh it."""
        try:
            evidence, finding = await asyncio.to_thread(_verified, digest, bytes(arriving.data))
        except EvidenceError as error:
            source = arriving.source
            self._daemon.note("forged", f"{short(source)} sent evidence that is none: {error.what}")
            self._forgers.add(source)
            if self._arriving.get(digest) is arriving:
                self._give_up(digest)
            return
        if self._arriving.get(digest) is arriving:
            del self._arriving[digest]
        self._believe(evidence, finding, first_hand=self._daemon.took_part(evidence.terms.digest))
        if digest not in self.bans.digests:
            self._vain[arriving.source] = self._vain.get(arriving.source, 0) + 1
        self._ask_more()

    def _believe(self, evidence: Evidence, finding: Finding, *, first_hand: bool) -> None:
        digest, before = evidence.digest, {*self.bans.digests}
        strange = not first_hand and not any(peer in self._met for peer in finding.banned)
        found = self.bans.weigh(evidence, finding, first_hand=first_hand, of_stranger=strange)
        self._adopted(found)
        if not found and digest in {*self.bans.digests} - before:  # a view names this file
            self._daemon.spawn(self._write(evidence, before - {*self.bans.digests}))
            self._tell_all(KnownBans((digest,)))
        self._weigh_words(digest)
        if self.bans.knows(digest):
            asyncio.get_running_loop().call_later(WORD_S, self._say, digest)
        self._publish()

    def _say(self, digest: bytes) -> None:
        """Tell all our word about a pair, if it is new."""
        if self.bans.say(digest):
            self._tell_all(KnownBans((), (digest,)))
            self._adopted(self.bans.told(digest, self._me, self._daemon.member_peers()))

    def _tell_all(self, known: KnownBans) -> None:
        for peer in self._daemon.link_peers():
            self._daemon.send(peer, known)

    def _publish(self) -> None:
        """Tell the membership machine what counts here, and for whom else; once in a turn."""
        if not self._publishing:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish_now)

    def _publish_now(self) -> None:
        self._publishing = False
        bans = tuple(
            BelievedBan(
                ban.peer,
                ban.digest,
                ban.finding.stands_alone,
                self._evidence_index.believers(self.bans.against(ban.peer)),
            )
            for ban in self.bans.all
        )
        if bans != self._published:
            self._published = bans
            self._daemon.feed(BansBelieved(bans))

    def _adopted(self, found: list[Ban]) -> None:
        if not found:
            return
        loop = asyncio.get_running_loop()
        for ban in found:
            digest = ban.digest.hex()
            self._daemon.note(
                "banned",
                f"{short(ban.peer)} is out: {ban.finding.text}; evidence {digest[:16]}",
                peer=ban.peer.hex(),
                evidence=digest,
            )
            if ban.peer == self._me:
                fix = "see docs/errors.md: E34"
                error = BannedError(f"this peer is banned: {ban.finding.text}", fix=fix)
                loop.call_later(
                    LAST_WORDS_S, self._daemon.stop, error
                )  # others may lack what it has
        files = {ban.digest: ban.evidence for ban in found}  # a view may name several
        for evidence in files.values():
            if evidence is not None:
                self._daemon.spawn(self._write(evidence))
        self._publish()
        self._daemon.banned([ban.peer for ban in found])
        self._tell_all(KnownBans(tuple(files)))  # the banned too: so that they know why
        for ban in found:  # not at once: we may have been called by that very link
            if ban.peer != self._me:
                loop.call_later(
                    LAST_WORDS_S, self._daemon.expel, ban.peer, f"banned: {ban.finding.kind}"
                )

    # ------------------------------------------------------------ the home

    async def _write(self, evidence: Evidence, replaced: Iterable[bytes] = ()) -> None:
        path = self._path(evidence.digest)
        try:
            stale = [self._path(digest) for digest in replaced]
            await asyncio.to_thread(_save, path, evidence.encoded, stale)
        except OSError as error:  # a full disk must not end the training
            self._daemon.note("disk", f"cannot save the evidence {path.name[:16]}: {error}")
        self.bans.let_go()

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.evidence"

    def _load(self) -> None:
        """Load the evidence of an earlier life of this peer, which has believed all of it."""
        for path in sorted(self._folder.glob("*.evidence"))[:BANS_MAX]:
            try:
                if path.stat().st_size > EVIDENCE_BYTES_MAX:
                    raise EvidenceError("it is too long")
                self.bans.recall(parse_evidence(path.read_bytes()))
                self.bans.let_go()
            except (EvidenceError, OSError) as error:
                self._daemon.note("forged", f"{path} is left alone: {error}")


# For the banned to ask for the evidence before its link ends, and for others to get what it has.
LAST_WORDS_S: Final = 1.0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _verified(digest: bytes, data: bytes) -> tuple[Evidence, Finding]:
    """Return evidence and what it proves; EvidenceError if it is none. Runs in a thread."""
    if hashlib.sha256(data).digest() != digest:
        raise EvidenceError("it has another digest than was said")
    evidence = parse_evidence(data)
    _ = evidence.digest  # made once, and here, where nobody waits for it
    return evidence, verify_evidence(evidence)


def _save(path: Path, data: bytes, stale: Iterable[Path]) -> None:
    """Write the evidence, and only then remove the stale files, so that one is always there.

    Runs in a thread.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, data)
    for old in stale:
        old.unlink(missing_ok=True)
