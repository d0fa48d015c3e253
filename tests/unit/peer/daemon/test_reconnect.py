"""The first contact with a run: several dials at once, one answer, and nobody who must wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.collectives.errors import (
    AddressFullError,
    AdmissionError,
    ConnectError,
    IdentityInUseError,
)
from atoll.peer.daemon.daemon import Daemon
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.daemon.reconnect import (
    DIALS_FIRST,
    DIALS_MAX,
    DIALS_MIN,
    FIRST_DIALS,
    REDIAL_MAX_S,
    REDIAL_MEMBER_MAX_S,
    REDIAL_S,
    DialWindow,
    Reconnector,
)
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import Member, View
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.dial import SECRET
from atoll.peer.net.identity import Home
from atoll.peer.streams.manager import Streams

PATIENCE_S = 30.0  # only a hang takes this long
PRINT = b"12345678"
ADDRESSES = tuple(f"h{number}:1" for number in range(3 * FIRST_DIALS))


class Dials:
    """Dials that do what the scenario says; the others hang."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes | None]] = []
        self.answers: dict[str, asyncio.Future[bytes]] = {}
        self.begun = asyncio.Event()

    async def dial(
        self,
        address: str,
        expect_fingerprint: bytes | None = None,
        expect_peer: bytes | None = None,
        *,
        anew: bool = False,
    ) -> bytes:
        self.asked.append((address, expect_fingerprint))
        self.begun.set()
        return await self.answers.setdefault(address, asyncio.get_running_loop().create_future())

    def link_of(self, peer: bytes) -> None:
        """Return no link: none is replaced."""

    def fail(self, address: str, error: Exception) -> None:
        self.answers[address].set_exception(error)


class Outbound(frozenset[bytes]):
    """The outbound peers; the others can be dialled where they say."""

    mapped: bytes = b""  # whose port a router forwards

    def address_of(self, peer: bytes, advertised: str) -> str:
        return advertised

    def is_mapped(self, peer: bytes) -> bool:
        return peer == self.mapped


async def patiently(
    scenario: Callable[[Dials, Reconnector], Awaitable[None]],
) -> None:
    dials = Dials()
    tasks: list[asyncio.Task[Any]] = []

    def spawn(work: Coroutine[Any, Any, Any]) -> None:
        tasks.append(asyncio.create_task(work))

    host, streams = cast(ConnectionManager, dials), cast(Streams, SimpleNamespace())
    port = SimpleNamespace(spawn=spawn, dial_failed=lambda error: None)
    keeper = Reconnector(host, streams, Outbound(), port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await scenario(dials, keeper)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended)


