"""Frames at every split point, every message back as it was, and nothing but one error."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.net import wire
from atoll.peer.net.wire import (
    ARRAY_ITEMS_MAX,
    CONTROL_FRAME_BYTES_MAX,
    FrameReader,
    Within,
    decode,
    defined_in,
    encode,
    frame,
    message,
    name_of,
    registered,
)


@message(wire="WireInner")
class WireInner:
    name: str
    value: float = 0.5


@message(wire="WireOuter")
class WireOuter:
    number: int
    flag: bool
    blob: bytes
    maybe: str | None
    items: tuple[WireInner, ...]
    table: dict[str, int]
    inner: WireInner
    grid: tuple[tuple[int, ...], ...] = ()
    late: int = 7

    def __post_init__(self) -> None:
        if self.late < 0:
            raise ValueError("late is negative")


@message(wire="WireBounds")
class WireBounds:
    number: Annotated[int, Within(-1, 9)] = 0
    text: Annotated[str, Within(0, 4)] = ""
    blob: Annotated[bytes, Within(2, 2)] = b"ab"
    items: Annotated[tuple[Annotated[bytes, Within(1, 1)], ...], Within(0, 2)] = ()


@message(wire="WireSparse", sparse=("seldom",))
class WireSparse:
    number: int
    usual: float | None = None
    seldom: float | None = None


INNER = st.builds(WireInner, name=st.text(max_size=8), value=st.floats(allow_nan=False))
OUTER = st.builds(
    WireOuter,
    number=st.integers(-(1 << 63), (1 << 64) - 1),
    flag=st.booleans(),
    blob=st.binary(max_size=64),
    maybe=st.none() | st.text(max_size=8),
    items=st.lists(INNER, max_size=4).map(tuple),
    table=st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=4),
    inner=INNER,
    grid=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3).map(tuple),
    late=st.integers(0, 9),
)
EXAMPLE = WireOuter(1, True, b"b", None, (WireInner("n"),), {"k": 1}, WireInner("i"))


def fields(**changes: object) -> bytes:
    """EXAMPLE on the wire, with some fields replaced (or removed, by ...)."""
    name, values = msgpack.unpackb(encode(EXAMPLE))
    values.update(changes)
    return msgpack.packb([name, {k: v for k, v in values.items() if v is not ...}])


@given(OUTER)
def test_a_message_comes_back_as_it_was(msg: WireOuter) -> None:
    back = decode(encode(msg))
    assert back == msg
    assert type(back) is WireOuter


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 300)))
def test_frames_survive_every_split(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reader, found = FrameReader(), []
    for low, high in itertools.pairwise(edges):
        found += reader.feed(stream[low:high])
    assert found == payloads


def test_frames_survive_single_bytes() -> None:
    reader = FrameReader()
    stream = frame(b"one") + frame(b"two")
    found = [payload for byte in stream for payload in reader.feed(bytes([byte]))]
    assert found == [b"one", b"two"]


@pytest.mark.parametrize("length", [0, 101, (1 << 32) - 1])
def test_a_length_is_refused_before_its_bytes_are_kept(length: int) -> None:
    reader = FrameReader(limit_bytes=100)
    with pytest.raises(RemoteProtocolError, match=rf"{length:,} bytes; 1 to 100"):
        reader.feed(length.to_bytes(4, "big") + b"x" * 1000)
    assert not reader._buffer


def test_a_frame_that_no_receiver_takes_is_not_sent() -> None:
    assert len(frame(bytes(CONTROL_FRAME_BYTES_MAX))) == CONTROL_FRAME_BYTES_MAX + 4
    for payload in (b"", bytes(CONTROL_FRAME_BYTES_MAX + 1)):
        with pytest.raises(LocalProtocolError):
            frame(payload)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_one_error(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(payload)


@settings(max_examples=300)
@given(OUTER, st.data())
def test_a_damaged_message_is_a_message_or_one_error(msg: WireOuter, data: st.DataObject) -> None:
    payload = bytearray(encode(msg))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    try:
        back = decode(bytes(payload))
    except RemoteProtocolError:
        return
    assert isinstance(back, WireOuter | WireInner)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"number": True}, "number is bool, not int"),
        ({"number": 1.0}, "number is float, not int"),
        ({"flag": 1}, "flag is int, not bool"),
        ({"blob": "text"}, "blob is str, not bytes"),
        ({"maybe": 3}, "maybe is int, not str"),
        ({"items": 3}, "items is int, not an array"),
        ({"items": [3]}, "items is int, not a map"),
        ({"items": [{}]}, "items.name is missing"),
        ({"items": [{"name": "n", "value": "x"}]}, "value is str, not float"),
        ({"table": {b"k": 1}}, "not a map with string keys"),
        ({"table": {"k": None}}, "table is NoneType, not int"),
        ({"grid": [[1], 2]}, "grid is int, not an array"),
        ({"number": ...}, "number is missing"),
        ({"late": -1}, "late is negative"),
    ],
)
def test_types_are_exact(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(fields(**changes))


@pytest.mark.parametrize(
    "inside",
    [{"number": -1}, {"number": 9}, {"text": "éé"}, {"items": (b"x", b"y")}],
    ids=str,
)
def test_bounds_are_allowed_themselves(inside: dict[str, object]) -> None:
    msg = dataclasses.replace(WireBounds(), **inside)  # type: ignore[arg-type]  # of the right type
    assert decode(encode(msg)) == msg


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        ({"number": -2}, r"number is -2; -1 to 9 are allowed"),
        ({"number": 10}, "number is 10"),
        ({"text": "ééa"}, "text is 5"),
        ({"blob": b"a"}, "blob is 1"),
        ({"blob": b"abc"}, "blob is 3"),
        ({"items": (b"x",) * 3}, "items is 3"),
        ({"items": (b"",)}, "items is 0"),
    ],
)
def test_what_is_out_of_bounds_is_refused(outside: dict[str, object], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(msgpack.packb(["WireBounds", outside]))


def test_fields_may_be_appended() -> None:
    assert decode(fields(late=..., unknown=[1, {"deep": None}])) == EXAMPLE


def test_an_int_stands_for_a_float() -> None:
    back = decode(encode(WireInner("n", 3)))
    assert back == WireInner("n", 3.0)
    assert type(back.value) is float  # type: ignore[attr-defined]  # decode returns object


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 500_000,  # nested beyond msgpack's stack
        b"\x92\xa9WireInner" + b"\x81" * 500_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        msgpack.packb(["WireInner", {"name": "n", "x": [0] * (ARRAY_ITEMS_MAX + 1)}]),
        msgpack.packb(["WireInner", {"name": "n", "x": {str(i): 0 for i in range(257)}}]),
        msgpack.packb(["WireInner", {"name": "n", "x": msgpack.ExtType(1, b"x")}]),
        msgpack.packb(["WireInner", {"name": "n", 3: 4}]),
        msgpack.packb(["WireInner", {"name": "n"}]) + b"x",
        msgpack.packb(["Nobody", {}]),
        msgpack.packb(["x" * 1000, {}]),
        msgpack.packb([["WireInner"], {}]),
        msgpack.packb(["WireInner", []]),
        b"\x92\xa9WireInner\x81\xa4name\xa1\xff",  # not UTF-8
    ],
)
def test_hostile_payloads_are_one_short_error(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(payload)
    assert len(str(caught.value)) < 500


def test_only_allowed_messages_pass() -> None:
    payload = encode(EXAMPLE.inner)
    assert decode(payload, allowed=[WireInner]) == EXAMPLE.inner
    with pytest.raises(RemoteProtocolError, match="'WireInner' message is not allowed"):
        decode(payload, allowed=[WireOuter])


@pytest.mark.parametrize(
    "wrong", [object(), WireInner("n", object()), dataclasses.replace(EXAMPLE, number=1 << 64)]
)
def test_what_cannot_be_encoded_is_our_defect(wrong: object) -> None:
    with pytest.raises(LocalProtocolError):
        encode(wrong)


def test_a_field_type_that_cannot_be_checked_is_refused_when_defined() -> None:
    with pytest.raises(LocalProtocolError, match=r"WireBad.x has the type .*list"):

        @message(wire="WireBad")
        class WireBad:
            x: list[int]


@pytest.mark.parametrize("seldom", [None, 0.0, 2.5])
def test_a_sparse_field_takes_bytes_only_if_there_is_something(seldom: float | None) -> None:
    sent = encode(WireSparse(7, seldom=seldom))
    assert (b"seldom" in sent, b"usual" in sent) == (seldom is not None, True)
    assert decode(sent) == WireSparse(7, seldom=seldom)


@pytest.mark.parametrize("name", ["needed", "unknown"])
def test_a_field_that_cannot_be_missing_is_not_sparse(name: str) -> None:
    class WireNotSparse:
        needed: int

    with pytest.raises(LocalProtocolError, match="WireNotSparse"):
        message(wire="WireNotSparse", sparse=(name,))(WireNotSparse)


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="two message classes are named WireInner"):
        message(wire="WireInner")(type("Another", (), {}))


def test_a_message_has_a_name_on_the_wire_of_its_own() -> None:
    """That of its class would change with every renaming, and the bytes with it."""
    with pytest.raises(TypeError):

        @message  # type: ignore[call-arg, arg-type]
        class WireUnnamed:
            x: int

    for wrong in ("", "two words", "0x", "a" * 65, None):
        with pytest.raises(LocalProtocolError, match="is no name of a message"):
            message(wire=wrong)  # type: ignore[arg-type]


def test_the_class_is_not_what_a_message_is_called() -> None:
    @message(wire="WireCalled")
    class WireClass:
        x: int

    payload = encode(WireClass(3))
    assert msgpack.unpackb(payload) == ["WireCalled", {"x": 3}]
    assert decode(payload) == WireClass(3)
    assert name_of(WireClass(3)) == "WireCalled"
    assert registered()["WireCalled"] is WireClass
    assert name_of("text") == "str"


def test_a_message_whose_package_is_gone_ends_its_link_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_ELSEWHERE", {})
    defined_in("atoll.peer.nowhere", {"OfNowhere"})
    payload = msgpack.packb(["OfNowhere", {}])
    with pytest.raises(RemoteProtocolError, match=r"needs atoll\.peer\.nowhere"):
        decode(payload)
