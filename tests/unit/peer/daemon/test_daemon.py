"""What the daemon's shell decides by itself: when a join has failed; and what it says at first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from atoll.collectives import native
from atoll.collectives.errors import ConnectError
from atoll.peer.daemon.daemon import Daemon
from atoll.peer.daemon.optional import MODULES
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import Member, View
from atoll.peer.net.identity import Home
from atoll.peer.net.wire import registered


def options(*, found: bool) -> DaemonOptions:
    return DaemonOptions(
        run="demo",
        secret=b"s" * 32,
        listen_host="127.0.0.1",
        listen_port=0,
        advertise="127.0.0.1",
        found=found,
    )


def with_daemon(home_path: Path, look: Callable[[Daemon], None]) -> None:
    async def scenario(home: Home) -> None:
        daemon = Daemon(home, options(found=False), lambda line: None)
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
        assert "not admitted to run demo within 2 min" in error.what

    with_daemon(tmp_path / "a", look)


def test_who_was_in_and_is_excluded_just_then_goes_on_trying(tmp_path: Path) -> None:
    """A soak has ended this way: excluded exactly when the time for its first join was up."""

    def look(daemon: Daemon) -> None:
        me = Member(daemon.node.me.peer, 1)
        daemon._on_installed(View(b"L" * 32, 1, (me,), me.peer, 0, b""))
        assert daemon.node.view is None  # out again
        daemon._check_joined()
        assert not daemon._end.done()

    with_daemon(tmp_path / "a", look)


def test_long_messages_to_members_travel_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send an ACCEPT, which names all members of the next view: both ends know this one."""

    def look(daemon: Daemon) -> None:
        sent: list[tuple[bytes, object]] = []
        heard: list[object] = []
        monkeypatch.setattr(daemon.host, "send", lambda peer, message: sent.append((peer, message)))
        monkeypatch.setattr(daemon, "feed", heard.append)
        peers = [daemon.node.me.peer, *(bytes([n]) * 32 for n in range(1, 9))]
        members = tuple(Member(peer, 1, address=f"10.0.0.{n}:1") for n, peer in enumerate(peers))
        view = View(b"L" * 32, 1, members, peers[0], 0, b"0" * 32)
        daemon._packing.enter(view)
        following = replace(view, number=2)
        accept = ms.Accept(view.lineage, view.number, ms.Ballot(1, peers[0], 1), following)
        daemon._effect_handlers[ev.Send](ev.Send(peers[1], accept))
        daemon._effect_handlers[ev.Send](ev.Send(b"x" * 32, accept))
        (_, to_member), (_, to_stranger) = sent
        assert isinstance(to_member, ms.Packed)
        assert to_stranger is accept, "who is not in the view cannot read it"
        daemon._on_membership(peers[1], to_member)
        assert heard == [ev.Received(peers[1], accept)]

    with_daemon(tmp_path / "a", look)


def first_lines(home_path: Path) -> list[str]:
    """What a daemon says until it answers commands."""
    said: list[str] = []

    async def scenario(home: Home) -> None:
        daemon = Daemon(home, options(found=True), said.append)
        await daemon.run(on_ready=daemon.stop)

    with Home.open(home_path) as home:
        asyncio.run(scenario(home))
    return said


def test_without_kernels_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "NUMPY_REASON", "no compiler")
    monkeypatch.setattr(native, "_said", [])
    first, second = first_lines(tmp_path / "a"), first_lines(tmp_path / "b")
    assert [line for line in first if "codecs" in line and "(no compiler)" in line] == [first[0]]
    assert not any("codecs" in line for line in second)


def test_with_kernels_nothing_is_said_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "NUMPY_REASON", "")
    assert not any("codecs" in line for line in first_lines(tmp_path / "a"))


# Connections and streams take these themselves; the last two are kept in files.
ELSEWHERE = """
    Hello Refused StreamAsked StreamDenied StreamGranted StreamOffered AskReach ReachReport DialBack
    DialledBack AskOutline RunOutline AskRate RateIs AdmissionFile Evidence CircuitAsked
    CircuitGranted CircuitOffered CircuitDenied CircuitAlive CircuitFault ObserveAsked Observed
    PunchAsked PunchReady PunchDenied
"""
PARTS_OF_MESSAGES = """
    Absent AuditTerms Ballot Banned Check Commitment Cradle Elimination EntryHead Layout LinkSeen
    Member Newcomer Operation Origin Owners Proof ReachAnswer ReachAt Remembered Replayed Report
    Resultant Reveal Rules Run Shown Statement Terms Verdict View Vote Withholding Work
"""
RECORDS = "LedgerCommit LedgerLife LedgerOperations LedgerPromise LedgerReady LedgerView LedgerVote"


def test_every_control_message_has_one_handler(tmp_path: Path) -> None:
    for module in MODULES:  # of the optional messages, which are registered when one comes
        import_module(module)

    def look(daemon: Daemon) -> None:
        table = daemon._message_table()  # raises if two components take one message
        ours = {n: kind for n, kind in registered().items() if kind.__module__.startswith("atoll.")}
        untaken = ours.keys() - table.keys()
        assert table["ResultHead"] == daemon.executor.fetcher.on_head
        assert untaken == {*ELSEWHERE.split(), *PARTS_OF_MESSAGES.split(), *RECORDS.split()}

    with_daemon(tmp_path / "a", look)


def test_every_effect_has_a_handler(tmp_path: Path) -> None:
    def look(daemon: Daemon) -> None:
        assert set(daemon._effect_table()) == set(get_args(ev.Effect))

    with_daemon(tmp_path / "a", look)