async def turns(count: int = 5) -> None:
    """Let everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_few_are_dialled_at_once_and_the_first_answer_wins() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        reached = keeper.reach_any(ADDRESSES, PRINT)
        await turns()
        assert dials.asked == [(ADDRESSES[0], PRINT), *((a, None) for a in ADDRESSES[1:8])]
        dials.fail(ADDRESSES[3], ConnectError("gone"))
        await turns()
        assert dials.asked[8:] == [(ADDRESSES[8], None)]
        dials.answers[ADDRESSES[5]].set_result(b"peer")
        await reached
        dials.answers[ADDRESSES[6]].set_result(b"another")  # under way: a link that is of use
        await turns()
        assert len(dials.asked) == FIRST_DIALS + 1

    asyncio.run(patiently(scenario))


def test_if_all_fail_the_error_is_that_of_the_invite() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        reached = keeper.reach_any((*ADDRESSES, ADDRESSES[0]), PRINT)
        await turns()
        dials.fail(ADDRESSES[0], AdmissionError("the token"))
        for address in ADDRESSES[1:]:
            assert not reached.done()
            dials.fail(address, ConnectError(f"{address} is silent"))
            await turns()
        with pytest.raises(AdmissionError, match="the token"):
            await reached
        assert len(dials.asked) == len(ADDRESSES)  # one that is named twice is dialled once

    asyncio.run(patiently(scenario))


def test_a_copied_home_is_told_at_once() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        reached = keeper.reach_any(ADDRESSES, None)
        await turns()
        dials.fail(ADDRESSES[2], IdentityInUseError("life 2, yours is 1"))
        with pytest.raises(IdentityInUseError):
            await reached

    asyncio.run(patiently(scenario))


# ---------------------------------------------------------------- how many at a time

MANY = tuple(f"m{number}:1" for number in range(3 * DIALS_FIRST))


def unheard(stage: str) -> ConnectError:
    """Return what a dial fails with that nobody had time for at this stage."""
    error = ConnectError("no answer in time", stage=stage)
    error.__cause__ = TimeoutError()
    return error


def asked(dials: Dials) -> list[str]:
    return [address for address, _ in dials.asked]


def test_so_many_are_dialled_at_a_time_and_the_others_in_their_turn() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        for address in MANY:
            keeper.dial(None, address)
        await turns()
        assert asked(dials) == [*MANY[:DIALS_FIRST]]
        for address in MANY[:2]:  # two links: room for those, and for one more
            dials.answers[address].set_result(address.encode())
        await turns()
        assert asked(dials) == [*MANY[: DIALS_FIRST + 3]]

    asyncio.run(patiently(scenario))


def test_fewer_are_dialled_where_nobody_has_time() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        for address in MANY:
            keeper.dial(None, address)
        await turns()
        for address in MANY[:DIALS_FIRST]:
            dials.fail(address, unheard("TLS"))
        await turns()
        assert asked(dials) == [*MANY[: DIALS_FIRST + DIALS_MIN]]

    asyncio.run(patiently(scenario))


def test_who_is_not_there_keeps_nobody_waiting() -> None:
    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        for address in MANY[:DIALS_FIRST]:
            keeper.dial(None, address)
        await turns()
        for address in MANY[:DIALS_FIRST]:
            dials.fail(address, unheard("TCP"))
        await turns()
        dials.answers.clear()
        await asyncio.sleep(2 * REDIAL_S)  # the pause of each is over
        for address in MANY:
            keeper.dial(None, address)
        await turns()
        assert asked(dials)[DIALS_FIRST:] == [*MANY[: 2 * DIALS_FIRST]]

    asyncio.run(patiently(scenario))


def test_a_window_neither_closes_nor_grows_without_end() -> None:
    window = DialWindow()

    def room() -> int:
        count = 0
        while window.has_room:
            window.begin()
            count += 1
        return count

    for is_linked, size in ((False, DIALS_MIN), (True, DIALS_MAX)):
        for _ in range(4 * DIALS_MAX):
            window.begin()
            window.ended(is_linked=is_linked, unheard=not is_linked)
        found = room()
        assert found == size
        for _ in range(found):
            window.ended(is_linked=False, unheard=False)


# ---------------------------------------------------------------- who is dead


@pytest.mark.parametrize(
    ("reached", "outbound", "mapped", "answer"),
    [
        (b"p", b"", b"", "refused"),
        (b"", b"", b"", "silent"),
        (b"p", b"p", b"", "silent"),
        (b"p", b"", b"p", "silent"),
        (b"p", b"", b"q", "refused"),
    ],
    ids=["reached before", "never reached", "outbound", "forwarded", "another is forwarded"],
)
def test_a_refusal_proves_a_death_only_of_who_was_dialled_before_and_is_not_outbound(
    reached: bytes, outbound: bytes, mapped: bytes, answer: str
) -> None:
    """The router of an outbound peer refuses in its name once it has forgotten a connection, and
    one that forwards a port once it has forgotten that."""

    async def refused(address: str, timeout_s: float) -> str:
        return "refused"

    host = SimpleNamespace(probe=refused, srtt_s=lambda peer: 0.0, link_peers=tuple)
    streams = SimpleNamespace(reached={reached}, forget=lambda peer: None)
    known = Outbound({outbound})
    known.mapped = mapped
    keeper = Reconnector(
        cast(ConnectionManager, host),
        cast(Streams, streams),
        known,
        cast(Any, None),
    )
    assert asyncio.run(keeper.probe(b"p", "h:1")) == answer


def test_who_has_a_link_is_not_probed_and_others_by_one_at_a_time() -> None:
    knocks: list[str] = []
    linked = [b"q"]

    async def silent(address: str, timeout_s: float) -> str:
        knocks.append(address)
        await turns()
        return "silent"

    host = SimpleNamespace(probe=silent, srtt_s=lambda peer: 0.0, link_peers=lambda: tuple(linked))
    streams = SimpleNamespace(reached=set(), forget=lambda peer: None)
    keeper = Reconnector(
        cast(ConnectionManager, host), cast(Streams, streams), Outbound(), cast(Any, None)
    )

    async def ask() -> None:
        assert await keeper.probe(b"q", "h:2") == "up"
        found = await asyncio.gather(*(keeper.probe(b"p", "h:1") for _ in range(5)))
        assert found == ["silent"] * 5
        assert knocks == ["h:1"]
        assert await keeper.probe(b"p", "h:1") == "silent"
        assert knocks == ["h:1"] * 2

    asyncio.run(ask())


# ---------------------------------------------------------------- the daemon


def daemon_of(home: Home, lines: list[str], **more: Any) -> Daemon:
    options = DaemonOptions(
        run="demo",
        secret=bytes(32),
        listen_host="127.0.0.1",
        listen_port=0,
        advertise="127.0.0.1",
        found=False,
        **{"contacts": ADDRESSES, **more},
    )
    return Daemon(home, options, lines.append)


def served(
    folder: Path,
    scenario: Callable[[Daemon, Dials], Awaitable[None]],
    lines: list[str],
    **more: Any,
) -> None:
    """Run a daemon whose dials hang while the scenario goes on; raises what ended it."""

    async def whole(home: Home) -> None:
        daemon, dials = daemon_of(home, lines, **more), Dials()
        daemon.host.dial = dials.dial  # type: ignore[method-assign,assignment]  # no network
        running = asyncio.create_task(daemon.run(lambda: lines.append("ready")))
        async with asyncio.timeout(PATIENCE_S):
            await dials.begun.wait()
            await scenario(daemon, dials)
            await running

    with Home.open(folder / "home") as home:
        asyncio.run(whole(home))


def test_a_daemon_leaves_although_nobody_answers_its_dials(tmp_path: Path) -> None:
    async def scenario(daemon: Daemon, dials: Dials) -> None:
        daemon.leave()

    lines: list[str] = []
    served(tmp_path, scenario, lines)
    assert "ready" not in lines
    assert any("leaving the run" in line for line in lines)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        AddressFullError("4 peers of 1.2.3.4 are in the run"),  # some have died, and still count
        AdmissionError("another run secret", stage=SECRET),  # the address is somebody else's now
    ],
    ids=["full", "another secret"],
)
def test_who_was_in_the_run_goes_on_asking_where_a_newcomer_is_told_at_once(
    tmp_path: Path, error: AdmissionError, returns: bool
) -> None:
    async def scenario(daemon: Daemon, dials: Dials) -> None:
        dials.fail(ADDRESSES[0], error)
        if returns:
            while not any(error.what in line for line in lines):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
            daemon.leave()

    lines: list[str] = []
    ends = nullcontext() if returns else pytest.raises(type(error))
    with ends:
        served(tmp_path, scenario, lines, contacts=ADDRESSES[:1], returns=returns)


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        ((SECRET, SECRET), False),  # of both others, and nobody has proved to be one
        (("", None), False),  # one of two
        (("", ""), True),
        (("",), True),  # the only other one
    ],
)
def test_members_that_refuse_a_member_are_believed_together(
    stages: tuple[str | None, ...], ends: bool
) -> None:
    peers = [bytes([number]) * 32 for number in range(1 + len(stages))]
    members = tuple(Member(peer, 1, address=f"h{n}:1") for n, peer in enumerate(peers))
    view = View(b"L" * 32, 5, members, peers[0], 1, b"c" * 32)
    reconnector = object.__new__(Reconnector)
    vars(reconnector).update(
        _reach=SimpleNamespace(address_of=lambda peer, address: address),
        _host=SimpleNamespace(peer_id=peers[0]),
        _failed={
            f"h{n}:1": AdmissionError("no", stage=stage)
            for n, stage in enumerate(stages, 1)
            if stage is not None
        },
    )
    assert (reconnector._refused_by_run(view) is not None) == ends


def test_a_daemon_that_is_refused_as_an_older_life_ends(tmp_path: Path) -> None:
    async def scenario(daemon: Daemon, dials: Dials) -> None:
        dials.fail(ADDRESSES[1], IdentityInUseError("life 2, yours is 1"))

    with pytest.raises(IdentityInUseError):
        served(tmp_path, scenario, [])


def test_a_linked_daemon_that_is_refused_as_an_older_life_ends(tmp_path: Path) -> None:
    """It dials again because the newer life took its link."""

    async def scenario(daemon: Daemon, dials: Dials) -> None:
        answer = dials.answers.pop(ADDRESSES[0])
        dials.begun.clear()
        answer.set_result(b"peer")
        await dials.begun.wait()
        await turns()
        assert "ready" in lines
        dials.fail(ADDRESSES[0], IdentityInUseError("life 2, yours is 1"))

    lines: list[str] = []
    with pytest.raises(IdentityInUseError):
        served(tmp_path, scenario, lines)


def test_a_daemon_whose_view_names_a_newer_life_of_it_ends(tmp_path: Path) -> None:
    async def scenario(daemon: Daemon, dials: Dials) -> None:
        me = daemon.node.me
        newer = Member(me.peer, me.inc + 1, me.role, "127.0.0.1:1")
        view = View(b"L" * 32, 2, (newer,), me.peer, 0, b"")
        daemon.feed(ev.Received(b"p" * 32, ms.Install(view)))

    lines: list[str] = []
    with pytest.raises(IdentityInUseError, match="of this peer, not"):
        served(tmp_path, scenario, lines)
    assert any(" conflict " in line for line in lines)


def test_members_of_the_last_view_are_dialled_once_a_second() -> None:
    """However long they have been away: after a power cut only one of two may be able to dial."""

    async def scenario(dials: Dials, keeper: Reconnector) -> None:
        now_s = asyncio.get_running_loop().time()
        keeper._pauses[ADDRESSES[0]] = (now_s - REDIAL_MEMBER_MAX_S, REDIAL_MAX_S)
        keeper.dial(None, ADDRESSES[0])
        assert len(keeper._pauses) == 1
        assert keeper._pauses[ADDRESSES[0]][0] < now_s
        keeper.dial(None, ADDRESSES[0], most_s=REDIAL_MEMBER_MAX_S)
        assert keeper._pauses[ADDRESSES[0]][0] >= now_s

    asyncio.run(patiently(scenario))
