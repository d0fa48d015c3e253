"""Bans in a world: who believes which, who has told whom. What peer/verify/ does in a daemon.

Whoever believes has no link to the banned any more, and refuses it. Evidence that stands alone
convinces everybody who is linked to one that has it; other evidence, who took part, and whoever
hears it from more than half of its view. Beliefs are in homes: a process that comes back has them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from atoll.peer.membership.bans import BansBelieved, BelievedBan
from harness.host import Host

if TYPE_CHECKING:
    from harness.world import World

__all__ = ["Outlaws"]

SPREAD_S = 0.2  # what has been learnt is told on


class Outlaws:
    """``believers``: of each ban, also those that do not live now; by peer id."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.believers: dict[bytes, set[bytes]] = {}
        self._stands_alone: dict[bytes, bool] = {}
        self._told: dict[Host, BansBelieved] = {}

    def convict(self, peer: bytes, finders: Collection[bytes], *, stands_alone: bool) -> None:
        """These have found it out themselves."""
        if peer in self.believers:
            return
        if not self.believers:
            self._world.after(0.0, self._spread)
        self.believers[peer] = set()
        self._stands_alone[peer] = stands_alone
        for finder in finders:
            self._believe(finder, peer)

    def digest(self, peer: bytes) -> bytes:
        return b"evidence against".ljust(31, b".") + peer[:1]

    def refuses(self, here: bytes, there: bytes) -> bool:
        """Nothing passes between the two: one of them keeps the other out."""
        found = self.believers
        return here in found.get(there, ()) or there in found.get(here, ())

    def missing(self) -> list[str]:
        """What some living member's view does not name, although all of it must soon believe it."""
        return [
            f"{peer[:1].decode()} at {host.name}"
            for peer, believers in self.believers.items()
            for host in self._world.living()
            if (view := host.node.view) is not None and not view.is_banned(peer)
            if self._stands_alone[peer] and believers & {*view.peers}
        ]

    def _believe(self, believer: bytes, peer: bytes) -> None:
        self.believers[peer].add(believer)
        host, banned = self._world.hosts.get(believer), self._world.hosts.get(peer)
        if host is not None and banned is not None and host is not banned:
            self._world.log("{} bans {}", host.name, banned.name)
            self._world.part(host, banned)

    def _spread(self) -> None:
        self._world.after(SPREAD_S, self._spread)
        for host in self._world.living():
            for peer in self.believers:
                self._hear(host, peer)
            self._tell(host)

    def _hear(self, host: Host, peer: bytes) -> None:
        believers = self.believers[peer]
        heard = believers & host.node.linked
        if host.peer in believers or host.peer == peer or not heard:
            return
        members = host.node.view.peers if host.node.view is not None else ()
        most = 2 * len(heard.intersection(members) - {peer}) > len(members)
        if self._stands_alone[peer] or most:
            self._believe(host.peer, peer)

    def _tell(self, host: Host) -> None:
        """The machine, if it is news."""
        bans = tuple(
            BelievedBan(peer, self.digest(peer), self._stands_alone[peer], self._heard(host, peer))
            for peer, believers in self.believers.items()
            if host.peer in believers
        )
        event = BansBelieved(bans)
        if bans and self._told.get(host) != event:
            self._told[host] = event
            self._world.deliver(host, event)

    def _heard(self, host: Host, peer: bytes) -> frozenset[bytes]:
        return frozenset(self.believers[peer] & host.node.linked)
