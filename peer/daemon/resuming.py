"""Ask everybody that this home knows of a run whether it lives, before it is resumed.

`atoll up --resume` begins a history of its own. Given twice, by a supervisor for example, it would
begin a second one beside the members who have joined the first. So this peer calls them before it
is part of anything (HAIL, with nobody to found a run with): who is in a view answers with it
(REDIRECT), who is in none does not, and neither changes anything there. The run lives if those who
answer are a quorum of their newest view, or its policy lets whoever is left go on; then this peer
joins it. Others without a quorum do not keep a person from resuming: they join what is resumed
(peer/membership/forks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from atoll.collectives.errors import ConnectError, IdentityInUseError
from atoll.collectives.units import duration
from atoll.peer.membership.messages import BootstrapConfig, BootstrapHello, Redirect
from atoll.peer.membership.view import Member, View, is_quorum, short
from atoll.peer.net.connections import ConnectionManager

ASK_S = 10.0  # at most: addresses that nobody has any more take a dial's whole time, 5 s
ANSWER_S = 3.0  # for a peer with a link to say that it is in a view; a busy one takes a moment
REPEAT_S = 0.25  # between two calls
DIALS_MAX = 32  # at once


def living(answers: Mapping[bytes, View]) -> View | None:
    """Return the newest view of a lineage that lives, or None.

    A lineage lives if those who say that they are in this view, or in an earlier one, will go on in
    it without anybody else. ``answers``: peer -> the view that it is in.
    """
    newest: dict[bytes, View] = {}
    for view in sorted(answers.values(), key=lambda v: v.number):
        newest[view.lineage] = view
    for lineage, view in newest.items():
        here = {peer for peer, theirs in answers.items() if theirs.lineage == lineage}
        if view.may_fork or is_quorum(view, here):
            return view
    return None


class Inquiry:
    """Ask, in the event loop, whether a run lives.

    While it asks, the membership machine hears of no link.
    """

    def __init__(self, host: ConnectionManager, me: Member, contacts: Iterable[str]) -> None:
        self._host = host
        self._hail = BootstrapHello(me, BootstrapConfig())
        self._dialled = {me.address, ""}  # never ourselves
        self._contacts = set(contacts)
        self._slots = asyncio.Semaphore(DIALS_MAX)
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._linked_s: dict[bytes, float] = {}
        self._answers: dict[bytes, View] = {}
        self.addresses: dict[bytes, str] = {}  # what linked peers advertise

    def on_up(self, peer: bytes, address: str) -> None:
        self.addresses[peer] = address
        self._linked_s[peer] = self._loop.time()

    def on_message(self, peer: bytes, message: object) -> None:
        """Take the view that a member answers with, and ignore other messages.

        Whatever else members tell a peer that they have a link to, they will tell it again.
        """
        if isinstance(message, Redirect) and message.decided.member(peer) is not None:
            self._answers[peer] = message.decided

    def describe(self) -> str:
        """Say for people what is asked, since when, and who has answered."""
        elapsed_s = self._loop.time() - self._began_s
        count = len(self._dialled) - 2
        text = f"{count} address{'es' if count > 1 else ''} asked for {duration(elapsed_s)}"
        said = [f"{short(peer)} is in view {view.number}" for peer, view in self._answers.items()]
        return f"{text}; {', '.join(said) or 'nobody is in it'}"

    def outcome(self, run: str, view: View | None) -> str:
        """Say for the log what was found, and what follows."""
        if view is None:
            return f"nobody goes on with run {run} ({self.describe()}); resuming it here"
        return (
            f"run {run} lives: {view.describe()}. Joining it; to go back to the checkpoint, stop"
            " its members first"
        )

    async def ask(self) -> View | None:
        """Return the view of the run that lives, or None if none does.

        Raises IdentityInUseError if another life of this peer is met.
        """
        dials: set[asyncio.Task[bytes]] = set()
        try:
            while (view := living(self._answers)) is None:
                dials |= self._dial_more()
                for peer in self._host.link_peers():
                    self._host.send(peer, self._hail)
                dials -= {dial for dial in dials if _has_ended(dial)}
                now_s = self._loop.time()
                if now_s > self._began_s + ASK_S or not (dials or self._awaits_answers(now_s)):
                    return None
                await asyncio.sleep(REPEAT_S)
            return view
        finally:
            for dial in dials:
                dial.cancel()

    def _dial_more(self) -> set[asyncio.Task[bytes]]:
        """Dial the addresses that the home and the answers name, each once."""
        named = {m.address for view in self._answers.values() for m in view.members}
        wanted = (self._contacts | named) - self._dialled
        self._dialled |= wanted
        return {self._loop.create_task(self._dial(address)) for address in sorted(wanted)}

    async def _dial(self, address: str) -> bytes:
        async with self._slots:
            return await self._host.dial(address)

    def _awaits_answers(self, now_s: float) -> bool:
        silent = set(self._host.link_peers()) - self._answers.keys()
        return any(now_s < self._linked_s.get(peer, now_s) + ANSWER_S for peer in silent)


def _has_ended(dial: asyncio.Task[bytes]) -> bool:
    """Return whether a dial has ended, whatever is wrong with its address.

    Raises only IdentityInUseError, for another life of this peer, and what is no ConnectError.
    """
    if not dial.done():
        return False
    error = dial.exception()
    if isinstance(error, IdentityInUseError) or not isinstance(error, ConnectError | None):
        raise error
    return True
