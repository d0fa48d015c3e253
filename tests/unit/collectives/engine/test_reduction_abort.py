"""Reductions that do not come to their end: no thread, no wait and no memory is left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs import U8, Int8Codec, get_codec
from atoll.collectives.errors import ConnectError
from atoll.collectives.schedule.schedule import Frame, FrameKind

INT8 = get_codec("int8")
WINDOW_CHUNKS = 4  # twice the lead, which is a quarter of ten chunks
WAIT_S = 30.0
MakeGroup = Callable[..., Any]


class Death:
    """A gate that breaks all streams of ``victim`` at the ``step``-th frame of the group."""

    def __init__(self, victim: int, step: int) -> None:
        self.victim, self.step = victim, step
        self.frames = 0
        self.lock = threading.Lock()
        self.happened = threading.Event()

    def __call__(self, src: int, dest: int) -> None:
        with self.lock:
            self.frames += 1
            if self.frames >= self.step:
                self.happened.set()
        if self.happened.is_set() and self.victim in (src, dest):
            raise ConnectError(f"peer {self.victim} is gone")


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(peers=st.integers(2, 5), step=st.integers(1, 120), data=st.data())
def test_death_at_any_step_leaves_no_thread_and_the_survivors_finish_again(
    make_group: MakeGroup, streams: str, peers: int, step: int, data: st.DataObject
) -> None:
    victim = data.draw(st.integers(0, peers - 1))
    group = make_group(INT8, weights=[1.0] * peers, total=256 * 20)
    group.gate = death = Death(victim, step)
    frames = 2 * 20 * (peers - 1)  # each chunk: all others send a part, and get the result
    group.start(streams)
    if step <= frames:
        assert death.happened.wait(WAIT_S)
    else:
        group.wait_done()
    group.close()  # aborts, joins, and asserts that every thread has ended
    for me in group.everyone:
        blamed = {participant for participant, _ in group.failed[me]}
        assert blamed <= ({victim} if me != victim else set(group.everyone) - {victim})

    again = make_group(INT8, weights=[1.0] * (peers - 1), total=256 * 20)
    again.start(streams)
    again.wait_done()
    again.check_results()


def test_survivors_go_on_with_each_other_until_the_abort(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0, 0.0], total=256 * 30)
    group.gate = Death(victim=2, step=1)  # it contributes nothing, so only its own part is lost
    group.start()
    # Both first: what one lacks may still be in a thread of the other.
    assert all(group.reductions[me].join(WAIT_S) for me in (0, 1))
    assert [group.reductions[me].missing() for me in (0, 1)] == [{2}, {2}]
    finals = [bool(digest) for digest in group.rounds[0].digests]
    assert finals == [owner != 2 for owner in group.plan.owners]


def test_abort_wakes_a_blocked_reserve(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0, 1.0], total=256 * 30)
    reduction = group.reductions[0]  # the parts of participant 2 never come
    for chunk in range(WINDOW_CHUNKS):
        assert group.deliver(1, 0, FrameKind.CONTRIB, chunk, group.encoded(1, chunk))
    wanted: list[bool] = []
    begun = threading.Event()

    def deliver_ahead() -> None:
        begun.set()
        payload = group.encoded(1, WINDOW_CHUNKS)
        wanted.append(group.deliver(1, 0, FrameKind.CONTRIB, WINDOW_CHUNKS, payload))

    thread = threading.Thread(target=deliver_ahead)
    thread.start()
    assert begun.wait(WAIT_S)
    reduction.abort()
    thread.join(WAIT_S)
    assert wanted == [False]


def test_nothing_is_written_or_called_after_abort(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0], total=256 * 2)
    reduction = group.reductions[0]
    payload = group.encoded(1, 1)
    buffer = reduction.reserve(Frame(1, FrameKind.RESULT, 1), len(payload), WAIT_S)
    reduction.abort()
    reduction.abort()
    buffer[:] = payload
    reduction.received(Frame(1, FrameKind.RESULT, 1))
    reduction.start({1: None})
    assert reduction.join(WAIT_S)
    assert reduction.reserve(Frame(1, FrameKind.CONTRIB, 0), 260, WAIT_S) is None
    assert not any(group.rounds[0].digests)
    assert (group.done[0], group.failed[0]) == ([], [])


@pytest.mark.parametrize("kind", [FrameKind.CONTRIB, FrameKind.RESULT])
def test_abort_in_the_middle_of_the_arithmetic_makes_no_chunk_final(
    make_group: MakeGroup, kind: FrameKind
) -> None:
    class AbortingCodec(Int8Codec):
        def check(self, data: U8, count: int) -> None:
            super().check(data, count)  # comes before each decode_add and each stored result
            group.reductions[0].abort()

    group = make_group(AbortingCodec(), weights=[0.0, 1.0], total=256 * 2)
    assert group.deliver(1, 0, kind, int(kind is FrameKind.RESULT), group.encoded(1, 0))
    assert not any(group.rounds[0].digests)
    assert (group.done[0], group.failed[0]) == ([], [])
    assert not group.reductions[0].uses_result


def test_a_frame_that_arrives_after_the_abort_keeps_the_result_in_use(
    make_group: MakeGroup,
) -> None:
    """Its thread fills a chunk that is not final: whoever goes on writes elsewhere."""
    group = make_group(INT8, weights=[1.0, 1.0], total=256 * 2)
    reduction = group.reductions[0]
    buffer = reduction.reserve(Frame(1, FrameKind.RESULT, 1), 260, WAIT_S)
    reduction.abort()
    assert reduction.uses_result
    buffer[:] = group.encoded(1, 1)
    reduction.received(Frame(1, FrameKind.RESULT, 1))
    assert not reduction.uses_result


def test_abort_and_join_inside_a_callback(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0])
    joined: list[bool] = []
    finished = threading.Event()

    def on_done(digests: list[bytes]) -> None:
        group.reductions[0].abort()
        joined.append(group.reductions[0].join(WAIT_S))
        finished.set()

    group.reductions[0]._control.on_done = on_done
    group.start()
    assert finished.wait(WAIT_S)
    assert joined == [True]


def test_join_says_when_a_send_still_blocks(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0])
    entered, released = threading.Event(), threading.Event()

    def stuck(src: int, dest: int) -> None:
        entered.set()
        released.wait(WAIT_S)

    group.gate = stuck
    group.start()
    assert entered.wait(WAIT_S)
    for reduction in group.reductions:
        reduction.abort()
    assert not all(reduction.join(0.0) for reduction in group.reductions)
    released.set()
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)


def test_a_stream_that_the_abort_closes_blames_nobody(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0])
    entered, closed = threading.Event(), threading.Event()

    def closed_under_the_send(src: int, dest: int) -> None:
        entered.set()
        assert closed.wait(WAIT_S)
        raise ConnectError("closed by the abort")

    group.gate = closed_under_the_send
    group.start()
    assert entered.wait(WAIT_S)
    for reduction in group.reductions:
        reduction.abort()
    closed.set()
    assert all(reduction.join(WAIT_S) for reduction in group.reductions)
    assert group.failed == [[], []]


def test_three_hundred_aborted_reductions_leave_nothing(make_group: MakeGroup) -> None:
    left: list[weakref.ref[Any]] = []
    for step in range(100):
        group = make_group(INT8, weights=[1.0] * 3, total=256 * 12)
        group.gate = Death(victim=step % 3, step=1 + step % 40)
        group.start()
        assert group.gate.happened.wait(WAIT_S)
        group.close()
        left += (weakref.ref(reduction) for reduction in group.reductions)
        group.reductions.clear()
    gc.collect()
    assert [reference for reference in left if reference() is not None] == []
