"""Long messages travel as what differs from the view that both ends know."""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import replace

import pytest
from harness.cluster import Cluster, peer_id
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import (
    STEP,
    Accept,
    Begin,
    CoordinatorBeat,
    Install,
    Packed,
    ProbeView,
    Ready,
)
from atoll.peer.membership.packing import (
    BLOB_BYTES_MAX,
    PACK_FROM_BYTES,
    PACK_FROM_MEMBERS,
    VIEWS_KEPT,
    Packing,
    dictionary_of,
)
from atoll.peer.membership.view import MEMBERS_MAX, Ballot, Member, View
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, decode, encode

LINEAGE, CHAIN = b"l" * 32, b"c" * 32


def identity(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def view_of(count: int, number: int = 7) -> View:
    members = tuple(
        Member(identity(n), 10 + n, address=f"10.0.{n // 256}.{n % 256}:{40_000 + n}")
        for n in range(count)
    )
    return View(LINEAGE, number, members, members[0].peer, 5, CHAIN)


def both(view: View) -> tuple[Packing, Packing]:
    one, other = Packing(), Packing()
    one.enter(view)
    other.enter(view)
    return one, other


def begin_in(view: View, weights: float = 1.0) -> Begin:
    peers = tuple(sorted(view.peers))
    own = tuple(weights * (1 + n % 3) for n in range(len(peers)))
    lives = tuple(range(len(peers)))
    return Begin(LINEAGE, view.number, 6, 1, STEP, peers, own, lives=lives)


@pytest.mark.parametrize("count", [16, 64, 128, 370, MEMBERS_MAX])
def test_what_is_packed_comes_out_the_same_and_takes_a_fraction(count: int) -> None:
    view = view_of(count)
    here, there = both(view)
    joined = Member(identity(-1), 1, address="192.168.1.1:5")
    following = replace(
        view, number=8, members=(*view.members[1:], joined), coordinator=joined.peer
    )
    for message, most in (
        (begin_in(view), 16 * count),
        (Accept(LINEAGE, 7, Ballot(0, view.coordinator), following), 400 + 24 * count),
        (CoordinatorBeat(LINEAGE, 7, 5, CHAIN, waiting=view.peers), 200 + 6 * count),
    ):
        packed = here.packed(view.peers[1], message)
        if not isinstance(packed, Packed):
            assert packed is message
            assert len(encode(message)) < PACK_FROM_BYTES
            continue
        arrived = decode(encode(packed))
        assert isinstance(arrived, Packed)
        assert there.unpacked(view.coordinator, arrived) == message
        if count < MEMBERS_MAX:  # of more than DEFLATE can look back less is found
            assert len(packed.data) < min(most, len(encode(message)) / 2)


@settings(max_examples=30, deadline=None)
@given(weights=st.floats(0.1, 100.0), count=st.integers(24, 60), gone=st.integers(0, 20))
def test_any_selection_of_members_comes_out_the_same(weights: float, count: int, gone: int) -> None:
    view = view_of(count)
    here, there = both(view)
    begin = begin_in(replace(view, members=view.members[: count - gone]), weights)
    packed = here.packed(view.peers[-1], begin)
    assert (
        there.unpacked(view.coordinator, packed) if isinstance(packed, Packed) else packed
    ) == begin


def test_in_a_small_view_nothing_is_packed() -> None:
    view = view_of(PACK_FROM_MEMBERS - 1)
    here, _ = both(view)
    begin = begin_in(view)
    assert here.packed(view.peers[1], begin) is begin


def test_one_that_goes_to_all_is_packed_once() -> None:
    view = view_of(64)
    here, _ = both(view)
    begin = begin_in(view)
    first = here.packed(view.peers[1], begin)
    assert all(here.packed(peer, begin) is first for peer in view.peers)
    assert here.packed(view.peers[1], replace(begin, attempt=2)) != first


def test_who_is_not_in_the_view_gets_it_as_it_is() -> None:
    view = view_of(64)
    here, _ = both(view)
    begin = begin_in(view)
    assert here.packed(identity(-5), begin) is begin
    assert Packing().packed(view.peers[1], begin) is begin
    later = replace(begin, view=8)
    assert here.packed(view.peers[1], later) is later
    ready = Ready(LINEAGE, 7, 6, 1, CHAIN)
    assert here.packed(view.peers[1], ready) is ready


def test_views_of_before_are_kept_for_what_is_on_its_way() -> None:
    packing, views = Packing(), [view_of(64, number) for number in range(1, VIEWS_KEPT + 2)]
    packed = []
    for view in views:
        packing.enter(view)
        packed.append(packing.packed(view.peers[1], begin_in(view)))
    assert all(isinstance(each, Packed) for each in packed)
    assert packing.unpacked(views[0].coordinator, packed[0]) is packed[0], "too long ago"
    for view, each in zip(views[1:], packed[1:], strict=True):
        assert packing.unpacked(view.coordinator, each) == begin_in(view)


def squeezed(view: View, plain: bytes) -> bytes:
    packer = zlib.compressobj(9, zdict=dictionary_of(view))
    return packer.compress(plain) + packer.flush()


def test_whatever_else_comes_packed_is_refused() -> None:
    view = view_of(64)
    _, there = both(view)
    good = squeezed(view, encode(begin_in(view)))
    cases = {
        "cut": good[:-3],
        "tail": good + b"x",
        "noise": os.urandom(200),
        "too long": squeezed(view, bytes(CONTROL_FRAME_BYTES_MAX + 1)),
        "no message": squeezed(view, b"\xc1" * 50),
        "not allowed": squeezed(view, encode(Ready(LINEAGE, 7, 6, 1, CHAIN))),
        "packed again": squeezed(view, encode(Packed(LINEAGE, 7, good))),
        "other view": squeezed(view, encode(replace(begin_in(view), view=8))),
        "other dictionary": squeezed(view_of(63), encode(begin_in(view))),
    }
    for data in cases.values():
        with pytest.raises(RemoteProtocolError):
            there.unpacked(view.coordinator, Packed(LINEAGE, 7, data))


def test_a_machine_answers_what_it_cannot_read_by_view_alone() -> None:
    """It asks for a later view, tells an earlier one of its own, and drops what it just enters."""
    run = Cluster("abc")
    run.form("abc")
    host = run.host("b")
    view = host.node.view
    assert view is not None

    def told(number: int) -> list[type]:
        packed = Packed(view.lineage, number, b"x")
        effects = host.node.handle(ev.Received(peer_id("a"), packed), run.now_s + 1.0)
        return [
            type(e.message) for e in effects if isinstance(e, ev.Send) and e.peer == peer_id("a")
        ]

    assert ProbeView in told(view.number + 1)
    assert Install in told(view.number - 1)
    assert not {ProbeView, Install} & {*told(view.number)}


def test_what_a_stranger_sends_is_not_inflated() -> None:
    view = view_of(64)
    _, there = both(view)
    packed = Packed(LINEAGE, 7, b"no bytes of DEFLATE")
    assert there.unpacked(identity(-5), packed) is packed
    with pytest.raises(RemoteProtocolError):
        there.unpacked(view.peers[1], packed)


def test_a_large_blob_travels_as_it_is() -> None:
    view = view_of(64)
    here, _ = both(view)
    begin = replace(begin_in(view), blob=bytes(BLOB_BYTES_MAX + 1))
    assert here.packed(view.peers[1], begin) is begin


def test_a_proposal_is_one_message_for_all() -> None:
    """Else it would be compressed once for each member."""
    run = Cluster("abcd")
    run.form("abc")
    accepts: list[object] = []
    sent = run.send

    def send(host: object, peer: bytes, message: object) -> None:
        if isinstance(message, Accept):
            accepts.append(message)
        sent(host, peer, message)  # type: ignore[arg-type]

    run.send = send  # type: ignore[method-assign,assignment]
    for name in "abc":
        run.link("d", name)
    run.until(lambda: run.in_one_view("abcd"))
    assert len(accepts) > len({id(each) for each in accepts})
