"""What a daemon says to its trainer about vectors, without anybody at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.collectives.errors import CodecError, ConfigError, ConnectError, SessionError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.peer.client.shared_memory import Region
from atoll.peer.daemon.event_log import EventLog
from atoll.peer.daemon.trainer_service import AttachedTrainer, TrainerService
from atoll.peer.membership.view import WITNESS, Member, View, short
from atoll.peer.rounds.outputs import TrainerOutputs
from atoll.peer.streams.transfers import Transfers
from atoll.peer.vectors.client import FETCHES_MAX
from atoll.peer.vectors.messages import AskVector, DropVector, VectorIs
from atoll.peer.vectors.server import VectorService

CLIENT = b"client"
ME, OTHER, WITNESSING = b"m" * 32, b"o" * 32, b"w" * 32
ELEMENTS = 5000


class Site:
    """A service whose messages go nowhere."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.members = (Member(ME, 1), Member(OTHER, 1), Member(WITNESSING, 1, WITNESS))
        self.routes: list[str] = []  # of data through relays
        self.link: Any = None
        self.node: Any = SimpleNamespace(
            me=Member(ME, 1), view=self.view(), follower=SimpleNamespace(terms=None)
        )
        self.trainers = TrainerService(
            "demo",
            self.node,
            SimpleNamespace(replica=SimpleNamespace(outputs=TrainerOutputs())),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            lambda event: None,
            EventLog(lambda line: None),
        )
        host: Any = SimpleNamespace(
            send=lambda peer, message: self.sent.append(message) or True,
            relay_bytes_per_s=0.0,
            bulk_routes=lambda peer: self.routes,
            link_of=lambda peer: self.link,
        )
        self.service = VectorService(
            node=self.node,
            trainers=self.trainers,
            host=host,
            streams=SimpleNamespace(),  # type: ignore[arg-type]  # nothing is sent
            transfers=Transfers(),
            log=lambda line: None,
        )
        manifest = Manifest.of([Parameter("w", (3,))])
        self.trainer = AttachedTrainer(CLIENT, RunSpec(sync_every=1), manifest, 1, in_step=True)
        self.trainers.trainer = self.trainer
        self.service._trainer, self.service._region = self.trainer, Region("vector", ELEMENTS)

    def view(self, *gone: bytes) -> View:
        members = tuple(m for m in self.members if m.peer not in gone)
        outbound = tuple(m.peer for m in members if m.peer == OTHER)
        return View(b"L" * 32, 7, members, ME, 1, b"c" * 32, outbound=outbound)

    async def call(self, command: str, client: bytes = CLIENT, **arguments: Any) -> Any:
        return await self.service.handlers()[command](client, arguments)

    async def ask(self, peer: bytes = OTHER, number: int = 1, **differs: Any) -> int:
        wanted = {"name": "phi", "number": number, "elements": ELEMENTS, "codec": "float32"}
        ticket = await self.call("ask_vector", peer=short(peer), **wanted | differs)
        await asyncio.sleep(0)  # the question leaves
        return int(ticket)


def play(scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        site = Site()
        await scenario(site)
        site.service.close()

    asyncio.run(whole())


def test_members_are_the_replicas_of_the_view_in_the_order_of_their_ids() -> None:
    async def scenario(site: Site) -> None:
        assert await site.call("members") == {
            "view": 7,
            "names": [short(ME), short(OTHER)],
            "outbound": [short(OTHER)],
            "min_trainers": 1,
        }
        site.node.view = None
        alone = {"view": 0, "names": [short(ME)], "outbound": [], "min_trainers": 1}
        assert await site.call("members") == alone

    play(scenario)


def test_partners_are_anybody_where_a_relay_carries_data() -> None:
    async def scenario(site: Site) -> None:
        site.routes = ["relay:..."]
        assert (await site.call("members"))["outbound"] == []

    play(scenario)


def test_a_vector_that_cannot_come_is_refused_with_a_reason() -> None:
    """A control link through a relay that carries no data leads to its owner."""

    async def scenario(site: Site) -> None:
        site.link = SimpleNamespace(relay=b"R" * 32)
        ticket = await site.ask()
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectError, match="neither can dial the other, and relay"):
            await site.call("look_for_vector", ticket=ticket, timeout_s=0.0)
        assert not any(isinstance(message, AskVector) for message in site.sent)
        site.routes = ["relay:..."]
        await site.ask()
        await asyncio.sleep(0.01)
        assert any(isinstance(message, AskVector) for message in site.sent)

    play(scenario)


