"""One identity in two processes, as when a home folder was copied: the older one is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import ConnectError, IdentityInUseError

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


async def two_lives(net: Net) -> tuple[Node, Node, Node]:
    """A node c, and the older and the newer life of "a", of which the newer has a link to c."""
    c, older, newer = net.node("c"), net.node("a", life=1), net.node("a", life=2)
    await newer.host.dial(await c.listen())
    return c, older, newer


def test_the_older_life_that_dials_a_third_peer_is_told_both_numbers(net: Net) -> None:
    async def scenario() -> None:
        c, older, newer = await two_lives(net)
        with pytest.raises(IdentityInUseError, match=r"life 2 .*, yours is 1") as caught:
            await older.host.dial(c.address)
        assert caught.value.exit_code == 2
        assert [up[2] for up in c.ups] == [2]
        assert not c.downs
        assert not newer.downs

    net.run(scenario())


def test_the_older_life_that_is_dialled_gets_no_link(net: Net) -> None:
    """The third peer knows its address from an older view."""

    async def scenario() -> None:
        c, older, newer = await two_lives(net)
        assert await c.host.dial(await older.listen()) == newer.id
        await older.until(lambda: older.downs)  # and so it dials, and is told
        assert older.downs == [(c.id, "the other side said goodbye")]
        assert c.host._links[newer.id].hello.life == 2
        assert not c.downs

    net.run(scenario())


def test_the_newer_life_with_a_link_tells_the_older(net: Net) -> None:
    async def scenario() -> None:
        _, older, newer = await two_lives(net)
        with pytest.raises(ConnectError, match="an older life of this peer"):
            await newer.host.dial(await older.listen())
        assert older.conflicts == [2]
        assert not newer.conflicts

    net.run(scenario())


def test_the_newer_life_without_a_link_is_the_one_that_goes(net: Net) -> None:
    """It was just started; the other may hold all that there is of the run."""

    async def scenario() -> None:
        older, newer = net.node("a", life=1), net.node("a", life=2)
        with pytest.raises(IdentityInUseError, match="life 1, ours 2"):
            await newer.host.dial(await older.listen())
        assert not older.conflicts

    net.run(scenario())


@pytest.mark.parametrize("linked", [False, True])
def test_the_older_life_that_dials_the_newer_goes(net: Net, linked: bool) -> None:
    async def scenario() -> None:
        c, older, newer = net.node("c"), net.node("a", life=1), net.node("a", life=2)
        if linked:
            await older.host.dial(await c.listen())
        with pytest.raises(IdentityInUseError, match="life 2, ours 1"):
            await older.host.dial(await newer.listen())
        assert not newer.conflicts

    net.run(scenario())


def test_a_new_incarnation_of_one_process_is_no_conflict(net: Net) -> None:
    """Its life is the same, so its links and those that it makes meanwhile are its own."""

    async def scenario() -> None:
        a, b = net.node("a", life=1), net.node("b")
        await a.host.dial(await b.listen())
        a.host._daemon.incarnation = lambda: 2
        await b.host.dial(await a.listen())
        stream = await b.host.open_data(a.id, a.address)
        await a.until(lambda: a.streams)
        for end in (stream, *a.streams):
            end.close()
        assert not (a.downs + b.downs)
        assert not a.conflicts

    net.run(scenario())


def test_dials_at_once_to_a_third_peer_and_to_the_older_life(net: Net) -> None:
    """Whatever comes first, exactly one of the two goes."""

    async def scenario() -> None:
        c, older, newer = net.node("c"), net.node("a", life=1), net.node("a", life=2)
        addresses = await older.listen(), await c.listen()
        answers = await asyncio.gather(
            *(newer.host.dial(address) for address in addresses), return_exceptions=True
        )
        assert isinstance(answers[0], ConnectError | IdentityInUseError)
        newer_goes = isinstance(answers[0], IdentityInUseError)
        assert older.conflicts == ([] if newer_goes else [2])

    net.run(scenario())
