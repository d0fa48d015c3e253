"""struct tcp_info: where the fields lie, what is too short, and what a real connection says."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.links.tcp_info import TCP_INFO_BYTES, parse, silence_s, since_answer_s
from atoll.peer.streams.stream import PlainStream

# Offsets and formats in linux/tcp.h.
FIELDS = {
    "snd_mss": (16, "I", 1448),
    "rcv_mss": (20, "I", 1400),
    "pmtu": (60, "I", 1500),
    "rtt": (68, "I", 40_000),
    "bytes_received": (128, "Q", 7_000_000_000),
    "notsent_bytes": (144, "I", 5_000),
    "min_rtt": (148, "I", 20_000),
    "data_segs_in": (152, "I", 77),
    "delivery_rate": (160, "Q", 2_500_000),
    "busy_time": (168, "Q", 1_500_000),
    "delivered": (192, "I", 4_000),
    "bytes_sent": (200, "Q", 6_000_000_000),
    "bytes_retrans": (208, "Q", 14_480),
    "dsack_dups": (216, "I", 3),
}


def packed(size: int = 256, flags: int = 0, **changes: int) -> bytes:
    data = bytearray(size)
    data[7] = flags
    for name, (offset, kind, value) in FIELDS.items():
        struct.pack_into(f"={kind}", data, offset, changes.get(name, value))
    return bytes(data)


def test_every_field_is_read_from_its_place() -> None:
    info = parse(packed())
    assert info is not None
    assert asdict(info) == pytest.approx(
        {
            "app_limited": False,
            "mss": 1448,
            "received_mss": 1400,
            "headers": 1500 / 1448,
            "rtt_s": 0.04,
            "min_rtt_s": 0.02,
            "received_bytes": 7_000_000_000,
            "unsent_bytes": 5_000,
            "received_packets": 77,
            "delivery_rate": 2_500_000.0,
            "busy_s": 1.5,
            "delivered": 4_000,
            "sent_bytes": 6_000_000_000,
            "retransmitted_bytes": 14_480,
            "duplicates": 3,
        }
    )


def test_the_flag_is_one_bit_of_its_byte() -> None:
    limited, other = parse(packed(flags=0b001)), parse(packed(flags=0b110))
    assert limited is not None
    assert other is not None
    assert limited.app_limited
    assert not other.app_limited


def test_a_connection_that_never_had_a_round_trip_has_none() -> None:
    info = parse(packed(min_rtt=0xFFFFFFFF))
    assert info is not None
    assert info.min_rtt_s == 0


@pytest.mark.parametrize(("mss", "pmtu"), [(0, 1500), (1448, 0), (1, 0xFFFFFFFF)])
def test_headers_stay_within_what_can_be(mss: int, pmtu: int) -> None:
    info = parse(packed(snd_mss=mss, pmtu=pmtu))
    assert info is not None
    assert 1 <= info.headers <= 1.25


def test_older_kernels_tell_too_little() -> None:
    assert parse(packed(224)[: TCP_INFO_BYTES - 1]) is None
    assert parse(packed(224)[:TCP_INFO_BYTES]) is not None
    assert parse(b"") is None


@given(st.binary(max_size=300))
def test_whatever_it_is_it_is_read_or_not(data: bytes) -> None:
    info = parse(data)
    assert (info is None) == (len(data) < TCP_INFO_BYTES)


def test_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    sender, receiver = PlainStream(ours, "them"), PlainStream(theirs, "us")
    payload = bytes(48_000)  # fits the buffers of both ends
    sender.sendall(payload)
    receiver.recv_into(memoryview(bytearray(len(payload))))
    sent, got = parse(sender.tcp_info()), parse(receiver.tcp_info())
    assert sent is not None
    assert got is not None
    assert sent.sent_bytes == got.received_bytes == len(payload)
    assert 0 < sent.min_rtt_s <= sent.rtt_s < 1
    assert sent.delivered >= 1
    assert sent.delivery_rate > 0
    sender.close()
    receiver.close()
    assert sender.tcp_info() == b""


# ---------------------------------------------------------------- silence


@pytest.mark.parametrize(
    ("retransmitted", "doubled", "timeout_us", "expected_s"),
    [
        (0, 0, 250_000, 0.0),  # all is acknowledged, or not overdue
        (0, 5, 8_000_000, 0.0),  # a full window that is asked about: the answers come
        (1, 1, 500_000, 0.25),
        (3, 3, 2_000_000, 1.75),
        (4, 4, 4_000_000, 3.75),
    ],
)
def test_silence_is_what_the_doubled_timeouts_have_taken(
    retransmitted: int, doubled: int, timeout_us: int, expected_s: float
) -> None:
    data = struct.pack("=2xBxB3xI", retransmitted, doubled, timeout_us) + bytes(200)
    assert silence_s(data) == pytest.approx(expected_s)


def test_nothing_is_known_of_a_system_that_tells_nothing() -> None:
    assert silence_s(b"") == 0.0


def test_when_the_other_kernel_has_answered_last_is_read_from_its_place() -> None:
    data = bytearray(256)
    struct.pack_into("=I", data, 56, 1250)
    assert since_answer_s(bytes(data)) == 1.25
    assert since_answer_s(bytes(59)) is None


def test_a_process_that_reads_nothing_does_not_keep_its_kernel_from_answering() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()  # from now on nobody reads here
        with near, far:
            for _ in range(5):
                near.sendall(b"a heartbeat")
                time.sleep(0.05)
            info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            ago_s = since_answer_s(info)
            assert ago_s is not None
            assert ago_s < 0.2
