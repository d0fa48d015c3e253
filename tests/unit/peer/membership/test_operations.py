"""What trainers call, as values: majorities, objects in one blob, when they are sent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.optim.run_spec import BLOB_BYTES_MAX
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.operations import (
    BARRIER,
    OBJECT_BYTES_MAX,
    OPS,
    Call,
    ObjectSender,
    Operation,
    agreed,
    keep_objects,
    object_digest,
    object_sizes,
    pack_objects,
    unpack_objects,
)
from atoll.peer.net.wire import decode, encode
from atoll.peer.rounds.entries import GATHER, REDUCE, STEP

GATHERS, BARRIERS = Operation(GATHER), Operation(GATHER, op=BARRIER)
SUM = Operation(REDUCE, 1000, "sum", "float32")
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


@pytest.mark.parametrize(
    ("kind", "elements", "op", "codec"),
    [
        (STEP, 0, "", ""),
        ("scatter", 0, "", ""),
        (GATHER, 1, "", ""),
        (GATHER, 0, "sum", ""),
        (GATHER, 0, "", "float32"),
        (REDUCE, 5, "median", "float32"),
        (REDUCE, 5, "sum", ""),
        (REDUCE, 5, BARRIER, "float32"),
    ],
)
def test_only_what_makes_sense_is_an_operation(
    kind: str, elements: int, op: str, codec: str
) -> None:
    with pytest.raises(ValueError):
        Operation(kind, elements, op, codec)


@pytest.mark.parametrize("op", OPS)
def test_an_operation_says_what_was_called(op: str) -> None:
    text = str(Operation(REDUCE, 12_345, op, "int8"))
    assert text == f'all_reduce() of 12,345 elements with op="{op}", codec="int8"'
    assert (str(BARRIERS), str(GATHERS)) == ("barrier()", "all_gather()")


@pytest.mark.parametrize(
    ("calls", "wins"),
    [
        ({A: GATHERS}, GATHERS),
        ({A: GATHERS, B: SUM, C: SUM}, SUM),
        ({A: None, B: SUM, C: None}, None),
        ({B: SUM, A: GATHERS}, GATHERS),  # a tie of trainers that came together
        ({D: SUM, C: GATHERS, B: SUM, A: GATHERS}, GATHERS),
        ({D: GATHERS, C: GATHERS, B: None, A: SUM}, GATHERS),
    ],
)
def test_most_trainers_decide(calls: dict[bytes, Call], wins: Call) -> None:
    for order in itertools.permutations(calls.items()):
        assert agreed(dict(order), lambda peer: 1) == wins


@pytest.mark.parametrize(
    ("calls", "wins"),
    [
        ({A: BARRIERS, B: SUM}, SUM),  # b came first
        ({A: BARRIERS, B: SUM, C: SUM}, SUM),
        ({A: BARRIERS, B: SUM, C: BARRIERS}, BARRIERS),  # two are more than one, whoever it is
        ({A: BARRIERS, B: SUM, C: BARRIERS, D: SUM}, SUM),
        ({A: BARRIERS, C: SUM}, SUM),  # c came before a, who came last
    ],
)
def test_who_has_been_there_longer_wins_a_tie(calls: dict[bytes, Call], wins: Call) -> None:
    since = {A: 19, B: 1, C: 18, D: 19}
    for order in itertools.permutations(calls.items()):
        assert agreed(dict(order), since.__getitem__) == wins


# ---------------------------------------------------------------- objects


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_objects_come_out_as_they_went_in(objects: list[bytes]) -> None:
    blob = pack_objects(objects)
    assert unpack_objects(blob, len(objects)) == tuple(objects)
    assert object_sizes(blob, len(objects)) == tuple(map(len, objects))


def test_objects_that_do_not_fit_leave_their_sizes() -> None:
    most = (BLOB_BYTES_MAX - 4 * 9) // 9
    fits, beyond = [bytes(most)] * 9, [bytes(OBJECT_BYTES_MAX)] * 8
    assert unpack_objects(pack_objects(fits), 9) == tuple(fits)
    blob = pack_objects(beyond)
    assert len(blob) == 4 * 8
    assert unpack_objects(blob, 8) is None
    assert object_sizes(blob, 8) == (OBJECT_BYTES_MAX,) * 8


@pytest.mark.parametrize(
    ("blob", "count"),
    [
        (b"", 1),
        (b"\0\0\0\1", 2),
        (b"\0\0\0\2x", 1),
        (b"\0\0\0\1xy", 1),
        (b"\0\0\0\0x", 1),
        ((OBJECT_BYTES_MAX + 1).to_bytes(4, "big"), 1),
        (b"\0\0\0", 1),
    ],
)
def test_other_bytes_are_no_objects(blob: bytes, count: int) -> None:
    with pytest.raises(ValueError, match="are not"):
        object_sizes(blob, count)
    with pytest.raises(ValueError):
        Begin(b"L" * 32, 1, 2, 1, GATHER, (A, B)[:count], (1.0,) * count, blob, operation=GATHERS)


def test_a_retry_keeps_the_objects_of_those_who_stay() -> None:
    blob = pack_objects([b"one", b"", b"three"])
    assert unpack_objects(keep_objects(blob, (A, B, C), {A, C}), 2) == (b"one", b"three")
    too_many = pack_objects([bytes(OBJECT_BYTES_MAX)] * 9)
    peers = tuple(bytes([n]) * 32 for n in range(9))
    less = keep_objects(too_many, peers, peers[:2])  # would fit, but nobody has them any more
    assert unpack_objects(less, 2) is None


def test_begin_names_the_operation_that_its_kind_needs() -> None:
    tag = (b"L" * 32, 1, 2, 1)
    right = Begin(*tag, REDUCE, (A,), (1.0,), operation=SUM, without=(B, C))
    assert decode(encode(right)) == right
    for kind, operation in [(REDUCE, None), (REDUCE, GATHERS), (STEP, SUM), ("other", None)]:
        with pytest.raises(ValueError, match="known kind"):
            Begin(*tag, kind, (A,), (1.0,), operation=operation)


def test_an_object_is_sent_at_once_and_again_with_growing_pauses() -> None:
    sender, data = ObjectSender(), b"x" * 100
    sent = [t / 10 for t in range(200) if sender.is_due(data, ("view 1", True), t / 10)]
    assert sent == [0.0, 0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5]
    assert sender.is_due(data, ("view 2", True), 20.0)
    assert sender.is_due(data, ("view 2", False), 20.0)  # the link has broken ...
    assert sender.is_due(data, ("view 2", True), 20.1)  # ... and is back
    assert not sender.is_due(data, ("view 2", True), 20.2)
    assert sender.is_due(b"another", ("view 2", True), 20.2)
    assert not sender.is_due(b"", ("view 2", True), 99.0)
    assert sender.is_due(b"another", ("view 2", True), 99.1)  # given once more, to the next one
    assert sender.digest(data) == object_digest(data) != object_digest(b"another")
    assert sender.digest(b"") == b""
