"""Look with plain sockets what routers of a lab let through, and what they change."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from netlab.measures import PATIENCE_S, PAYLOAD_SHARE, PORT, ping_ms, tcp_mbit

from atoll.collectives.errors import ConfigError
from atoll.peer.lab.lab import Lab
from atoll.peer.lab.nat import Nat

pytestmark = pytest.mark.usefixtures("routers")

SILENT_S = 0.7  # a dial that nobody answers: many round trips of these labs
EXPIRES_S = 2
FROM_PORT = 7000


@contextlib.contextmanager
def listening(lab: Lab, host: int, family: str = "") -> Iterator[socket.socket]:
    address = lab.address(host, family)
    with lab.socket(host, family=family_of(address)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, PORT))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        yield listener


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def dial(
    lab: Lab, host: int, address: str, timeout_s: float = PATIENCE_S, from_port: int = 0
) -> socket.socket:
    made = lab.socket(host, family=family_of(address))
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if from_port:
            made.bind((lab.address(host), from_port))
        made.settimeout(timeout_s)
        made.connect((address, PORT))
    except BaseException:
        made.close()
        raise
    made.settimeout(PATIENCE_S)
    return made


@contextlib.contextmanager
def connected(
    lab: Lab, host: int, address: str, listener: socket.socket, from_port: int = 0
) -> Iterator[tuple[socket.socket, socket.socket, tuple[str, int]]]:
    """(the dialler's end, the listener's end, whom the listener sees), after a word each way."""
    with dial(lab, host, address, from_port=from_port) as ours:
        theirs, seen = listener.accept()
        with theirs:
            theirs.settimeout(PATIENCE_S)
            exchange(ours, theirs)
            yield ours, theirs, seen


def exchange(one: socket.socket, other: socket.socket) -> None:
    for sender, receiver in ((one, other), (other, one)):
        sender.sendall(b"word")
        assert receiver.recv(4, socket.MSG_WAITALL) == b"word"


def assert_silent(lab: Lab, host: int, *addresses: str) -> None:
    """Nobody answers at these addresses, not even with a refusal."""
    for address in addresses:
        with pytest.raises(TimeoutError):
            dial(lab, host, address, SILENT_S)


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize("kind", ["restricted", "symmetric", "full", "restricted,levels=2"])
def test_who_is_behind_a_router_can_dial_out_and_is_seen_at_its_address(kind: str) -> None:
    with Lab(2, rtt_ms=10, nat={1: kind}) as lab, listening(lab, 0) as listener:
        with connected(lab, 1, lab.address(0), listener) as (ours, _, seen):
            assert seen[0] == lab.public_address(1) == "10.78.0.2"
            assert ours.getsockname()[0] == lab.address(1) == "192.168.101.2"
        assert lab.environment(0)["ATOLL_LAB_PEERS"] == "10.78.0.1,10.78.0.2"
        assert lab.environment(1)["ATOLL_LAB_PEERS"] == "10.78.0.1,192.168.101.2"


@pytest.mark.parametrize("kind", ["restricted", "symmetric", "restricted,levels=2"])
def test_who_is_behind_a_router_cannot_be_dialled(kind: str) -> None:
    with Lab(2, rtt_ms=10, nat={1: kind}) as lab, listening(lab, 1):
        assert_silent(lab, 0, lab.address(1), lab.public_address(1))


@pytest.mark.parametrize("kind", ["full", "full,levels=2"])
def test_a_full_router_leads_to_its_host(kind: str) -> None:
    with Lab(2, rtt_ms=10, nat={1: kind}) as lab, listening(lab, 1) as listener:
        with connected(lab, 0, lab.public_address(1), listener) as (_, _, seen):
            assert seen[0] == lab.address(0), "the caller's own address"
        assert_silent(lab, 0, lab.address(1))
        listener.close()
        with pytest.raises(ConnectionRefusedError):  # by the host: the router lets it answer
            dial(lab, 0, lab.public_address(1))


def test_hosts_that_are_kept_apart_meet_at_the_address_of_their_router() -> None:
    with (
        Lab(3, rtt_ms=10, nat={(1, 2): "full,hairpin=1"}) as lab,
        listening(lab, 1) as first,
        listening(lab, 2),
    ):
        with connected(lab, 2, lab.public_address(1), first) as (_, _, seen):
            assert seen[0] == "192.168.101.1", "the router's own"
        with connected(lab, 0, lab.public_address(1), first) as (_, _, seen):
            assert seen[0] == lab.address(0)
        assert_silent(lab, 2, lab.address(1))
        assert_silent(lab, 1, lab.address(2))


@pytest.mark.parametrize(("kind", "same"), [("restricted", True), ("symmetric", False)])
def test_the_port_that_others_see(kind: str, same: bool) -> None:
    with (
        Lab(3, rtt_ms=10, nat={2: kind}) as lab,
        listening(lab, 0) as zero,
        listening(lab, 1) as one,
        connected(lab, 2, lab.address(0), zero, FROM_PORT) as (_, _, seen_by_zero),
        connected(lab, 2, lab.address(1), one, FROM_PORT) as (_, _, seen_by_one),
    ):
        ports = {FROM_PORT, seen_by_zero[1], seen_by_one[1]}
        assert len(ports) == (1 if same else 3)


@pytest.mark.parametrize(("kind", "meet"), [("restricted", True), ("symmetric", False)])
def test_two_behind_routers_meet_by_dialling_each_other_unless_ports_are_random(
    kind: str, meet: bool
) -> None:
    with Lab(2, rtt_ms=100, nat={0: kind, 1: kind}) as lab:
        ends: dict[int, socket.socket] = {}

        def dial_other(host: int) -> None:
            with contextlib.suppress(OSError):
                ends[host] = dial(lab, host, lab.public_address(1 - host), 2.5, PORT)

        threads = [threading.Thread(target=dial_other, args=(host,)) for host in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if meet:
            exchange(ends[0], ends[1])
        else:
            assert not ends
        for end in ends.values():
            end.close()


# ---------------------------------------------------------------- more than one


def test_two_behind_one_router_reach_each_other_without_the_network() -> None:
    with (
        Lab(3, rtt_ms=200, nat={(1, 2): "restricted"}) as lab,
        listening(lab, 1) as inside,
        listening(lab, 0) as outside,
    ):
        assert lab.dialled_address(2, 1) == lab.address(1) == "192.168.101.2"
        assert ping_ms(lab, 2, 1, times=3) < 100, "no delay of the wide area"
        with connected(lab, 2, lab.address(1), inside) as (_, _, seen):
            assert seen[0] == lab.address(2) == "192.168.101.3"
        assert lab.counters(1).sent_packets == 0
        with (
            connected(lab, 1, lab.address(0), outside, FROM_PORT) as (_, _, first),
            connected(lab, 2, lab.address(0), outside, FROM_PORT) as (_, _, second),
        ):
            assert first[0] == second[0] == "10.78.0.2"
            assert first[1] != second[1], "the port that the first has is taken"
        assert lab.counters(1) == lab.counters(2)
        assert lab.sent_bytes(2, 0) == lab.counters(1).sent_bytes > 0
        assert_silent(lab, 0, lab.public_address(2))
        with pytest.raises(ConfigError, match="behind one router"):
            lab.cut(1, 2)


def test_two_homes_may_have_the_same_private_addresses() -> None:
    nat = {0: Nat(lan=1), 1: Nat(lan=1)}
    with Lab(3, rtt_ms=10, nat=nat) as lab, listening(lab, 2) as listener:
        assert lab.address(0) == lab.address(1) == "192.168.1.2"
        with (
            connected(lab, 0, lab.address(2), listener) as (_, _, first),
            connected(lab, 1, lab.address(2), listener) as (_, _, second),
        ):
            assert (first[0], second[0]) == ("10.78.0.1", "10.78.0.2")
        with pytest.raises(ConnectionRefusedError):  # by itself: nobody listens there
            dial(lab, 0, lab.address(1))


# ---------------------------------------------------------------- what changes in time


def test_a_silent_connection_expires_without_a_word() -> None:
    with (
        Lab(2, rtt_ms=10, nat={1: Nat(expires_s=EXPIRES_S)}) as lab,
        listening(lab, 0) as listener,
        connected(lab, 1, lab.address(0), listener) as (ours, theirs, _),
    ):
        for _ in range(5):  # longer than that in all, but never silent for so long
            time.sleep(EXPIRES_S / 4)
            exchange(ours, theirs)
        time.sleep(EXPIRES_S + 0.5)
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.sendall(b"lost")
            receiver.settimeout(SILENT_S)
            with pytest.raises(TimeoutError):
                receiver.recv(4)
        with connected(lab, 1, lab.address(0), listener):
            pass  # a new one works


@pytest.mark.parametrize("from_inside", [True, False])
def test_an_expired_connection_is_reset_where_asked_for(from_inside: bool) -> None:
    nat = Nat(expires_s=EXPIRES_S, expired="reset", levels=2)
    with (
        Lab(2, rtt_ms=10, nat={1: nat}) as lab,
        listening(lab, 0) as listener,
        connected(lab, 1, lab.address(0), listener) as (ours, theirs, _),
    ):
        time.sleep(EXPIRES_S + 0.5)
        sender = ours if from_inside else theirs
        sender.sendall(b"late")
        with pytest.raises(ConnectionResetError):
            sender.recv(4)


@pytest.mark.parametrize("kind", ["full", "restricted,levels=2"])
def test_a_routers_address_changes(kind: str) -> None:
    with (
        Lab(2, rtt_ms=10, nat={1: kind}) as lab,
        listening(lab, 0) as outside,
        listening(lab, 1) as inside,
        connected(lab, 1, lab.address(0), outside) as (ours, theirs, _),
    ):
        before = lab.public_address(1)
        assert lab.change_address(1) == lab.public_address(1) == "10.78.1.2" != before
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.sendall(b"lost")
            receiver.settimeout(SILENT_S)
            with pytest.raises(TimeoutError):
                receiver.recv(4)
        with connected(lab, 1, lab.address(0), outside) as (_, _, seen):
            assert seen[0] == lab.public_address(1)
        assert_silent(lab, 0, before)
        if kind == "full":
            with connected(lab, 0, lab.public_address(1), inside):
                pass
        with pytest.raises(ConfigError, match="behind no router"):
            lab.change_address(0)


# ---------------------------------------------------------------- IPv6


def test_who_has_only_ipv6_has_no_way_to_who_has_only_ipv4() -> None:
    with (
        Lab(3, rtt_ms=20, families={1: "46", 2: "6"}) as lab,
        listening(lab, 1, "4") as four,
        listening(lab, 1, "6") as six,
    ):
        with connected(lab, 0, lab.address(1), four) as (_, _, seen):
            assert seen[0] == lab.address(0) == "10.78.0.1"
        with connected(lab, 2, lab.address(1, "6"), six) as (_, _, seen):
            assert seen[0] == lab.address(2) == "fd78::3"
        assert lab.sent_bytes(2, 1) > 0
        for source, target in ((0, 2), (2, 0)):
            with pytest.raises(OSError) as caught:
                dial(lab, source, lab.address(target))
            assert caught.value.errno == errno.ENETUNREACH
        with pytest.raises(ConfigError, match="no IPv6 address"):
            lab.address(0, "6")


# ---------------------------------------------------------------- rates and delays


def test_rates_and_delays_hold_for_who_is_behind_a_router() -> None:
    with Lab(2, rate_mbit={0: 40, 1: (20, 10)}, rtt_ms=20, nat={1: "full,levels=2"}) as lab:
        assert 20 * 0.99 <= ping_ms(lab, 1, 0) <= 20 * 1.1
        up = tcp_mbit(lab, 1, 0, warm_s=1.0, during_s=1.5) / (20 * PAYLOAD_SHARE)
        down = tcp_mbit(lab, 0, 1, warm_s=1.0, during_s=1.5) / (10 * PAYLOAD_SHARE)
        assert 0.93 <= up <= 1.01
        assert 0.93 <= down <= 1.01
        lab.set_rate(1, up=5)
        lab.cut(0, 1, both=True)
        with listening(lab, 0):
            assert_silent(lab, 1, lab.address(0))
