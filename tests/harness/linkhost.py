"""A link host as a daemon has one, without the daemon, for sites of tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home
from atoll.peer.streams.manager import Streams

__all__ = ["link_host"]

RUN, SECRET = "demo", b"s" * 32  # the same for all sites of a test


def link_host(
    home: Home,
    *,
    address: Callable[[], str],
    streams: Callable[[], Streams],
    on_message: Callable[[bytes, object], None],
    log: Callable[[str], None],
) -> ConnectionManager:
    """``address``: what it advertises, once it listens. ``streams``: to and from its peers; they
    need the host themselves, so they are asked for when a link comes."""
    daemon = SimpleNamespace(
        life=lambda: 1,
        incarnation=lambda: 1,
        advertised=address,
        on_message=on_message,
        on_up=lambda peer, where, inc: streams().know(peer, where),
        on_down=lambda peer, why: streams().close_to(peer),
        on_data=lambda peer, stream: streams().accept(peer, stream),
        note=lambda kind, text: log(text),
        on_conflict=lambda inc: None,
    )
    return ConnectionManager(
        peer_id=home.peer_id, tls=run_tls(home, SECRET), run=RUN, daemon=daemon
    )
