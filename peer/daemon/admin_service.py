"""Answer what people and trainers ask of a daemon over the local socket, beside training."""

from __future__ import annotations

import asyncio
from typing import Any

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.errors import ConfigError, DivergedError, NoQuorumError, TooFewPeersError
from atoll.peer.daemon.ipc_server import Handler
from atoll.peer.daemon.ports import AdminPort
from atoll.peer.daemon.status import snapshot
from atoll.peer.daemon.wiring import Components
from atoll.peer.membership.events import HandOver, TrainersAsked
from atoll.peer.membership.view import MEMBERS_MAX, is_quorum, short
from atoll.peer.net.invite import Invite, fingerprint_of, parse_address


class AdminService:
    """Answer the commands that are not a trainer's own."""

    def __init__(self, parts: Components, daemon: AdminPort) -> None:
        self._parts, self._daemon = parts, daemon

    def handlers(self) -> dict[str, Handler]:
        return {
            "status": self._status,
            "rows": self._rows,
            "leave": self._leave,
            "waiting": self._waiting,
            "invite": self._invite,
            "handover": self._hand_over,
            "min_trainers": self._min_trainers,
            "revoke": self._revoke,
        }

    async def _status(self, client: bytes, arguments: dict[str, Any]) -> dict[str, Any]:
        return snapshot(self._parts)

    async def _rows(self, client: bytes, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return self._parts.rows.table.told(max(1, int(arguments.get("last", 1))))

    async def _leave(self, client: bytes, arguments: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_soon(self._daemon.leave)

    async def _waiting(self, client: bytes, arguments: dict[str, Any]) -> dict[str, str]:
        code = ""
        if self._parts.node.heartbeats.halted:
            code = DivergedError.code
        elif not self._hears_quorum():
            code = NoQuorumError.code
        elif self._parts.node.heartbeats.held:
            code = TooFewPeersError.code
        return {"text": str(snapshot(self._parts)["waiting"]), "code": code}

    def _hears_quorum(self) -> bool:
        """Return whether this peer hears a quorum of its view; True if it is in none.

        A candidate that finds no quorum is in the same position as a coordinator that hears none.
        """
        node = self._parts.node
        if node.coordinator is not None:
            return node.coordinator.hears_quorum(node.now_s)
        linked = {node.me.peer, *self._parts.host.link_peers()}
        return node.view is None or is_quorum(node.view, linked)

    async def _invite(self, client: bytes, arguments: dict[str, Any]) -> str:
        return invite_of(self._parts)

    async def _revoke(self, client: bytes, arguments: dict[str, Any]) -> str:
        """Take the authority's list of those who are out, so that all members know it.

        Raises ConfigError if no list is given.
        """
        signed = arguments.get("signed")
        if not isinstance(signed, bytes):
            raise ConfigError("no revocation list was given")
        return self._parts.admission.revoke(signed)

    async def _min_trainers(self, client: bytes, arguments: dict[str, Any]) -> None:
        """Ask the coordinator for a view in which rounds need so many trainers."""
        count, node = arguments.get("count"), self._parts.node
        terms = node.follower.terms
        most = AUDITED_PEERS_MAX if terms is not None and terms.audited else MEMBERS_MAX
        if type(count) is not int or not 1 <= count <= most:
            what = f"min_trainers is {str(count)[:20]}"
            raise ConfigError(what, fix=f"min_trainers must be 1 to {most} in this run")
        if node.view is None:
            what = "this peer is in no view of the run yet"
            raise ConfigError(what, fix="ask again when `atoll status` shows its members")
        self._daemon.feed(TrainersAsked(count))

    async def _hand_over(self, client: bytes, arguments: dict[str, Any]) -> str:
        """Let another member coordinate, from the next boundary between two rounds on.

        Returns its short id, or says that it is the first member that can. Raises ConfigError if
        this peer does not coordinate, or if no single member is called so.
        """
        node = self._parts.node
        wanted = str(arguments.get("peer", ""))
        if node.view is None or node.coordinator is None:
            lead = short(node.view.coordinator) if node.view else "nobody"
            raise ConfigError(f"not the coordinator of a view: {lead} is", fix="ask that one")
        others = [p for p in node.view.peers if p != node.me.peer]
        found = [p for p in others if not wanted or short(p).startswith(wanted)]
        if not found or (wanted and len(found) > 1):
            names = ", ".join(short(p) for p in others) or "nobody else"
            fix = "name one of them, or nobody: then the first that can takes over"
            raise ConfigError(f"no single member is called {wanted!r}: there is {names}", fix=fix)
        self._daemon.feed(HandOver(found[0] if wanted else b""))
        return short(found[0]) if wanted else "the first member that can"


def invite_of(parts: Components) -> str:
    """Return an invite to the daemon's run, with an address that works.

    Raises ConfigError in a run whose authority makes the invites, and where nobody can join.
    """
    options = parts.options
    address, peer = parts.reach.invited_to()
    if options.authority:
        again = f"atoll authority invite DIR --run {options.run} --at {address}"
        what = f"the authority of run {options.run} invites, and nobody else can"
        raise ConfigError(what, fix=f"ask it for what this prints there: {again}")
    fingerprint = fingerprint_of(peer)
    return str(Invite(*parse_address(address), options.run, fingerprint, options.secret))
