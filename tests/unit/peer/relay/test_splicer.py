"""Bytes of circuits, with real sockets: both ways, in order, at a rate, to the end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.peer.relay import splicer
from atoll.peer.relay.splicer import Bucket, Splicer, can_splice

pytestmark = pytest.mark.skipif(not can_splice(), reason="this system has no splice(2)")
PATIENCE_S = 20.0
FAST = 1e12


class Report:
    """Record what a splicer tells."""

    def __init__(self) -> None:
        self.carried = 0
        self.ended: list[tuple[int, str]] = []
        self.changed = threading.Event()

    def moved(self, number: int, count: int) -> None:
        self.carried += count

    def over(self, number: int, why: str) -> None:
        self.ended.append((number, why))
        self.changed.set()

    def wait(self) -> None:
        assert self.changed.wait(PATIENCE_S)


@contextlib.contextmanager
def spliced(bulk_bytes_per_s: float = FAST) -> Iterator[tuple[Splicer, Report]]:
    report = Report()
    made = Splicer(bulk_bytes_per_s, report)
    try:
        yield made, report
    finally:
        made.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    for sock in (dialled, accepted):
        sock.settimeout(PATIENCE_S)
    return dialled, accepted


def circuit(
    made: Splicer, number: int = 1, *, bulk: bool = True, pair: str = ""
) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a circuit; each is of another pair unless it is named."""
    (one, in_one), (two, in_two) = tcp_pair(), tcp_pair()
    for sock in (in_one, in_two):
        sock.setblocking(False)
    made.add(number, in_one, in_two, pair or number, bulk=bulk)
    return one, two


def read_all(sock: socket.socket) -> bytes:
    found = bytearray()
    while piece := sock.recv(1 << 20):
        found += piece
    return bytes(found)


@pytest.mark.parametrize("size", [1, 1447, 65_537, 3_000_000])
def test_bytes_go_both_ways_in_order_and_each_end_may_stop_first(size: int) -> None:
    there, back = os.urandom(size), os.urandom(size)
    with spliced() as (made, report):
        one, two = circuit(made)
        with one, two:
            got: list[bytes] = []
            reader = threading.Thread(target=lambda: got.append(read_all(two)))
            reader.start()
            one.sendall(there)
            one.shutdown(socket.SHUT_WR)
            reader.join(PATIENCE_S)
            assert got == [there]
            assert not report.ended, "the other way goes on"
            threading.Thread(target=lambda: (two.sendall(back), two.close())).start()
            assert read_all(one) == back
        report.wait()
        assert report.ended == [(1, "both ends have closed it")]
        assert report.carried == 2 * size


def test_whoever_does_not_read_stops_its_sender_and_nobody_else() -> None:
    with spliced() as (made, _):
        one, two = circuit(made, 1)
        three, four = circuit(made, 2)
        with one, two, three, four:
            one.settimeout(0.5)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 1 << 28:
                    sent += one.send(bytes(1 << 16))
            assert sent < 1 << 27, "the kernel's buffers and one pipe, and no more"
            three.sendall(b"hello")
            assert four.recv(5) == b"hello"


def test_an_end_that_is_reset_ends_the_circuit() -> None:
    with spliced() as (made, report):
        one, two = circuit(made)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()
        report.wait()
        with two, contextlib.suppress(ConnectionResetError):
            assert two.recv(1) == b""


def test_a_circuit_that_is_cut_ends_and_nothing_is_reported() -> None:
    with spliced() as (made, report):
        one, two = circuit(made)
        with one, two:
            one.sendall(b"x")
            assert two.recv(1) == b"x"
            made.cut(1)
            assert two.recv(1) == b""
        assert not report.ended


def test_a_bulk_circuit_that_is_idle_ends_and_a_control_circuit_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splicer, "LOOK_S", 0.05)
    monkeypatch.setattr(splicer, "IDLE_S", 0.2)
    with spliced() as (made, report):
        one, two = circuit(made, 1, bulk=True)
        three, four = circuit(made, 2, bulk=False)
        with one, two, three, four:
            report.wait()
            assert [number for number, _ in report.ended] == [1]
            three.sendall(b"x")
            assert four.recv(1) == b"x"


def test_a_pair_has_one_control_rate_however_many_circuits_it_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever opens one after the other has its data carried by relays without --relay."""
    monkeypatch.setattr(splicer, "CONTROL_BURST_BYTES", 20_000)
    monkeypatch.setattr(splicer, "CONTROL_BYTES_PER_S", 0.0)
    with spliced() as (made, report):
        for number in range(3):
            one, two = circuit(made, number, bulk=False, pair="pair")
            with one, two:
                two.settimeout(0.3)
                one.sendall(bytes(15_000))
                with contextlib.suppress(TimeoutError):
                    while two.recv(1 << 16):
                        pass
        assert 20_000 - splicer.TAKEN_BYTES_MIN <= report.carried <= 20_000
        one, two = circuit(made, 9, bulk=False, pair="another")
        with one, two:
            one.sendall(b"x")
            assert two.recv(1) == b"x", "others have a rate of their own"


def test_closing_ends_all_circuits_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with spliced() as (made, _):
        for number in range(20):
            one, two = circuit(made, number)
            one.sendall(b"x")
            assert two.recv(1) == b"x"
            one.close()
            two.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rate_is_kept_over_a_burst() -> None:
    """The clock is ours: what a bucket allows is arithmetic."""
    bucket = Bucket(1000.0, 500.0, 0.0)
    assert bucket.level(0.0) == 500
    bucket.take(500)
    assert bucket.level(0.0) == 0
    assert bucket.level(0.25) == 250
    assert bucket.level(10.0) == 500, "no more than the burst"
    assert bucket.level(9.0) == 500, "a clock that goes back gives nothing"


def test_a_circuit_without_tokens_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes take as long as the rate says, and all of them arrive."""
    monkeypatch.setattr(splicer, "BULK_BURST_BYTES_MIN", 10_000)
    data = os.urandom(60_000)
    with spliced(100_000.0) as (made, _):
        one, two = circuit(made)
        with one, two:
            began_s = time.monotonic()
            threading.Thread(target=lambda: (one.sendall(data), one.close())).start()
            assert read_all(two) == data
            assert time.monotonic() - began_s > 0.9 * (len(data) - 10_000) / 100_000.0
