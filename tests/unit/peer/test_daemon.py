"""What the daemon's shell decides by itself: when a join has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from atoll.collectives.errors import ConnectError
from atoll.peer.daemon import Daemon
from atoll.peer.group.views import Member, View
from atoll.peer.identity import Home
from atoll.peer.options import DaemonOptions


def with_daemon(home_path: Path, look: Callable[[Daemon], None]) -> None:
    async def scenario(home: Home) -> None:
        options = DaemonOptions(
            run="demo",
            secret=b"s" * 32,
            listen_host="127.0.0.1",
            listen_port=0,
            advertise="127.0.0.1",
            found=False,
        )
        daemon = Daemon(home, options, lambda line: None)
        look(daemon)
        if daemon._end.done():
            daemon._end.exception()
        await daemon._close()

    with Home.open(home_path) as home:
        asyncio.run(scenario(home))


def test_who_was_never_let_in_gives_up(tmp_path: Path) -> None:
    def look(daemon: Daemon) -> None:
        daemon._check_joined()
        error = daemon._end.exception()
        assert isinstance(error, ConnectError)
        assert "not admitted to run demo within 120 s" in error.what

    with_daemon(tmp_path / "a", look)


def test_who_was_in_and_is_excluded_just_then_goes_on_trying(tmp_path: Path) -> None:
    """A soak has ended this way: excluded exactly when the time for its first join was up."""

    def look(daemon: Daemon) -> None:
        me = Member(daemon.home.peer_id, 1)
        daemon._on_installed(View(b"L" * 32, 1, (me,), me.peer, 0, b""))
        assert daemon.node.view is None  # out again
        daemon._check_joined()
        assert not daemon._end.done()

    with_daemon(tmp_path / "a", look)
