"""Decide who may come into a run, beside TLS, which proves that a peer knows the run's secret.

The listener and whoever dials ask an ``AdmissionPolicy`` about each peer, and so does the daemon
about what peers send. The one that is here asks for nothing more; a run with an authority has
another (peer/authority/policy.py), and bans come before both (peer/daemon/optional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.connection_limits import check_members
from atoll.peer.net.hello import Hello
from atoll.peer.net.wire import name_of

MET_MAX: Final = 4 * MEMBERS_MAX  # peers that were members of a view that we were in, the latest


class AdmissionPolicy:
    """Guard a run without an authority: whoever knows its secret may come in.

    ``per_address``: how many peers of one IP address, 0 for any number; None for what is usual.
    """

    # What hellos of this peer show.
    credential = b""
    role = ""

    def __init__(self, per_address: Callable[[], int | None] = lambda: 0) -> None:
        self._per_address = per_address

    # ------------------------------------------------------------ what the listener asks

    def admit(self, peer: bytes, theirs: Hello, *, called: bool) -> None:
        """Raise AdmissionError if the peer may not have a control link.

        ``called``: we dialled it.
        """

    def check_address(self, ip: str, others: Sequence[str]) -> None:
        """Raise AddressFullError if no more peers may come from an IP address, beside others."""
        check_members(ip, others, self._per_address())

    # ------------------------------------------------------------ what the daemon asks

    def linked(self, peer: bytes) -> None:
        """Note that there is a link to ``peer`` now."""

    def unlinked(self, peer: bytes) -> None:
        """Note that there is no link to ``peer`` any more."""

    def check_message(self, peer: bytes, message: object) -> bool:
        """Return whether a message of ``peer`` is to be heard at all.

        Raises RemoteProtocolError for one that it may not send.
        """
        return True

    def on_message(self, peer: bytes, message: Any) -> None:
        """Take a message about passes. RemoteProtocolError in a run without an authority."""
        raise RemoteProtocolError(f"nobody expects a {name_of(message)} here")

    def is_out(self, peer: bytes) -> bool:
        """Return whether ``peer`` may not be a member any more, though its process may live."""
        return False

    def revoke(self, data: bytes) -> str:
        """Take a revocation list from a person at this machine; return what became of it.

        ConfigError here, because without an authority nobody can be revoked.
        """
        raise ConfigError(
            "this run has no authority, so nobody can be revoked",
            fix="found it anew with `atoll up --authority PUBKEY`: see docs/admission.md",
        )

    def status(self) -> dict[str, Any]:
        """Return how peers are admitted, in plain types, for `atoll status`."""
        return {"mode": "secret"}


class PeersMet:
    """Remember who was a member of a view that this peer was in: MET_MAX, the latest."""

    def __init__(self) -> None:
        self._peers: dict[bytes, None] = {}

    def add(self, peers: Iterable[bytes]) -> None:
        self._peers |= dict.fromkeys(peers)
        while len(self._peers) > MET_MAX:
            del self._peers[next(iter(self._peers))]

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)
