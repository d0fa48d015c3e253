"""Several streams to one destination: they share its frames, and a broken one costs nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.stripes import WAIT_S, Stream, start_stripes, until

from atoll.collectives import FrameKind
from atoll.collectives.codecs import get_codec
from atoll.collectives.engine import receive, send
from atoll.collectives.engine.send import Receipt
from atoll.collectives.errors import ConnectError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.schedule.routes import Routes, ring, star, tree
from atoll.collectives.schedule.schedule import Frame

MakeGroup = Callable[..., Any]
STRIPES = 3
SOON_S = 0.04  # real links take longer; a frame that is sent again too soon does no harm
SHAPES: dict[str, Callable[[int], Routes]] = {
    "butterfly": star,
    "ring": lambda count: ring(range(count)),
    "tree": lambda count: tree(count, 2),
}


class Swallowing(Stream):
    """One whose frames wait in the kernel: after ``delivered`` it takes ``SWALLOWED`` that never
    arrive, and then breaks, or stands still until ``go_on``."""

    SWALLOWED = 4
    delivered = 0
    go_on: threading.Event | None = None

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        if self.sent < self.delivered:
            return super().send(kind, chunk, payload, offset)
        self.sent += 1
        if self.sent <= self.delivered + self.SWALLOWED:
            return lambda: False
        if self.go_on is not None:
            assert self.go_on.wait(WAIT_S)
        raise ConnectError("the cable was pulled")


@pytest.fixture(params=[256, receive.PIECE_BYTES], ids=["pieces", "whole chunks"])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (receive, send):
        monkeypatch.setattr(module, "PIECE_BYTES", request.param)
    return int(request.param)


def check_equal_and_right(group: Any) -> None:
    first = group.results[0].tobytes()
    assert all(result.tobytes() == first for result in group.results)
    assert group.failed == [[] for _ in group.everyone]
    values = np.empty(group.grid.total, np.float32)
    layout = group.reductions[0]._layout
    for chunk in range(group.grid.count):
        (lo, hi), (begin, end) = group.grid.bounds(chunk), layout.slice(chunk)
        group.codec.decode(group.results[0][begin:end], values[lo:hi])
    mean = np.mean(np.array(group.vectors, np.float64), axis=0)
    assert np.abs(values - mean).max() < {"float32": 1e-6, "int8": 0.15}[group.codec.name]


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_share_the_frames_and_each_is_sent_once(
    make_group: MakeGroup,
    shape: str,
    codec: str,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send, "LATE_S_MIN", WAIT_S)  # on a busy machine threads are late
    group = make_group(get_codec(codec), weights=[1.0] * 4, total=256 * 60, shape=SHAPES[shape](4))
    stripes = start_stripes(
        group,
        STRIPES,
        lambda src, dest, number: Stream(group, src, dest, number, slow_s=1e-4),
    )
    group.wait_done()
    check_equal_and_right(group)
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)
    chunk_bytes = get_codec(codec).encoded_bytes(256)
    assert sum(stripe.sent_bytes for stripe in stripes) == 2 * 60 * 3 * chunk_bytes
    if piece_bytes < chunk_bytes:
        assert sum(stripe.sent for stripe in stripes) > 2 * 60 * 3
    used = Counter(stripe.number for stripe in stripes if stripe.sent)
    assert len(used) == STRIPES
    assert not any(reduction.uses_result for reduction in group.reductions)


@pytest.mark.parametrize("notices", [True, False], ids=["cut", "in silence"])
@pytest.mark.parametrize("breaks_at", [1, 2, 5])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_broken_one_has_not_sent_another_sends(
    make_group: MakeGroup, shape: str, codec: str, breaks_at: int, notices: bool, piece_bytes: int
) -> None:
    """Own parts, partial sums and results; also before the other side knows that it is broken."""
    group = make_group(get_codec(codec), weights=[1.0] * 4, total=256 * 60, shape=SHAPES[shape](4))

    def make(src: int, dest: int, number: int) -> Stream:
        stripe = Stream(group, src, dest, number, breaks_at if number == 2 else 0, slow_s=1e-4)
        stripe.notices = notices
        return stripe

    start_stripes(group, STRIPES, make)
    group.wait_done()
    check_equal_and_right(group)


@pytest.mark.parametrize("delivered", [0, 2])
@pytest.mark.parametrize("hangs", [False, True], ids=["breaks", "hangs"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_one_has_taken_and_lost_another_sends(
    make_group: MakeGroup,
    shape: str,
    codec: str,
    hangs: bool,
    delivered: int,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Own parts, partial sums and results; the other side never learns of it."""
    for module, limit in (
        (send, "LATE_S_MIN"),
        (send, "DELIVERY_S"),
        (send, "POLL_S"),
    ):
        monkeypatch.setattr(module, limit, SOON_S)
    group = make_group(get_codec(codec), weights=[1.0] * 4, total=256 * 60, shape=SHAPES[shape](4))
    go_on = threading.Event()

    def make(src: int, dest: int, number: int) -> Stream:
        if number != 2 or (src and hangs):
            return Stream(group, src, dest, number, slow_s=1e-3)
        stripe = Swallowing(group, src, dest, number)
        stripe.delivered = delivered
        stripe.go_on = go_on if hangs else None
        return stripe

    stripes = start_stripes(group, STRIPES, make)
    group.wait_done()
    go_on.set()
    assert any(isinstance(stripe, Swallowing) and stripe.sent > delivered for stripe in stripes)
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)
    check_equal_and_right(group)


