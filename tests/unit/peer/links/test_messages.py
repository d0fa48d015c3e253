"""Rows that no honest peer sends, and the largest that one does."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.links.messages import LinkRow, MayProbe, ProbeOver, StreamPlan
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, decode, encode


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fields(count: int = 2) -> dict[str, object]:
    return {
        "peers": [peer(n) for n in range(count)],
        "rtt_s": [0.02] * count,
        "out": [1e6] * count,
        "loss": [0.001] * count,
        "up": 2e6,
        "down": 3e6,
    }


def received(values: dict[str, object], name: str = "LinkRow") -> object:
    return decode(msgpack.packb([name, values]))


def test_a_row_of_a_full_view_fits_a_frame_many_times() -> None:
    row = LinkRow(
        peers=tuple(peer(n) for n in range(MEMBERS_MAX)),
        rtt_s=(0.123456789,) * MEMBERS_MAX,
        out=(1.23456789e9,) * MEMBERS_MAX,
        loss=(None,) * MEMBERS_MAX,
        up=1e9,
    )
    payload = encode(row)
    assert decode(payload) == row
    assert len(payload) < CONTROL_FRAME_BYTES_MAX / 10


def test_what_is_unknown_travels_too() -> None:
    row = LinkRow((peer(1),), (None,), (None,), (None,))
    assert decode(encode(row)) == row
    assert decode(encode(ProbeOver())) == ProbeOver()
    assert decode(encode(MayProbe(True))) == MayProbe(True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.update(rtt_s=[0.02]),
        lambda f: f.update(out=[1e6] * 3),
        lambda f: f.update(peers=[peer(1), peer(1)]),
        lambda f: f.update(peers=[peer(1), b"short"]),
        lambda f: f.update(out=[math.nan, 1.0]),
        lambda f: f.update(out=[math.inf, 1.0]),
        lambda f: f.update(rtt_s=[-0.001, 1.0]),
        lambda f: f.update(loss=["much", 0.0]),
        lambda f: f.update(up=-1.0),
        lambda f: f.update(down=math.nan),
        lambda f: f.pop("out"),
        lambda f: f.update(fields(MEMBERS_MAX + 1)),
    ],
)
def test_nonsense_is_refused(spoil: Callable[[dict[str, object]], object]) -> None:
    good = fields()
    assert isinstance(received(good), LinkRow)
    spoil(good)
    with pytest.raises(RemoteProtocolError):
        received(good)


def test_nonsense_about_a_probe_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        received({"out": -1.0}, "ProbeOver")
    with pytest.raises(RemoteProtocolError):
        received({"granted": 1}, "MayProbe")


values = st.none() | st.floats() | st.integers() | st.text(max_size=3)


@given(st.lists(values, max_size=4), st.lists(values, max_size=4), values)
def test_whatever_arrives_is_a_row_within_bounds_or_an_error(
    rtt_s: list[object], out: list[object], up: object
) -> None:
    peers = [peer(n) for n in range(len(out))]
    try:
        row = received(
            {"peers": peers, "rtt_s": rtt_s, "out": out, "loss": [None] * len(out), "up": up}
        )
    except RemoteProtocolError:
        return
    except OverflowError:  # msgpack's, of the sender: no such integer travels
        return
    assert isinstance(row, LinkRow)
    assert all(v is None or 0 <= v < math.inf for v in (*row.rtt_s, *row.out, row.up))


def test_a_plan_of_streams_for_a_full_view_fits_a_frame() -> None:
    plan = StreamPlan(
        peers=tuple(peer(n) for n in range(MEMBERS_MAX)),
        streams=(STREAMS_MAX,) * MEMBERS_MAX,
        pace=(1.23456789e8,) * MEMBERS_MAX,
        lossy=(True,) * MEMBERS_MAX,
    )
    payload = encode(plan)
    assert decode(payload) == plan
    assert len(payload) < CONTROL_FRAME_BYTES_MAX / 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams": [1]},
        {"streams": [1, 0]},
        {"streams": [1, STREAMS_MAX + 1]},
        {"pace": [1e6]},
        {"pace": [1e6, -1.0]},
        {"pace": [1e6, math.nan]},
        {"pace": [1e6, math.inf]},
        {"pace": [1e6, 1e-3]},  # a standstill
        {"lossy": [True]},
        {"lossy": [True, 2]},
    ],
    ids=str,
)
def test_no_plan_of_streams_brings_a_peer_to_a_standstill(wrong: dict[str, object]) -> None:
    right = {
        "peers": [peer(1), peer(2)],
        "streams": [1, 4],
        "pace": [0.0, 1e6],
        "lossy": [True, False],
    }
    assert list(received(right, "StreamPlan").rows())[1] == (peer(2), 4, 1e6, False)
    with pytest.raises(RemoteProtocolError):
        received(right | wrong, "StreamPlan")


@pytest.mark.parametrize("value", [1e300, math.inf, math.nan, -1.0])
def test_what_no_link_has_is_refused(value: float) -> None:
    """`atoll status` writes these as whole numbers, and has to have room for them."""
    with pytest.raises(RemoteProtocolError):
        received({"out": value}, "ProbeOver")
