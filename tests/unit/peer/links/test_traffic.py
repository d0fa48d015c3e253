"""What shares a link with what."""

from __future__ import annotations

from atoll.peer.links.tcp_intervals import LOAD_BYTES, Slice
from atoll.peer.links.traffic import Traffic

A, B = b"a" * 32, b"b" * 32
MUCH, LITTLE = Slice(0.1, sent=LOAD_BYTES), Slice(0.1, sent=LOAD_BYTES - 1)


def came(count: float) -> Slice:
    return Slice(0.1, arrived=count)


def test_only_what_goes_to_one_peer_is_alone() -> None:
    assert Traffic({A: [MUCH, MUCH], B: [LITTLE]}, {}).is_alone(A)
    assert not Traffic({A: [MUCH]}, {}).is_alone(B)
    assert not Traffic({A: [MUCH], B: [LITTLE, MUCH]}, {}).is_alone(A)


def test_what_arrives_is_in_the_way_of_the_acknowledgements() -> None:
    for source in (A, B):
        assert not Traffic({A: [MUCH]}, {source: [came(LOAD_BYTES), came(1)]}).is_alone(A)
    assert Traffic({A: [MUCH]}, {A: [came(LOAD_BYTES)], B: [came(LOAD_BYTES)]}).is_alone(A)


def test_who_sends_and_from_whom_something_comes() -> None:
    quiet = Traffic({A: [LITTLE], B: []}, {A: [], B: [came(10)]})
    assert not quiet.sending
    assert not quiet.arriving
    busy = Traffic({A: [MUCH], B: []}, {A: [], B: [came(1e6)]})
    assert (busy.sending, busy.arriving) == ({A}, {B})
