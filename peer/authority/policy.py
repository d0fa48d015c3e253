"""Do a daemon's part in admission: show its own pass, judge those of others, tell what it learns.

Lives in the event loop. On a new link both sides say first how much they know, and then tell what
the other does not, before anything else; what is new later goes to everybody at once. It is kept in
the home.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    PassForgedError,
    PassRevokedError,
    PassUsedUpError,
    RemoteProtocolError,
)
from atoll.peer.authority.grants import Credential
from atoll.peer.authority.ledger import (
    RECORDS_MAX,
    RECORDS_PER_MESSAGE_MAX,
    AboutPasses,
    AdmissionFile,
    Admitted,
    Known,
    Ledger,
    Revoked,
    standing,
)
from atoll.peer.daemon.ports import AdmissionPort
from atoll.peer.membership.messages import BootstrapHello, Join
from atoll.peer.membership.view import short
from atoll.peer.net.admission_policy import AdmissionPolicy
from atoll.peer.net.hello import Hello, fix_of
from atoll.peer.net.identity import Home, write_atomic
from atoll.peer.net.wire import decode, encode

SAVE_PAUSE_S = 5.0  # after a write that failed


class AuthorityAdmission(AdmissionPolicy):
    """Guard a run with an authority, whose public key is all that it knows of it.

    ``founds``: there is nobody else to judge. Raises AdmissionError if its own pass is no good.
    """

    def __init__(
        self,
        home: Home,
        ledger: Ledger,
        credential: bytes,
        role: str,
        *,
        founds: bool,
        daemon: AdmissionPort,
        per_address: Callable[[], int | None] = lambda: 0,
    ) -> None:
        super().__init__(per_address)
        self.ledger, self.credential, self.role = ledger, credential, role
        self._me = home.peer_id
        self._daemon = daemon
        self._path = home.path / "admission"
        self._present: dict[bytes, Credential] = {}  # what those with a link have shown
        self._out: set[bytes] = set()  # whose links were ended, since they last came in
        self._named: set[bytes] = set()  # who has sent forgeries on its present link
        self._unsaved = self._saves = False
        self._writing = asyncio.Lock()
        _load(self._path, ledger)
        self._own = self._check_own(founds)

    def _check_own(self, founds: bool) -> Credential:
        """Judge the own pass; AdmissionError if it is no good.

        Members judge whether it is still good to come in with; a founder has only itself.
        """
        now_s = time.time()
        try:
            own = self.ledger.judge(self._me, self.credential, self.role, now_s if founds else None)
        except AdmissionError as error:
            raise type(error)(f"not admitted: {error.what}", fix=fix_of(error)) from error
        if not own.grant.expired(now_s) and self.ledger.record(own)[0] is not None:
            self._save()
        return own

    # ------------------------------------------------------------ links

    def admit(self, peer: bytes, theirs: Hello, *, called: bool) -> None:
        """Raise AdmissionError if the peer may not come in; else keep what it has shown.

        Outside a view this peer does not judge whether those that it calls came in in time: their
        fellow members have, and will tell.
        """
        now_s = None if called and self._daemon.is_outside() else time.time()
        found = self.ledger.judge(peer, theirs.credential, theirs.role, now_s)
        if len(self._present) >= RECORDS_MAX:
            linked = set(self._daemon.link_peers())
            self._present = {p: shown for p, shown in self._present.items() if p in linked}
        self._present[peer] = found
        self._out.discard(peer)
        if now_s is not None:
            self._keep(*self.ledger.record(found), source=peer)

    def linked(self, peer: bytes) -> None:
        shown = self._present.get(peer)
        if shown is not None and (why := self.ledger.revoked(shown)):
            self._end_soon(peer, why)  # between its hello and now
        self._daemon.send(peer, Known(self.ledger.revocations.number, self.ledger.digest))

    def _tell_all(self, peer: bytes, known: Known) -> None:
        """Tell ``peer`` what it does not know yet; what it knows and we do not, it tells us."""
        if known.number < self.ledger.revocations.number:
            self._daemon.send(peer, Revoked(self.ledger.revocations.encode()))
        if known.digest == self.ledger.digest:
            return
        told = [found.encode() for found in self.ledger.records()]
        for start in range(0, len(told), RECORDS_PER_MESSAGE_MAX):
            self._daemon.send(peer, Admitted(tuple(told[start : start + RECORDS_PER_MESSAGE_MAX])))

    def unlinked(self, peer: bytes) -> None:
        self._named.discard(peer)

    def is_out(self, peer: bytes) -> bool:
        return peer in self._out or self.ledger.is_out(peer)

    # ------------------------------------------------------------ what others say

    def check_message(self, peer: bytes, message: object) -> bool:
        if peer in self._out:
            return False  # what was on its way
        if isinstance(message, Join | BootstrapHello):
            shown = self._present.get(peer)
            if shown is None or not shown.grant.permits(message.member.role):
                raise RemoteProtocolError(f"its pass is not for the role {message.member.role}")
        return True

    def on_message(self, peer: bytes, message: AboutPasses) -> None:
        try:
            if isinstance(message, Known):
                self._tell_all(peer, message)
            elif isinstance(message, Revoked):
                self._adopt(message.signed, peer)
            else:
                for data in message.credentials:
                    self._keep(*self.ledger.learn(data), source=peer)
        except AdmissionError as error:  # the sender should have noticed; nothing else is wrong
            if peer not in self._named:
                self._named.add(peer)
                self._daemon.note("forged", f"{short(peer)} sent something forged: {error.what}")

    def revoke(self, data: bytes) -> str:
        try:
            new = self._adopt(data, None)
        except PassForgedError as error:
            fix = "give it the file DIR/revocations of this run's authority, unchanged"
            raise PassForgedError(error.what, fix=fix) from error
        latest = self.ledger.revocations
        if not new:
            return f"nothing new: list {latest.number} is known already"
        return f"list {latest.number} with {len(latest.ids)} revoked is told to all"

    def _adopt(self, data: bytes, source: bytes | None) -> bool:
        if not self.ledger.revoke(data):
            return False
        latest = self.ledger.revocations
        by = f"from {short(source)}" if source else "given here"
        self._daemon.note("revoked", f"list {latest.number}, {len(latest.ids)} revoked, {by}")
        self._save()
        self._tell(Revoked(data), source)  # the revoked too: so that they know why
        if why := self.ledger.revoked(self._own):
            self._daemon.spawn(self._end_revoked(why))
        for peer, shown in self._present.items():
            if peer in self._daemon.link_peers() and (why := self.ledger.revoked(shown)):
                self._end_soon(peer, why)
        return True

    def _keep(
        self, found: Credential | None, displaced: Credential | None, *, source: bytes
    ) -> None:
        """Let everybody know of a record that is new, and let go whom it displaces."""
        if found is None:
            return
        grant = found.grant
        text = f"{short(found.peer)} came with {grant.describe()}, number {self.ledger.used(found)}"
        self._daemon.note("admitted", f"{text} of {grant.peers_max}; its id is {found.peer.hex()}")
        self._save()
        self._tell(Admitted((found.encode(),)), source if source != found.peer else None)
        if displaced is None:
            return
        why = f"more than {grant.peers_max} came with its token at once, and others stay"
        if displaced.peer == self._me:
            self._daemon.stop(
                PassUsedUpError(f"this peer goes: {why}", fix="ask for a token of its own")
            )
        elif self._present.get(displaced.peer) == displaced:
            self._end_soon(displaced.peer, why)

    def _tell(self, message: object, source: bytes | None) -> None:
        for peer in self._daemon.link_peers():
            if peer != source:
                self._daemon.send(peer, message)

    def _end_soon(self, peer: bytes, why: str) -> None:
        # Not at once: we may have been called by that very link.
        self._out.add(peer)
        self._daemon.note("revoked", f"{short(peer)} is out: {why}")
        asyncio.get_running_loop().call_soon(self._daemon.expel, peer, why)

    # ------------------------------------------------------------ the home

    def _save(self) -> None:
        self._unsaved = True
        if not self._saves:
            self._saves = True
            self._daemon.spawn(self._write())

    async def _end_revoked(self, why: str) -> None:
        """End this daemon, which is to know why when it is started again."""
        with suppress(OSError):  # then the others refuse it
            await self._write_once()
        self._daemon.stop(PassRevokedError(why, fix="ask whoever runs the authority"))

    async def _write_once(self) -> None:
        async with self._writing:  # one at a time: the last one that is asked for stays
            told = tuple(found.encode() for found in self.ledger.records())
            revoked = self.ledger.revocations
            data = encode(AdmissionFile(revoked.encode() if revoked.number else b"", told))
            await asyncio.to_thread(write_atomic, self._path, data)

    async def _write(self) -> None:
        while self._unsaved:
            self._unsaved = False
            try:
                await self._write_once()
            except OSError as error:  # a full disk must not end the training
                self._daemon.note("disk", f"cannot save who was admitted in {self._path}: {error}")
                self._unsaved = True
                await asyncio.sleep(SAVE_PAUSE_S)
        self._saves = False

    # ------------------------------------------------------------ for people

    def status(self) -> dict[str, Any]:
        return standing(self.ledger, self._own, time.time())


def _load(path: Path, ledger: Ledger) -> None:
    """Load what an earlier life of this peer knew; ConfigError if the file is damaged."""
    try:
        document = decode(path.read_bytes(), allowed=(AdmissionFile,))
        assert isinstance(document, AdmissionFile)
        if document.revocations:
            ledger.revoke(document.revocations)
        for data in document.credentials:
            ledger.learn(data)
    except FileNotFoundError:
        return
    except (RemoteProtocolError, AdmissionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error.what}",
            fix=f"remove it (rm {path}): the other members tell this peer again",
        ) from error
