"""Garbage, oversized and truncated frames against a daemon that trains: it goes on, memory flat."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.processes import Fleet, Peer, fleet, until

from atoll.collectives.errors import ConnectError
from atoll.peer.membership import messages  # noqa: F401  # what the victim says must be decodable
from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import Invite
from atoll.peer.streams.frames import DATA_HEADER_BYTES, DataHeader, pack_header
from atoll.peer.streams.keys import CIPHERS

ATTACKS = 150
GROWTH_BYTES_MAX = 12 << 20


def throw(address: tuple[str, int], data: bytes, *, linger: bool) -> None:
    """One connection with these bytes; what the daemon does with it is its business."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as sock:
        sock.sendall(data)
        if linger:
            sock.settimeout(0.05)
            sock.recv(1)


def garbage(dice: random.Random) -> bytes:
    """Bytes of a stranger: noise, half a TLS hello, a frame length of four gigabytes."""
    noise = dice.randbytes(dice.randrange(1, 3000))
    tls_like = b"\x16\x03\x01" + struct.pack(">H", dice.randrange(1, 20000)) + noise
    return dice.choice([noise, tls_like, tls_like[:7], b"\xff\xff\xff\xff" + noise, b"\x16", b""])


def trains_on_with_flat_memory(run: Fleet, peer: Peer, attack: Callable[[], None]) -> None:
    attack()  # first contact fills caches: not counted
    number = peer.reaches(peer.status()["round"] + 2)["round"]
    before_bytes = peer.rss_bytes()
    attack()
    peer.reaches(number + 2)
    grown_bytes = peer.rss_bytes() - before_bytes
    assert grown_bytes < GROWTH_BYTES_MAX, f"{grown_bytes / 2**20:.1f} MiB more"
    assert run.agree("ab") >= 1
    assert len(peer.status()["members"]) == 2


@pytest.fixture
def training(tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator fixture
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            run.train(name)
        run.peers["a"].reaches(3)
        yield run


def test_strangers_cannot_hurt_a_daemon(training: Fleet) -> None:
    invite = Invite.parse(training.invite)
    dice = random.Random(7)

    def attack() -> None:
        for _ in range(ATTACKS):
            throw((invite.host, invite.port), garbage(dice), linger=dice.random() < 0.3)

    trains_on_with_flat_memory(training, training.peers["a"], attack)


def test_a_member_that_sends_broken_frames_loses_only_its_own_link(
    training: Fleet, tmp_path: Path
) -> None:
    """The attacker holds the run secret: its frames get past TLS, and past the seal of a stream."""
    invite = Invite.parse(training.invite)
    dice = random.Random(11)
    sent: Counter[str] = Counter()

    def attack() -> None:
        with Home.open(tmp_path / "mallory") as home:
            for number in range(ATTACKS // 10):
                ciphers = CIPHERS if number % 2 else ()
                sent[asyncio.run(break_frames(home, invite, dice, ciphers))] += 1

    trains_on_with_flat_memory(training, training.peers["a"], attack)
    assert sent["aes-256-gcm"] >= 10
    assert sent["tls"] >= 10


async def break_frames(
    home: Home, invite: Invite, dice: random.Random, ciphers: tuple[str, ...]
) -> str:
    """Broken data on a stream, then broken control messages; the stream's cipher."""
    inc, cipher = home.next_incarnation(1), "none could be opened"
    host = ConnectionManager(
        peer_id=home.peer_id,
        tls=run_tls(home, invite.secret),
        run=invite.run,
        daemon=SimpleNamespace(
            life=lambda: inc,
            incarnation=lambda: inc,
            advertised=lambda: "",
            on_message=lambda peer, message: None,
            on_up=lambda peer, address, inc: None,
            on_down=lambda peer, why: None,
            on_data=lambda peer, stream: stream.close(),
            note=lambda kind, text: None,
            on_conflict=lambda inc: None,
        ),
        ciphers=ciphers,
    )
    try:
        victim = await host.dial(invite.address)
        with contextlib.suppress(ConnectError):
            stream = await host.open_data(victim, invite.address)
            await asyncio.to_thread(stream.sendall, broken_data(dice))
            stream.close()
            cipher = stream.cipher
        link = host._links.get(victim)
        if link is not None:  # else the victim has ended it before
            link.send(broken_control(dice))
            await asyncio.sleep(0.01)
    finally:
        await host.close()
    return cipher


def broken_control(dice: random.Random) -> bytes:
    noise = dice.randbytes(200)
    truncated = struct.pack(">I", 5000) + noise
    oversized = struct.pack(">I", 0xFFFFFFFF) + noise
    nonsense = struct.pack(">I", len(noise)) + noise
    nested = b"\x91" * 100_000
    return dice.choice([truncated, oversized, nonsense, struct.pack(">I", len(nested)) + nested])


def broken_data(dice: random.Random) -> bytes:
    header = DataHeader(1, 0, 0, 100, b"l" * 8, 1, 2, 3, 4)
    oversized = bytearray(pack_header(header))
    oversized[4:8] = b"\xff\xff\xff\xff"
    foreign = pack_header(header) + bytes(100)
    ahead = pack_header(header._replace(view=1 << 30)) + bytes(100)
    noise = dice.randbytes(DATA_HEADER_BYTES - 1)
    return dice.choice([bytes(oversized), foreign, ahead, noise])


def test_a_member_whose_address_cannot_be_looked_up_may_die(tmp_path: Path) -> None:
    """As after a typo: the others probe it when its links are gone."""
    with fleet(tmp_path) as run:
        run.form("ab")
        typo = run.start("c", "join", run.invite, "--advertise", "my..host")
        for name in "ab":
            run.sees(name, 3)
        typo.kill()
        coordinator = run.peers["a"]
        until(lambda: " ended: " in coordinator.text, "the link to c ends", coordinator)
        for name in "ab":
            run.train(name)
        for name in "ab":
            run.peers[name].reaches(3)
        assert run.agree("ab") >= 1


@pytest.mark.slow
def test_three_hundred_aborted_attempts_leave_the_daemon_flat(tmp_path: Path) -> None:
    """One trainer's submissions cannot be used: every round is begun twice."""
    with fleet(tmp_path) as run:
        run.form("ab")
        # Encoded submissions are refused in the trainer; these are found out in the round.
        run.train("a", inner_s=0.001, codec="float32")
        run.peers["b"].reaches(2)
        run.train("b", inner_s=0.001, codec="float32", fault="nan")
        peer = run.peers["a"]

        def aborted(count: int) -> int:
            until(lambda: peer.text.count(" retry ") >= count, f"{count} retries", peer)
            return peer.rss_bytes()

        before_bytes = aborted(60)
        grown_bytes = aborted(360) - before_bytes
        assert grown_bytes < GROWTH_BYTES_MAX, f"{grown_bytes / 2**20:.1f} MiB more"
        run.trainers["b"].kill()
        peer.reaches(peer.status()["round"] + 3)
        assert run.agree("ab") >= 3