def test_only_the_trainer_is_served() -> None:
    async def scenario(site: Site) -> None:
        for command in ("vector_memory", "newest", "ask_vector", "drop_vector"):
            with pytest.raises(SessionError, match="not the daemon's trainer"):
                await site.call(command, client=b"another", elements=1)
        site.trainer.in_step = False
        with pytest.raises(SessionError, match="before attach"):
            await site.ask()

    play(scenario)


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"number": 0}, "positive number"),
        ({"number": 1 << 62}, "positive number"),
        ({"name": ""}, "up to 32"),
        ({"name": "x" * 33}, "up to 32"),
    ],
)
def test_what_no_other_daemon_would_understand_is_refused_here(
    differs: dict[str, Any], why: str
) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(ConfigError, match=why):
            await site.ask(**differs)
        with pytest.raises(ConnectError, match="not in the view"):
            await site.ask(WITNESSING)
        assert not site.sent

    play(scenario)


def test_who_leaves_the_view_is_not_waited_for() -> None:
    async def scenario(site: Site) -> None:
        ticket = await site.ask()
        assert site.sent == [AskVector(ticket, "phi", 1)]
        assert await site.call("look_for_vector", ticket=ticket, timeout_s=0.0) == "asked"
        site.node.view = None  # this peer itself may be out for a moment
        assert await site.call("look_for_vector", ticket=ticket, timeout_s=0.0) == "asked"
        site.node.view = site.view(OTHER)
        with pytest.raises(ConnectError, match=f"{short(OTHER)} has left the view"):
            await site.call("look_for_vector", ticket=ticket, timeout_s=0.0)
        with pytest.raises(SessionError, match="no such fetch"):
            await site.call("look_for_vector", ticket=ticket, timeout_s=0.0)
        await asyncio.sleep(0)
        assert site.sent[1:] == [DropVector(ticket)]

    play(scenario)


def test_own_vectors_are_had_in_the_same_way() -> None:
    async def scenario(site: Site) -> None:
        region = site.service._region
        assert region is not None
        region.floats[:] = values = np.linspace(0, 1, ELEMENTS, dtype=np.float32)
        place = {"name": "phi", "number": 4, "elements": ELEMENTS, "codec": "float32"}
        await site.call("publish", **place)
        assert await site.call("newest", peer=short(ME), name="phi") == 4
        ticket = await site.ask(ME, 4)
        region.floats.fill(0.0)
        assert await site.call("look_for_vector", ticket=ticket, timeout_s=5.0) == "here"
        await site.call("read_vector", ticket=ticket)
        np.testing.assert_array_equal(region.floats, values)
        waits = await site.ask(OTHER, 4)
        with pytest.raises(SessionError, match="not here yet"):
            await site.call("read_vector", ticket=waits)
        with pytest.raises(SessionError, match="no memory was asked for 5,001"):
            await site.call("publish", **place | {"elements": ELEMENTS + 1})
        assert [type(message) for message in site.sent] == [AskVector]

    play(scenario)


def test_a_vector_that_is_refused_takes_no_other_ones_place() -> None:
    async def scenario(site: Site) -> None:
        region = site.service._region
        assert region is not None
        region.floats[:] = 1.0
        place = {"name": "phi", "elements": ELEMENTS, "codec": "int8"}
        for number in (1, 2):
            await site.call("publish", number=number, **place)
        region.floats[-1] = np.nan
        for name in ("phi", "another"):
            with pytest.raises(CodecError, match=f"{name} 3: NaN"):
                await site.call("publish", number=3, **place | {"name": name})
        for number in (1, 2):
            ticket = await site.ask(ME, number, codec="int8")
            assert await site.call("look_for_vector", ticket=ticket, timeout_s=5.0) == "here"
        region.floats[:] = 1.0
        for name in ("a", "b", "c"):  # four are allowed, and nothing holds "another"
            await site.call("publish", number=1, **place | {"name": name})

    play(scenario)


def test_who_fetches_too_many_is_told_what_to_do() -> None:
    async def scenario(site: Site) -> None:
        for _ in range(FETCHES_MAX):
            ticket = await site.ask()
        with pytest.raises(ConfigError, match=f"{FETCHES_MAX} vectors .* are here to be read"):
            await site.ask()
        await site.call("drop_vector", ticket=ticket)
        await site.ask()

    play(scenario)


def test_when_the_trainer_ends_its_memory_goes_and_who_waits_is_told() -> None:
    async def scenario(site: Site) -> None:
        region = site.service._region
        assert region is not None
        place = {"name": "phi", "number": 4, "elements": ELEMENTS, "codec": "int8"}
        await site.call("publish", **place)
        mine = await site.ask(OTHER, 4)
        site.service.on_message(OTHER, AskVector(9, "phi", 5))
        site.sent.clear()
        site.service.gone(CLIENT)
        assert region.fd == -1
        assert site.sent == [VectorIs(9, 4, why="its trainer has ended, or not begun")]
        await asyncio.sleep(0)
        assert site.sent[1:] == [DropVector(mine)]
        site.service.gone(CLIENT)  # of a client that is forgotten already

    play(scenario)