def test_a_round_is_done_before_anything_is_acknowledged(
    make_group: MakeGroup, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And threads, which stay until it is, end when the reduction does."""
    monkeypatch.setattr(send, "LATE_S_MIN", WAIT_S)
    group = make_group(get_codec("int8"), weights=[1.0, 1.0], total=256 * 20)

    class Unsure(Stream):
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt:
            super().send(kind, chunk, payload, offset)
            return arrived.is_set

    arrived = threading.Event()
    stripes = start_stripes(
        group, STRIPES, lambda src, dest, number: Unsure(group, src, dest, number)
    )
    group.wait_done()
    check_equal_and_right(group)
    assert not any(reduction.join(0.0) for reduction in group.reductions)
    # The last frame makes the other side's result whole before the call that brought it returns.
    until(lambda: not any(reduction.uses_result for reduction in group.reductions))
    pieces = -(-group.codec.encoded_bytes(256) // piece_bytes)
    assert sum(stripe.sent for stripe in stripes) == 2 * 20 * pieces
    arrived.set()
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)


def test_the_last_one_to_break_is_a_failure(make_group: MakeGroup, piece_bytes: int) -> None:
    group = make_group(get_codec("int8"), weights=[1.0, 1.0], total=256 * 60)
    start_stripes(
        group,
        STRIPES,
        lambda src, dest, number: Stream(group, src, dest, number, breaks_at=number),
    )
    assert group.any_failed.wait(WAIT_S)
    for me in group.everyone:
        assert all(other == 1 - me for other, _ in group.failed[me])
        assert len(group.failed[me]) <= 1


def test_the_others_go_on_while_one_stands_still(make_group: MakeGroup, piece_bytes: int) -> None:
    """What it has taken another one sends as well."""
    group = make_group(get_codec("float32"), weights=[1.0, 1.0], total=256 * 40)
    go_on = threading.Event()

    class Stuck(Stream):
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
            assert go_on.wait(WAIT_S)
            super().send(kind, chunk, payload, offset)

    start_stripes(
        group,
        STRIPES,
        lambda src, dest, n: (Stuck if n == 1 and src == 0 else Stream)(group, src, dest, n),
    )
    group.wait_done()
    assert not go_on.is_set()
    check_equal_and_right(group)
    go_on.set()
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)
    assert not any(reduction.uses_result for reduction in group.reductions)
    check_equal_and_right(group)


def test_one_that_was_slow_does_not_write_where_its_copy_is_read(
    make_group: MakeGroup, piece_bytes: int
) -> None:
    """A codec's frames lie in a buffer of the thread, which goes on with the next one."""
    group = make_group(get_codec("int8"), weights=[1.0, 1.0, 1.0], total=256 * 300)
    held = threading.Semaphore(0)

    class Slow(Stream):
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
            if self.sent % 5 == 0:
                held.acquire(timeout=0.3)
            super().send(kind, chunk, payload, offset)

    start_stripes(
        group, STRIPES, lambda src, dest, n: (Slow if n == 2 else Stream)(group, src, dest, n)
    )
    group.wait_done()
    check_equal_and_right(group)


def test_a_late_copy_of_a_result_writes_nothing(make_group: MakeGroup) -> None:
    """One stream was slow with it, and another has brought it meanwhile."""
    group = make_group(get_codec("float32"), weights=[1.0, 1.0], total=512)
    me, payload = group.reductions[0], np.ones(256, np.float32).tobytes()
    late = me.reserve(Frame(1, FrameKind.RESULT, 1, 1), 1024, WAIT_S)
    soon = me.reserve(Frame(1, FrameKind.RESULT, 1, 2), 1024, WAIT_S)
    soon[:] = payload
    me.received(Frame(1, FrameKind.RESULT, 1, 2))
    digest = group.rounds[0].digests[1]
    assert digest
    assert not me.uses_result
    late[:] = bytes(1024)
    me.received(Frame(1, FrameKind.RESULT, 1, 1))
    assert group.rounds[0].digests[1] == digest
    assert group.results[0][1024:].tobytes() == payload
    assert me.reserve(Frame(1, FrameKind.RESULT, 1, 3), 1024, WAIT_S) is None


def test_a_late_copy_of_a_part_is_not_added_again(make_group: MakeGroup) -> None:
    group = make_group(get_codec("float32"), weights=[1.0, 1.0], total=512)
    me = group.reductions[0]
    for stripe in (1, 2):
        me.reserve(Frame(1, FrameKind.CONTRIB, 0, stripe), 1024, WAIT_S)[:] = group.encoded(1, 0)
    for stripe in (2, 1):
        me.received(Frame(1, FrameKind.CONTRIB, 0, stripe))
    mean = (group.vectors[0][:256] + group.vectors[1][:256]) / 2
    np.testing.assert_allclose(group.results[0][:1024].view(np.float32), mean, rtol=1e-6)
    assert not group.failed[0]


def test_one_stream_cannot_bring_a_frame_twice_at_once(make_group: MakeGroup) -> None:
    me = make_group(get_codec("float32"), weights=[1.0, 1.0], total=512).reductions[0]
    me.reserve(Frame(1, FrameKind.CONTRIB, 0), 1024, WAIT_S)
    with pytest.raises(RemoteProtocolError, match="while the same frame arrives"):
        me.reserve(Frame(1, FrameKind.CONTRIB, 0), 1024, WAIT_S)
    me.broken_off(Frame(1, FrameKind.CONTRIB, 0))
    with pytest.raises(LocalProtocolError, match="not reserved"):
        me.received(Frame(1, FrameKind.CONTRIB, 0))
    assert me.reserve(Frame(1, FrameKind.CONTRIB, 0), 1024, WAIT_S) is not None


def test_memory_is_that_of_the_streams(make_group: MakeGroup, piece_bytes: int) -> None:
    group = make_group(get_codec("float32"), weights=[1.0] * 3, total=256 * 400)
    start_stripes(group, STRIPES)
    group.wait_done()
    for reduction in group.reductions:
        assert reduction.buffer_bytes < group.results[0].nbytes
