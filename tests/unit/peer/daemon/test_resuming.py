"""Whether a run lives that is about to be resumed: whose word counts, and for how many."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.collectives.errors import IdentityInUseError
from atoll.peer.daemon.resuming import ASK_S, Inquiry, living
from atoll.peer.membership.messages import BootstrapHello, Redirect
from atoll.peer.membership.view import Member, Rules, View
from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home

A, B, C, D = (bytes([n]) * 32 for n in range(1, 5))
THREE = View(b"L" * 32, 7, tuple(Member(p, 1) for p in (A, B, C)), A, 40, b"c" * 32)
TWO = replace(THREE, members=THREE.members[:2], rules=Rules("majority"))


@pytest.mark.parametrize(
    ("here", "lives"),
    [("ABC", True), ("BC", True), ("AB", True), ("A", False), ("C", False), ("", False)],
)
def test_a_quorum_of_its_view_keeps_a_run_alive(here: str, lives: bool) -> None:
    answers = {globals()[name]: THREE for name in here}
    assert living(answers) == (THREE if lives else None)


def test_of_two_under_majority_the_tie_breaker_goes_on_alone() -> None:
    assert living({A: TWO}) == TWO
    assert living({B: TWO}) is None


@pytest.mark.parametrize("policy", ["any", "auto"])
def test_whoever_is_left_goes_on_where_the_policy_says_so(policy: str) -> None:
    left = replace(TWO, rules=Rules(policy))
    assert living({B: left}) == left


def test_members_in_the_middle_of_a_change_of_view_count_together() -> None:
    later = replace(THREE, number=8)
    assert living({A: later, B: THREE}) == later


def test_members_of_different_histories_do_not_count_together() -> None:
    other = replace(THREE, lineage=b"M" * 32)
    assert living({A: THREE, B: other}) is None
    assert living({A: THREE, B: other, C: other}) == other


def test_who_is_not_of_the_newest_view_has_no_voice_in_it() -> None:
    """Voted out, it may be the last to know."""
    later = replace(THREE, number=8, members=(*THREE.members[1:], Member(D, 1)), coordinator=B)
    assert living({A: THREE, B: later}) is None
    assert living({A: THREE, B: later, D: later}) == later


# ---------------------------------------------------------------- asking, over real links


class Site:
    """A peer with links and, if it is in one, a view that it tells to whoever calls."""

    def __init__(self, home: Home, inc: int = 1) -> None:
        self.me = Member(home.peer_id, inc)
        self.view: View | None = None
        self.inquiry: Inquiry | None = None
        self.called = 0
        self.host = ConnectionManager(
            peer_id=home.peer_id,
            tls=run_tls(home, b"s" * 32),
            run="demo",
            daemon=SimpleNamespace(
                life=lambda: self.me.inc,
                incarnation=lambda: self.me.inc,
                advertised=lambda: self.me.address,
                on_message=self._on_message,
                on_up=lambda peer, address, _: self.inquiry and self.inquiry.on_up(peer, address),
                on_down=lambda peer, why: None,
                on_data=lambda peer, stream: stream.close(),
                note=lambda kind, text: None,
                on_conflict=lambda inc: None,
            ),
        )

    def _on_message(self, peer: bytes, message: object) -> None:
        if self.inquiry is not None:
            self.inquiry.on_message(peer, message)
        elif isinstance(message, BootstrapHello):
            self.called += 1
            if self.view is not None:
                self.host.send(peer, Redirect(self.view))

    async def ask(self, *contacts: str) -> View | None:
        self.inquiry = Inquiry(self.host, self.me, contacts)
        return await self.inquiry.ask()


def play(folder: Path, count: int, scenario: Callable[[list[Site]], Awaitable[None]]) -> None:
    """Sites that listen; the first one asks."""

    async def run(homes: list[Home]) -> None:
        sites = [Site(home) for home in homes]
        for site in sites:
            host, port = await site.host.listen("127.0.0.1", 0)
            site.me = replace(site.me, address=f"{host}:{port}")
        try:
            await scenario(sites)
        finally:
            for site in sites:
                await site.host.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with ExitStack() as homes:
        asyncio.run(run([homes.enter_context(Home.open(folder / f"{n}")) for n in range(count)]))


def view_of(sites: list[Site]) -> View:
    members = tuple(site.me for site in sites)
    return replace(THREE, members=members, coordinator=members[0].peer)


def test_one_known_address_leads_to_all_members(tmp_path: Path) -> None:
    async def scenario(sites: list[Site]) -> None:
        asker, *members = sites
        view = view_of(members)
        for member in members:
            member.view = view
        assert await asker.ask(members[2].me.address) == view
        assert asker.inquiry is not None
        assert "Joining it" in asker.inquiry.outcome("demo", view)

    play(tmp_path, 4, scenario)


def test_nobody_there_costs_no_time(tmp_path: Path) -> None:
    async def scenario(sites: list[Site]) -> None:
        asker, gone = sites
        await gone.host.close()
        began_s = time.monotonic()
        assert await asker.ask(gone.me.address, asker.me.address) is None
        assert time.monotonic() - began_s < ASK_S / 2  # it is a fraction of a second

    play(tmp_path, 2, scenario)


def test_members_without_a_quorum_and_peers_without_a_view_are_heard_out(tmp_path: Path) -> None:
    async def scenario(sites: list[Site]) -> None:
        asker, member, viewless, *gone = sites
        member.view = view_of([member, *gone])
        for each in gone:
            await each.host.close()
        assert await asker.ask(member.me.address, viewless.me.address) is None
        assert asker.inquiry is not None
        text = asker.inquiry.outcome("demo", None)
        assert "is in view 7" in text
        assert "resuming it here" in text
        assert member.called > 1
        assert viewless.called > 1

    play(tmp_path, 5, scenario)


def test_a_host_that_hangs_costs_a_dial_and_no_more(tmp_path: Path) -> None:
    async def scenario(sites: list[Site]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            began_s = time.monotonic()
            assert await sites[0].ask(f"127.0.0.1:{silent.getsockname()[1]}") is None
            assert time.monotonic() - began_s < ASK_S

    play(tmp_path, 1, scenario)


def test_to_end_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(sites: list[Site]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            asking = asyncio.create_task(sites[0].ask(address))
            reached, _ = await asyncio.get_running_loop().sock_accept(silent)
            with reached:
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking

    play(tmp_path, 1, scenario)


def test_another_life_of_this_peer_ends_it(tmp_path: Path) -> None:
    """A copied home: the two must not both go on."""

    async def scenario(home: Home) -> None:
        later, earlier = Site(home, inc=2), Site(home, inc=1)
        host, port = await later.host.listen("127.0.0.1", 0)
        try:
            with pytest.raises(IdentityInUseError):
                await earlier.ask(f"{host}:{port}")
        finally:
            await later.host.close()
            await earlier.host.close()

    with Home.open(tmp_path / "home") as home:
        asyncio.run(scenario(home))
