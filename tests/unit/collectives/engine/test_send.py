"""Which of several streams sends what, and what has to be sent again; without streams."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from atoll.collectives.engine import send
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.send import DELIVERY_S, LATE_S_MIN, Receipt, Sending, Stripes
from atoll.collectives.schedule.schedule import FrameKind, Idle, OutgoingFrame

DEST = 1
PAYLOAD = np.zeros(4, np.uint8)


class Given:
    """A schedule that hands out chunks 0, 1, 2 ... to everyone; the stripes ask it nothing else."""

    def __init__(self, count: int) -> None:
        self.left = [OutgoingFrame(FrameKind.CONTRIB, chunk) for chunk in range(count)]

    def next_send(self, dest: int, unsure: Collection[int]) -> OutgoingFrame | Idle:
        return self.left.pop(0) if self.left else Idle.DONE


class Wire:
    """A stream and what its receipts say: the first ``arrived`` frames have."""

    def __init__(self, stripes: Stripes) -> None:
        self.stripes, self.stripe = stripes, stripes.opened(DEST)
        self.sent = self.arrived = 0

    def take(self, now_s: float) -> Sending:
        """What it sends next, loaded."""
        found = self.stripes.take(self.stripe, now_s)
        assert isinstance(found, Sending)
        if found.payload is None:
            self.stripes.loaded(DEST, found, PAYLOAD, np.empty(4, np.uint8))
        return found

    def is_idle(self, now_s: float) -> bool:
        return self.stripes.take(self.stripe, now_s) is Idle.DONE

    def receipt(self) -> Receipt:
        self.sent += 1
        number = self.sent
        return lambda: self.arrived >= number

    def send(self, now_s: float) -> Sending:
        found = self.take(now_s)
        self.stripes.note_sent(self.stripe, found, now_s, self.receipt())
        return found


def stripes_of(count: int, chunks: int, chunk_bytes: int = 4) -> tuple[Stripes, Any, list[Wire]]:
    buffers = BufferPool(chunk_bytes, np.uint8)
    stripes = Stripes(Given(chunks), buffers)  # type: ignore[arg-type]  # what it asks is there
    return stripes, buffers, [Wire(stripes) for _ in range(count)]


# ---------------------------------------------------------------- in hand


def test_what_stands_still_is_copied_once_and_by_who_is_idle() -> None:
    stripes, buffers, (a, b) = stripes_of(2, 2)
    quick = a.take(0.0)
    stripes.note_sent(a.stripe, quick, 0.1, None)
    stuck = stripes.take(a.stripe, 1.0)
    assert isinstance(stuck, Sending)
    assert stripes.take(b.stripe, 9.0) is Idle.WAIT  # it is not loaded yet
    stripes.loaded(DEST, stuck, PAYLOAD, buffers.take())
    assert b.is_idle(1.39)
    assert b.take(1.41) is stuck
    assert not stripes.is_over(DEST, 1.5)
    stripes.note_sent(b.stripe, stuck, 1.5, None)
    assert stripes.is_over(DEST, 1.5)
    assert stripes.broke(a.stripe, stuck)
    assert b.is_idle(9.0)  # the copy has brought it


def test_the_buffer_of_a_chunk_is_free_when_all_is_delivered_and_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", 4)
    stripes, buffers, (a, b, c) = stripes_of(3, 1, 8)
    first = stripes.take(a.stripe, 0.0)
    assert isinstance(first, Sending)
    assert stripes.take(b.stripe, 0.0) is Idle.WAIT
    chunk = buffers.take()
    assert stripes.loaded(DEST, first, chunk, chunk)
    second = b.take(0.0)
    assert second.offset == 4
    assert c.is_idle(0.0)
    assert [c.send(9.0), c.send(9.0)] == [first, second]
    stripes.note_sent(b.stripe, second, 9.1, b.receipt())
    c.arrived = 2
    assert stripes.is_over(DEST, 9.2)
    assert buffers.take() is not chunk  # the first stream still reads from it
    assert stripes.broke(a.stripe, first)
    assert b.is_idle(9.3)  # it was brought: nobody sends it again
    assert buffers.take() is chunk


def test_a_part_that_is_read_where_it_lies_takes_no_buffer() -> None:
    stripes, buffers, (a, _) = stripes_of(2, 1)
    sending = stripes.take(a.stripe, 0.0)
    assert isinstance(sending, Sending)
    assert not stripes.loaded(DEST, sending, PAYLOAD, buffers.take())


# ---------------------------------------------------------------- sent, and perhaps lost


def test_what_a_broken_one_has_not_delivered_goes_first_and_once() -> None:
    stripes, _, (a, b, c) = stripes_of(3, 9)
    frames = [a.send(0.0) for _ in range(3)]
    a.arrived = 1
    frames.append(a.send(0.1))
    in_hand = a.take(0.2)
    assert stripes.broke(a.stripe, in_hand)
    again = [b.send(0.3), c.send(0.3), c.send(0.3)]
    assert again == frames[1:]
    assert stripes.broke(b.stripe, b.take(0.4))
    assert [c.take(0.5), c.take(0.5)] == [frames[1], in_hand]  # b had one from a, and took one


def test_what_another_stream_has_as_well_is_not_sent_a_third_time() -> None:
    stripes, _, (a, b, c) = stripes_of(3, 2)
    stuck = a.take(0.0)
    b.send(0.0)
    b.arrived = 1
    assert b.take(1.0) is stuck
    stripes.note_sent(b.stripe, stuck, 1.0, b.receipt())
    assert stripes.broke(a.stripe, stuck)
    assert c.is_idle(1.1)
    b.arrived = 2
    assert stripes.is_over(DEST, 1.2)


def test_without_a_receipt_a_frame_that_is_sent_is_forgotten() -> None:
    stripes, _, (a, b) = stripes_of(2, 2)
    stripes.note_sent(a.stripe, a.take(0.0), 0.1, None)
    assert stripes.is_over(DEST, 0.1)
    in_hand = a.take(0.2)
    assert stripes.broke(a.stripe, in_hand)
    assert b.take(0.3) is in_hand
    assert b.is_idle(9.0)


def test_one_alone_keeps_nothing_unless_others_are_to_come() -> None:
    for expected, over in ((1, True), (2, False)):
        stripes = Stripes(Given(1), BufferPool(4, np.uint8))  # type: ignore[arg-type]
        stripes.expect({DEST: expected})
        Wire(stripes).send(0.0)
        assert stripes.is_over(DEST, 0.0) is over


def test_the_last_one_waits_for_no_receipt() -> None:
    stripes, _, (a, b) = stripes_of(2, 2)
    b.send(0.0)
    assert not stripes.is_over(DEST, 0.0)
    in_hand = a.take(0.0)
    assert stripes.broke(a.stripe, in_hand)
    assert b.send(0.1) is in_hand
    assert stripes.is_over(DEST, 0.1)


@pytest.fixture
def lost() -> tuple[Stripes, list[Wire], list[Sending]]:
    """Of three streams, one that has sent three frames and delivered one; frames take 0.1 s."""
    stripes, _, wires = stripes_of(3, 5)
    frames = [wires[0].send(0.0) for _ in range(3)]
    for wire in wires[1:]:
        wire.send(0.0)
    for wire in wires:
        wire.arrived = 1
    assert not stripes.is_over(DEST, 0.1)
    return stripes, wires, frames


LATE_S = 0.1 + 0.1 + LATE_S_MIN  # when something was delivered last, and the limit


def test_what_one_has_lost_another_sends_when_nothing_was_delivered_for_long(
    lost: tuple[Stripes, list[Wire], list[Sending]],
) -> None:
    stripes, (a, b, c), frames = lost
    assert b.is_idle(LATE_S - 0.01)
    assert b.send(LATE_S + 0.01) is frames[1]
    assert c.send(LATE_S + 0.01) is frames[2]
    assert a.is_idle(LATE_S + 0.02)  # it has them already
    b.arrived = c.arrived = 2
    assert stripes.is_over(DEST, LATE_S + 0.1)
    in_hand = Sending(OutgoingFrame(FrameKind.CONTRIB, 9), PAYLOAD, in_hand=1)
    assert stripes.broke(a.stripe, in_hand)
    assert b.send(LATE_S + 0.2) is in_hand
    assert b.is_idle(9.0)


def test_one_that_goes_on_delivering_is_not_late(
    lost: tuple[Stripes, list[Wire], list[Sending]],
) -> None:
    _, (a, b, _), frames = lost
    a.arrived = 2
    assert b.is_idle(LATE_S + 0.01)  # which is when this is seen
    assert b.is_idle(2 * LATE_S - 0.11)
    assert b.send(2 * LATE_S) is frames[2]


def test_one_that_stands_still_itself_takes_no_copies(
    lost: tuple[Stripes, list[Wire], list[Sending]],
) -> None:
    _, (a, b, c), frames = lost
    assert b.send(LATE_S + 0.01) is frames[1]
    assert c.send(LATE_S + 0.01) is frames[2]
    late_s = 2 * LATE_S + 0.1
    assert [wire.is_idle(late_s) for wire in (a, b, c)] == [True] * 3
    c.arrived = 2
    assert c.send(late_s + 0.1) is frames[1]


def test_before_anything_was_delivered_the_way_may_be_long() -> None:
    _, _, (a, b) = stripes_of(2, 1)
    frame = a.send(0.0)
    assert b.is_idle(DELIVERY_S + LATE_S_MIN)
    assert b.send(DELIVERY_S + LATE_S_MIN + 0.01) is frame


def test_how_long_it_is_the_quickest_delivery_tells() -> None:
    stripes, _, (a, b) = stripes_of(2, 3)
    b.send(0.0)
    b.arrived = 1
    assert stripes.is_over(DEST, 0.4)
    b.send(1.0)
    b.arrived = 2
    assert stripes.is_over(DEST, 9.0)
    frame = a.send(9.0)
    assert b.is_idle(9.0 + 0.4 + LATE_S_MIN - 0.01)
    assert b.send(9.0 + 0.4 + LATE_S_MIN + 0.01) is frame
