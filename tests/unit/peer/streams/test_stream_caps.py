"""Data streams of a daemon with caps: every byte, none that did not ask, and no call that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.wires import Call, pair, receive, sockets

from atoll.collectives.errors import ConnectError
from atoll.peer.caps.caps import UNCAPPED, Caps
from atoll.peer.net.byte_counts import CONTROL, ROUNDS, STATE, ByteCounts
from atoll.peer.streams.stream import DataStream

PATTERN = bytes(range(251)) * 4000  # 1 MB whose period shares no factor with a record
RATE, LATER_S = 4e6, 0.3  # of a cap; a call that has not ended by then waits


@pytest.fixture(params=["aes-256-gcm", "none", "tls"])
def streams(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[DataStream, DataStream]]:
    """The sending and the receiving end of one stream, each of a daemon with caps of its own."""
    with sockets() as wires:
        made = pair(request.param, wires, tmp_path)
        for number, stream in enumerate(made):
            (tmp_path / str(number)).mkdir()
            stream.counts = ByteCounts(Caps(UNCAPPED, tmp_path / str(number), lambda line: None))
        yield made
        for stream in made:
            stream.close()


def capped(stream: DataStream, *, up: float = 0.0, down: float = 0.0) -> DataStream:
    assert stream.counts.up is not None
    assert stream.counts.down is not None
    if up:
        stream.counts.up.set_rate(up)
    if down:
        stream.counts.down.set_rate(down)
    return stream


def moved(stream: DataStream) -> tuple[int, int]:
    """What the caps of its daemon have counted, both ways."""
    assert stream.counts.up is not None
    assert stream.counts.down is not None
    return stream.counts.up.moved_bytes, stream.counts.down.moved_bytes


def pass_pattern(sender: DataStream, receiver: DataStream) -> float:
    """Send the pattern in frames of two parts and receive it; seconds."""
    began_s = time.monotonic()
    sending = Call(lambda: sender.sendall(PATTERN[:40], memoryview(PATTERN)[40:], purpose=STATE))
    assert receive(receiver, 40, idle=True) == PATTERN[:40]
    assert receive(receiver, len(PATTERN) - 40) == PATTERN[40:]
    sending.end()
    return time.monotonic() - began_s


@pytest.mark.parametrize("way", ["up", "down", "both", "none"])
def test_every_byte_arrives_and_is_counted_once(
    streams: tuple[DataStream, DataStream], way: str
) -> None:
    sender, receiver = streams
    if way in ("up", "both"):
        capped(sender, up=RATE)
    if way in ("down", "both"):
        capped(receiver, down=RATE)
    took_s = pass_pattern(sender, receiver)
    if way != "none":
        # One bucket is there from the start; on the way down the last piece may be late, no more.
        assert took_s >= (len(PATTERN) - 0.1 * RATE) / RATE
    sent, framing = sum(sender.counts.sent.values()), 0.02 * len(PATTERN)
    assert moved(sender)[0] == sent == sender.counts.sent[STATE]
    assert len(PATTERN) <= sent <= len(PATTERN) + framing
    assert moved(receiver)[1] == receiver.arrived_bytes == sent


def test_what_goes_at_once_is_charged(streams: tuple[DataStream, DataStream]) -> None:
    counts = streams[0].counts
    counts.add_sent(CONTROL, 1000)
    counts.add_received(ROUNDS, 300)
    assert moved(streams[0]) == (1000, 300)


@pytest.mark.parametrize("waits", ["sender", "receiver"])
def test_close_wakes_who_waits_for_a_cap(
    streams: tuple[DataStream, DataStream], waits: str
) -> None:
    sender, receiver = streams
    if waits == "sender":
        capped(sender, up=4e3)
    else:
        capped(receiver, down=4e3)
    sending = Call(lambda: sender.sendall(PATTERN))
    reading = Call(lambda: receive(receiver, len(PATTERN)))
    ours, theirs = (sending, reading) if waits == "sender" else (reading, sending)
    ours.join(LATER_S)
    assert ours.is_alive()
    (sender if waits == "sender" else receiver).close()
    with pytest.raises(ConnectError, match="closed on this side"):
        ours.end()
    if waits == "receiver":
        sender.close()
    with pytest.raises(ConnectError):
        theirs.end()


def test_an_idle_reader_keeps_no_bytes_from_others(
    streams: tuple[DataStream, DataStream],
) -> None:
    sender, receiver = capped(streams[0], up=RATE), capped(streams[1], down=RATE)
    reading = Call(lambda: receive(receiver, 5, idle=True))
    reading.join(LATER_S)
    assert moved(receiver)[1] == 0
    sender.sendall(b"hello")
    assert reading.end() == b"hello"
    assert moved(receiver)[1] == moved(sender)[0] > 0
