"""Sealed streams: keys in band, goodbyes, buffers, and nothing that was tampered with."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from harness.wires import SECRET, Call, ends, receive, sockets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConnectError
from atoll.peer.streams import sealed as sealing
from atoll.peer.streams import stream
from atoll.peer.streams.sealed import (
    EPOCH_S_MAX,
    EPOCHS_WORN,
    RECORD_BYTES_MAX,
    RECORD_OVERHEAD_BYTES,
)
from atoll.peer.streams.stream import AHEAD_BYTES, BUFFER_BYTES_MAX, SealedStream

PATTERN = bytes(range(251)) * 20_000  # 5 MB whose period shares no factor with a record


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, socket.socket]]:
    with sockets() as both:
        yield both


@pytest.fixture
def sealed(wires: tuple[socket.socket, socket.socket]) -> tuple[SealedStream, SealedStream]:
    return ends(wires)


# ---------------------------------------------------------------- ends


def test_close_does_not_wait_for_a_reader(sealed: tuple[SealedStream, SealedStream]) -> None:
    """There is no room for the goodbye: it is left out."""
    sender, _ = sealed
    sender._sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender._sock.send(bytes(1 << 20))
    sender._sock.settimeout(10)  # as the stream has left it
    started_s = time.monotonic()
    sender.close()
    assert time.monotonic() - started_s < 1.0


def test_a_stream_that_stops_within_a_record_is_an_error(
    wires: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "NO_PROGRESS_TIMEOUT_S", 0.05)
    _, receiver = ends(wires)
    wires[0].sendall(b"\0")
    with pytest.raises(ConnectError, match=r"from b: no byte moved for"):
        receive(receiver, 1, idle=True)


@pytest.mark.parametrize("cut_bytes", [0, 1, 20, 60])
def test_an_end_without_a_goodbye_is_a_cut(
    sealed: tuple[SealedStream, SealedStream], cut_bytes: int
) -> None:
    """Between two records as well as within one."""
    sender, receiver = sealed
    sender.sendall(b"whole")
    sender._seal(sealing.RecordKind.DATA, memoryview(bytes(100)))
    sender._sock.sendall(sender._out[:cut_bytes])
    sender._sock.shutdown(socket.SHUT_WR)
    assert receive(receiver, 5) == b"whole"
    with pytest.raises(ConnectError, match=r"from b: it was cut off: no goodbye"):
        receive(receiver, 1, idle=True)


def test_a_defect_of_the_caller_breaks_the_stream(
    sealed: tuple[SealedStream, SealedStream],
) -> None:
    """Nobody can tell how far it went."""
    sender, receiver = sealed
    sender.sendall(b"x")
    with pytest.raises(TypeError):
        receiver.recv_into(memoryview(b"read-only"[:1]))
    assert receiver.closed


# ---------------------------------------------------------------- keys


def test_new_keys_in_band(
    sealed: tuple[SealedStream, SealedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "EPOCH_BYTES_MAX", 150_000)
    sender, receiver = sealed
    view = memoryview(PATTERN[: EPOCHS_WORN * 100_000])
    for start in range(0, len(view), 50_000):
        part = view[start : start + 50_000]
        sender.sendall(bytes(40), part)
        assert receive(receiver, 40 + len(part))[40:] == part
    assert sender._sealer.epoch == receiver._opener.epoch == EPOCHS_WORN - 1
    assert not sender.worn
    sender.sendall(view[:140_000])
    receive(receiver, 140_000)
    assert sender.worn
    assert receiver.worn
    sender.close()
    with pytest.raises(ConnectError, match="the other side closed it"):
        receive(receiver, 1)


def test_new_keys_after_an_hour(wires: tuple[socket.socket, socket.socket]) -> None:
    now_s = [0.0]
    sender = SealedStream(wires[0], "a", SECRET, dialled=True, clock=lambda: now_s[0])
    receiver = SealedStream(wires[1], "b", SECRET, dialled=False)
    for hour in range(3):
        now_s[0] = hour * EPOCH_S_MAX
        for _ in range(2):
            sender.sendall(b"frame")
            assert receive(receiver, 5, idle=True) == b"frame"
        assert sender._sealer.epoch == receiver._opener.epoch == hour


def test_other_keys_do_not_open(wires: tuple[socket.socket, socket.socket]) -> None:
    sender = SealedStream(wires[0], "a", bytes(32), dialled=True)
    receiver = SealedStream(wires[1], "b", SECRET, dialled=False)
    sender.sendall(b"x")
    with pytest.raises(ConnectError, match=r"from b: record 0 is not authentic"):
        receive(receiver, 1)


# ---------------------------------------------------------------- attacks


def recorded() -> tuple[bytes, bytes]:
    """What a stream carries of some frames and its end, and the frames."""
    frames = [PATTERN[:40], PATTERN[:700], PATTERN[:40], PATTERN[:90]]
    with sockets() as wires:
        sender, _ = ends(wires)
        sender.sendall(*frames[:2])
        sender.sendall(*frames[2:])
        sender.close()
        wire = b""
        while data := wires[1].recv(1 << 16):
            wire += data
    return wire, b"".join(frames)


WIRE, FRAMES = recorded()


def delivered(wire: bytes) -> tuple[bytes, str]:
    """What a reader gets of these bytes before its error, byte by byte, and the error."""
    with sockets() as (dialled, accepted):
        receiver = SealedStream(accepted, "b", SECRET, dialled=False)
        dialled.sendall(wire)
        dialled.shutdown(socket.SHUT_WR)
        got = b""
        try:
            while True:
                got += receive(receiver, 10)
        except ConnectError as error:
            assert len(receiver._in) <= BUFFER_BYTES_MAX
            assert len(receiver._opened_buffer) <= RECORD_BYTES_MAX
            return got, error.what
        finally:
            receiver.close()


def test_the_recorded_stream_is_whole() -> None:
    assert delivered(WIRE) == (FRAMES, "data stream from b: the other side closed it")
    assert len(WIRE) == len(FRAMES) + 5 * RECORD_OVERHEAD_BYTES


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 * len(WIRE) - 1))
def test_a_flipped_bit(bit: int) -> None:
    damaged = bytearray(WIRE)
    damaged[bit // 8] ^= 1 << bit % 8
    got, what = delivered(bytes(damaged))
    assert FRAMES.startswith(got)
    assert what != "data stream from b: the other side closed it"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(WIRE)), st.integers(0, len(WIRE)), st.integers(0, len(WIRE)))
def test_bytes_that_are_cut_out_or_put_in(first: int, second: int, third: int) -> None:
    start, stop = sorted((first, second))
    for wire in (WIRE[:start] + WIRE[stop:], WIRE[:third] + WIRE[start:stop] + WIRE[third:]):
        got, what = delivered(wire)
        assert FRAMES.startswith(got)
        # Whatever follows the end is not looked at.
        assert what != "data stream from b: the other side closed it" or wire.startswith(WIRE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_hostile_bytes(wire: bytes) -> None:
    got, what = delivered(wire)
    assert got == b""
    assert what.startswith("data stream from b: ")


@pytest.mark.parametrize("length", [RECORD_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_is_not_allowed_costs_no_memory(
    wires: tuple[socket.socket, socket.socket], length: int
) -> None:
    _, receiver = ends(wires)
    wires[0].sendall(length.to_bytes(4, "big") + bytes(12))
    with pytest.raises(ConnectError, match=rf"from b: a record of {length:,} bytes; at most"):
        receive(receiver, 1)
    assert len(receiver._in) < 2 * AHEAD_BYTES


def test_a_target_holds_nothing_that_is_not_authentic(
    sealed: tuple[SealedStream, SealedStream],
) -> None:
    sender, receiver = sealed
    sender._seal(sealing.RecordKind.DATA, memoryview(b"\xff" * 100))
    sender._out[50] ^= 1
    sender._flush()
    target = bytearray(100)
    with pytest.raises(ConnectError, match="not authentic"):
        receiver.recv_into(memoryview(target))
    assert target == bytes(100)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("size", [40, 10_000, 300_000, 5_000_000])
def test_buffers_follow_what_passes_through_them(
    sealed: tuple[SealedStream, SealedStream], size: int
) -> None:
    sender, receiver = sealed
    buffers: list[tuple[memoryview, memoryview]] = []
    for _ in range(3):
        sending = Call(lambda: sender.sendall(bytes(40), PATTERN[:size]))
        receive(receiver, 40)
        assert receive(receiver, size) == PATTERN[:size]
        sending.end()
        buffers.append((sender._out, receiver._in))
    most = min(size, RECORD_BYTES_MAX) + RECORD_OVERHEAD_BYTES + AHEAD_BYTES
    assert max(len(buffer) for buffer in buffers[-1]) <= most <= BUFFER_BYTES_MAX
    assert buffers[1][0] is buffers[2][0]  # reused
    assert buffers[1][1] is buffers[2][1]
    assert len(receiver._opened_buffer) == 0  # the reader took every record whole
