"""Data streams, sealed, plain and inside TLS: every byte, and never a call that hangs."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.wires import Call, pair, receive, sockets

from atoll.collectives.errors import ConnectError
from atoll.peer.streams import stream as datastream
from atoll.peer.streams.stream import (
    TELLS_DELIVERY,
    UNSENT_BYTES_MAX,
    UNSENT_BYTES_MIN,
    DataStream,
    PlainStream,
    unacknowledged_bytes,
    unsent_limit_bytes,
)

PATTERN = bytes(range(251)) * 20_000  # 5 MB whose period shares no factor with a record


@pytest.fixture(params=["aes-256-gcm", "none", "tls"])
def streams(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[DataStream, DataStream]]:
    """The sending and the receiving end of one stream."""
    with sockets() as wires:
        made = pair(request.param, wires, tmp_path)
        assert made[0].cipher == made[1].cipher == request.param
        yield made


def in_a_call(stream: DataStream) -> None:
    """Until the thread that owns ``stream`` is inside one of its calls."""
    while not stream._in_use.locked():
        time.sleep(0.001)


def send_for_ever(stream: DataStream) -> None:
    while True:
        stream.sendall(PATTERN)


# ---------------------------------------------------------------- every byte


def test_every_byte_arrives_whatever_the_pieces(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    view = memoryview(PATTERN)

    def send() -> None:
        sender.sendall(view[:1], view[1:41], view[41:41])
        sender.sendall(b"")
        sender.sendall(view[41:3_000_000])
        sender.sendall(*(view[at : at + 1000] for at in range(3_000_000, 3_200_000, 1000)))
        sender.sendall(view[3_200_000:])

    sending = Call(send)
    for start, stop in ((0, 7), (7, 1_000_000), (1_000_000, 1_000_001), (1_000_001, len(PATTERN))):
        assert receive(receiver, stop - start) == PATTERN[start:stop]
    sending.end()
    assert receive(receiver, 0) == b""
    assert sender.sent_bytes == receiver.received_bytes == len(PATTERN)
    assert receiver.moved_bytes >= len(PATTERN)
    assert sender.moved_bytes == 0, "the kernel takes what it may never deliver"
    assert not sender.worn
    assert not receiver.worn


def test_both_directions(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    for text in (b"there", b"and back"):
        sender.sendall(text)
        assert receive(receiver, len(text)) == text
        receiver.sendall(text)
        assert receive(sender, len(text)) == text


def test_buffers_of_all_kinds(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    numbers = memoryview(bytearray(8)).cast("I")
    numbers[0] = numbers[1] = 0x01010101
    sender.sendall(numbers, bytes(2), memoryview(bytearray(2)))
    target = memoryview(bytearray(12)).cast("I")
    receiver.recv_into(target)
    assert target.tolist() == [0x01010101, 0x01010101, 0]


def test_what_is_sent_aside_is_no_part_of_a_round(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    sender.sendall(bytes(100), aside=True)
    assert (sender.sent_bytes, sender.sent_for_rounds_bytes) == (100, 0)
    sender.sendall(bytes(10))
    receive(receiver, 110)
    assert sender.sent_for_rounds_bytes >= 10
    assert receiver.sent_for_rounds_bytes == 0
    assert receiver.moved_bytes >= 110


def test_threads_that_share_a_stream_do_not_mix_their_frames(
    streams: tuple[DataStream, DataStream],
) -> None:
    sender, receiver = streams

    def send(mark: int) -> None:
        for _ in range(20):
            sender.sendall(bytes([mark]) * 40, bytes([mark]) * 20_000)

    sending = [Call(lambda mark=mark: send(mark)) for mark in (1, 2)]  # type: ignore[misc]
    frames = [receive(receiver, 20_040) for _ in range(40)]
    for call in sending:
        call.end()
    assert sorted(frames) == [bytes([1]) * 20_040] * 20 + [bytes([2]) * 20_040] * 20


# ---------------------------------------------------------------- what has been delivered


def soon(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.skipif(not TELLS_DELIVERY, reason="this system does not tell what was acknowledged")
def test_a_frame_is_delivered_when_all_of_it_is_acknowledged(
    streams: tuple[DataStream, DataStream],
) -> None:
    sender, receiver = streams
    first = sender.sendall(b"frame")
    soon(lambda: sender.has_delivered(first))  # the other kernel has it, its reader may not
    sending = Call(lambda: sender.sendall(PATTERN))
    in_a_call(sender)
    assert not sender.has_delivered(first + len(PATTERN))
    assert receive(receiver, 5 + len(PATTERN)) == b"frame" + PATTERN
    sending.end()
    last = sender.sendall(b"")
    assert last >= first + len(PATTERN)
    soon(lambda: sender.has_delivered(last))
    assert not sender.has_delivered(last + 1)


@pytest.mark.skipif(not TELLS_DELIVERY, reason="this system does not tell what was acknowledged")
def test_what_a_reset_has_lost_is_not_delivered(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    sender.pace(20_000)
    ends = [sender.sendall(bytes(10_000)) for _ in range(5)]
    soon(lambda: sender.has_delivered(ends[0]))
    receiver._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    receiver._sock.close()
    with pytest.raises(ConnectError):
        send_for_ever(sender)
    assert [sender.has_delivered(end) for end in (ends[0], ends[-1])] == [True, False]
    sender.close()
    assert [sender.has_delivered(end) for end in (ends[0], ends[-1])] == [True, False]


def test_where_the_system_does_not_tell_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastream, "TELLS_DELIVERY", False)
    with sockets() as wires:
        assert unacknowledged_bytes(wires[0]) is None
        stream = PlainStream(wires[0], "a")
        assert not stream.has_delivered(stream.sendall(b"frame"))


# ---------------------------------------------------------------- what waits unsent


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "limit_bytes"),
    [
        (0, UNSENT_BYTES_MAX),  # not known
        (1, UNSENT_BYTES_MIN),
        (1_000_000, 50_000),
        (5_000_000, 250_000),
        (10_000_000_000, UNSENT_BYTES_MAX),
    ],
)
def test_50_ms_may_wait_in_the_kernel(rate_bytes_per_s: int, limit_bytes: int) -> None:
    assert unsent_limit_bytes(rate_bytes_per_s) == limit_bytes


def test_the_kernel_is_told_the_limit(
    streams: tuple[DataStream, DataStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastream, "unsent_limit_bytes", lambda rate: 20_000 + (rate > 0))
    sender, receiver = streams
    for _ in range(2):  # the rate is known when something has arrived
        sending = Call(lambda: sender.sendall(PATTERN[:100_000]))
        receive(receiver, 100_000)
        sending.end()
    option = socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT
    assert sender._sock.getsockopt(*option) == 20_001


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("idle", [True, False])
def test_close_wakes_a_receiver(streams: tuple[DataStream, DataStream], idle: bool) -> None:
    _, receiver = streams
    waiting = Call(lambda: receive(receiver, 1, idle=idle))
    in_a_call(receiver)
    receiver.close()
    with pytest.raises(ConnectError, match=r"data stream from b: closed on this side"):
        waiting.end()
    receiver.close()
    assert receiver.closed
    with pytest.raises(ConnectError, match=r"closed on this side"):
        receive(receiver, 1)


def test_close_wakes_a_sender_that_nobody_reads(streams: tuple[DataStream, DataStream]) -> None:
    sender, _ = streams
    sending = Call(lambda: send_for_ever(sender))
    in_a_call(sender)
    sender.close()
    with pytest.raises(ConnectError, match=r"data stream to a: closed on this side"):
        sending.end()


def test_the_end_of_the_other_side_ends_a_call(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    sender.sendall(b"half")
    sender.close()
    with pytest.raises(ConnectError, match=r"from b: the other side closed it"):
        receive(receiver, 8)
    assert receiver.closed


def test_what_was_sent_before_the_end_arrives(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    sender.sendall(PATTERN[:100_000])
    sender.close()
    assert receive(receiver, 100_000) == PATTERN[:100_000]
    with pytest.raises(ConnectError, match=r"the other side closed it"):
        receive(receiver, 1, idle=True)


def test_a_reader_that_leaves_ends_the_sender(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    receiver.close()
    with pytest.raises(ConnectError, match=r"to a: (connection reset|broken pipe)"):
        send_for_ever(sender)


def test_no_progress_is_an_error_but_idling_is_not(
    streams: tuple[DataStream, DataStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastream, "NO_PROGRESS_TIMEOUT_S", 0.05)
    sender, receiver = streams
    idling = Call(lambda: receive(receiver, 1, idle=True))
    time.sleep(0.15)
    sender.sendall(b"x")
    assert idling.end() == b"x"
    with pytest.raises(ConnectError, match=r"to a: no byte moved for"):
        send_for_ever(sender)
    sent_bytes = sender.sent_bytes
    with pytest.raises(ConnectError, match="it broke before"):  # it would be the rest of a frame
        sender.sendall(b"next")
    assert sender.sent_bytes == sent_bytes
    assert sender.closed


def test_a_stream_that_stops_within_a_frame_is_an_error(
    streams: tuple[DataStream, DataStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastream, "NO_PROGRESS_TIMEOUT_S", 0.05)
    sender, receiver = streams
    sender.sendall(b"x")
    with pytest.raises(ConnectError, match=r"from b: no byte moved for"):
        receive(receiver, 2, idle=True)


def test_a_stream_keeps_to_its_pace(streams: tuple[DataStream, DataStream]) -> None:
    sender, receiver = streams
    assert sender.pace(1 << 40, "cubic")
    assert sender._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)[:5] == b"cubic"
    assert sender.pace(2 << 20)
    began_s = time.monotonic()
    sending = Call(lambda: sender.sendall(PATTERN[: 2 << 20]))
    receive(receiver, 2 << 20)
    sending.end()
    assert time.monotonic() - began_s > 0.3  # a second, but for what leaves at once
    assert sender.pace()
    assert not sender.pace(congestion="never-heard-of")
