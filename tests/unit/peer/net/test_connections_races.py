"""Two links of one pair: dialled at once, dialled again, dialled by a newer life of the peer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import IdentityInUseError
from atoll.peer.net import connections
from atoll.peer.net.wire import message

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


@message(wire="RaceNote")
class RaceNote:
    number: int


async def settled(*nodes: Node) -> None:
    """Until no superseded link is left."""
    for node in nodes:
        for link in node.host._leaving:
            await link.ended.wait()


@pytest.mark.parametrize("head_start", [None, *range(12)])
def test_of_two_links_dialled_at_once_one_stays_and_nothing_is_lost(
    net: Net, head_start: int | None
) -> None:
    async def scenario() -> None:
        a, b = sorted((net.node("a"), net.node("b")), key=lambda node: node.id)
        # Messages begin with the first link, so that some travel on the one that goes.
        a.on_up = lambda peer_id: a.host.send(peer_id, RaceNote(1)) and None
        b.on_up = lambda peer_id: b.host.send(peer_id, RaceNote(2)) and None
        addresses = await a.listen(), await b.listen()

        async def late(node: Node, address: str) -> bytes:
            for _ in range(head_start or 0):  # so many turns of the loop later
                await asyncio.sleep(0)
            return await node.host.dial(address)

        first, second = (a, b) if head_start is None or head_start % 2 else (b, a)
        goals = {a.id: addresses[1], b.id: addresses[0]}
        await asyncio.gather(first.host.dial(goals[first.id]), late(second, goals[second.id]))
        await a.until(lambda: a.messages)
        await b.until(lambda: b.messages)
        await settled(a, b)
        assert [up[0] for up in a.ups] == [b.id]
        assert [up[0] for up in b.ups] == [a.id]
        assert (a.messages, b.messages) == ([(b.id, RaceNote(2))], [(a.id, RaceNote(1))])
        assert not a.downs
        assert not b.downs
        dialled_by = {node.host._links[peer.id].dialled_by for node, peer in ((a, b), (b, a))}
        assert len(dialled_by) == 1
        assert a.host.send(b.id, RaceNote(3))
        await b.until(lambda: len(b.messages) == 2)

    net.run(scenario())


@pytest.mark.parametrize("head_start", range(12))
def test_who_dials_twice_at_once_loses_nothing(net: Net, head_start: int) -> None:

    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        a.on_up = lambda peer_id: a.host.send(peer_id, RaceNote(1)) and None
        address = await a.listen()

        async def late() -> bytes:
            for _ in range(head_start):  # so many turns of the loop later
                await asyncio.sleep(0)
            return await b.host.dial(address)

        await asyncio.gather(b.host.dial(address), late())
        await b.until(lambda: b.messages)
        await settled(a, b)
        assert b.messages == [(a.id, RaceNote(1))]
        assert len(a.ups) == len(b.ups) == 1
        assert not a.downs
        assert not b.downs

    net.run(scenario())


def test_what_came_behind_the_hello_is_read_before_the_goodbye(net: Net) -> None:
    """A link may be superseded in the very turn of the loop in which it is made. OpenSSL throws
    away what it has not read when it says goodbye."""

    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        a.on_up = lambda peer_id: a.host.send(peer_id, RaceNote(1)) and None
        b.on_up = lambda peer_id: b.host._links[peer_id].close(deliver=True)
        await b.host.dial(await a.listen())
        await b.host._links[a.id].ended.wait()
        assert b.messages == [(a.id, RaceNote(1))]

    net.run(scenario())


def test_the_smaller_id_wins_when_both_links_stand(net: Net) -> None:
    async def scenario() -> None:
        a, b = sorted((net.node("a"), net.node("b")), key=lambda node: node.id)
        await b.host.dial(await a.listen())
        assert b.host._links[a.id].dialled_by == b.id
        await a.host.dial(await b.listen())
        await settled(a, b)
        for node, peer in ((a, b), (b, a)):
            assert node.host._links[peer.id].dialled_by == a.id
            assert len(node.ups) == 1
            assert not node.downs
        assert await b.host.dial(a.address) == a.id  # refused as a duplicate, which is success
        assert b.host._links[a.id].dialled_by == a.id

    net.run(scenario())


def test_a_peer_that_lost_its_link_may_dial_again(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old link is dead at one end only, as after a NAT that forgot it."""

    async def scenario() -> None:
        a, b = sorted((net.node("a"), net.node("b")), key=lambda node: node.id)
        await a.host.dial(await b.listen())
        b.host._links.pop(a.id).drain()  # b forgets; a does not know
        monkeypatch.setattr(connections, "DIAL_TIMEOUT_S", -1.0)  # the link is old
        await b.host.dial(await a.listen())
        assert a.host._links[b.id].dialled_by == b.id
        assert not a.downs
        assert a.host.send(b.id, RaceNote(1))
        await b.until(lambda: b.messages)

    net.run(scenario())


def test_a_newer_life_takes_the_place_of_the_older(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        again = net.node("b", life=2)
        await again.host.dial(a.address)
        assert a.ups == [(b.id, "", 1), (b.id, "", 2)]
        assert a.downs == [(b.id, "it was restarted (life 2)")]
        await b.until(lambda: b.downs)
        with pytest.raises(IdentityInUseError, match=r"life 2 .*, yours is 1"):
            await b.host.dial(a.address)
        assert a.host.send(b.id, RaceNote(1))
        await again.until(lambda: again.messages)

    net.run(scenario())


def test_a_link_that_is_dropped_is_down_before_the_next_one_is_up(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report them in order: else the second would seem to have ended, and nobody would use it."""

    async def scenario() -> None:
        a, b = await net.linked()
        install, before = a.host._install, list[tuple[bytes, str]]()
        a.on_up = lambda peer_id: before.extend(a.downs)

        def drops_first(link: connections.ControlLink) -> bool:
            a.host.drop(b.id, "renewed")  # in the same turn of the loop
            return install(link)

        monkeypatch.setattr(a.host, "_install", drops_first)
        del b.host._links[a.id]
        await b.host.dial(a.address)
        await a.until(lambda: len(a.ups) == 2)
        await settled(a)
        await asyncio.sleep(0)
        assert a.downs == before == [(b.id, "renewed")]
        assert a.host.link_peers() == (b.id,)

    net.run(scenario())
