"""Kept chunks on their way: whom to ask, and what to do when that one fails."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import ChunkGrid, encoded_layout, get_codec
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.rounds.salvage import KeptCopy, KeptPlan, pack_chunks, parse_chunks

HOLDERS = [b"a", b"b", b"c"]
LAYOUT = encoded_layout(ChunkGrid(256 * 6, 256), get_codec("int8"))
CHUNK_BYTES = LAYOUT.size(0)


@given(st.lists(st.integers(0, 99), min_size=1))
def test_lists_of_chunks_survive_the_wire(chunks: list[int]) -> None:
    assert parse_chunks(pack_chunks(chunks), 100) == chunks


@pytest.mark.parametrize("packed", [b"abc", pack_chunks([3, 100])])
def test_lists_that_make_no_sense_are_refused(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_chunks(packed, 100)


def test_peers_do_not_all_begin_with_the_same_holder() -> None:
    lacking = dict.fromkeys(range(6), HOLDERS)
    for turn in range(3):
        orders = KeptPlan(lacking, turn).ask(range(6))
        assert {len(chunks) for chunks in orders.values()} == {2}
    firsts = {turn: KeptPlan(lacking, turn).ask([0]) for turn in range(3)}
    assert {holder for orders in firsts.values() for holder in orders} == set(HOLDERS)


class Wire:
    """What a KeptCopy has asked for, stored and reported. A holder in ``bad`` sends wrong bytes."""

    def __init__(self, lacking: dict[int, list[bytes]], bad: set[bytes] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad = bad
        self.asked: list[tuple[bytes, int]] = []
        self.stored: dict[int, bytes] = {}
        self.failures: list[tuple[bytes, str]] = []
        self.copy = KeptCopy(KeptPlan(lacking, 0), LAYOUT, self)
        self.copy.start()

    def put_kept(self, chunk: int, data: np.ndarray) -> bool:
        if data[0]:
            return False
        self.stored[chunk] = data.tobytes()
        return True

    def ask_kept(self, holder: bytes, chunks: list[int]) -> None:
        self.asked += ((holder, chunk) for chunk in chunks)

    def kept_failed(self, holder: bytes, why: str) -> None:
        self.failures.append((holder, why))

    def deliver(self, holder: bytes, chunk: int, length: int = CHUNK_BYTES) -> bool:
        buffer = self.copy.reserve(holder, chunk, length)
        if buffer is None:
            return False
        buffer[:] = bytes([holder in self.bad]) * length
        self.copy.received(holder, chunk)
        return True


@given(data=st.data())
def test_every_chunk_comes_from_the_first_holder_that_does_not_fail(data: st.DataObject) -> None:
    lacking = {
        chunk: data.draw(st.lists(st.sampled_from(HOLDERS), unique=True)) for chunk in range(6)
    }
    faults = data.draw(
        st.fixed_dictionaries({h: st.sampled_from(["", "bad", "empty", "gone"]) for h in HOLDERS})
    )
    wire = Wire(lacking, {holder for holder, fault in faults.items() if fault == "bad"})
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    answered: set[tuple[bytes, int]] = set()
    while waiting := [order for order in wire.asked if order not in answered]:
        holder, chunk = rng.choice(waiting)
        answered.add((holder, chunk))
        if faults[holder] == "gone":
            wire.copy.gave_up(holder, "the stream broke")
        else:
            wire.deliver(holder, chunk, 0 if faults[holder] == "empty" else CHUNK_BYTES)
    good = {c for c, holders in lacking.items() if any(not faults[h] for h in holders)}
    assert set(wire.stored) == good
    assert sorted(wire.copy.lacking) == sorted(set(lacking) - good)
    assert bool(wire.failures) == (good != set(lacking))
    assert len(set(wire.asked)) == len(wire.asked), "nobody is asked twice for one chunk"


def test_a_holder_that_sends_nothing_is_replaced_at_the_second_look() -> None:
    wire = Wire({0: [b"a", b"b"], 1: [b"b", b"a"]})
    assert sorted(wire.asked) == [(b"a", 0), (b"a", 1)]  # the second chunk begins one further on
    for _ in range(2):  # the first look may come right after the question
        assert len(wire.asked) == 2
        wire.copy.check_stalls("nothing for a while")
    assert sorted(wire.asked)[2:] == [(b"b", 0), (b"b", 1)]
    assert wire.deliver(b"b", 0)
    wire.copy.check_stalls("nothing for a while")
    assert not wire.failures
    assert wire.deliver(b"a", 1)  # late, but right: whoever brings it
    assert not wire.deliver(b"b", 1)
    assert wire.copy.lacking == []


def test_what_was_not_asked_for_is_dropped() -> None:
    wire = Wire({0: [b"a"]})
    assert not wire.deliver(b"a", 3)
    assert not wire.deliver(b"x", 0, CHUNK_BYTES - 1)  # not from whom it is expected: no matter
    assert wire.deliver(b"a", 0)
    assert not wire.failures
