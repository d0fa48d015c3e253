"""Where frames of attempts go when several rounds are under way."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from atoll.collectives import FrameKind
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.rounds.salvage import KEPT
from atoll.peer.streams import router as module
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.router import Router

LINEAGE, OTHER = b"L" * 32, b"O" * 32
A, B = b"a" * 32, b"b" * 32
WAIT_S = 30.0


class Taker:
    """In the place of a reduction and of a copy of kept chunks: remembers what came."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def reserve(self, *what: object) -> memoryview:
        self.seen.append(what)
        return memoryview(bytearray(1))

    def received(self, *what: object) -> None:
        self.seen.append(what)

    def gave_up(self, *what: object) -> None:
        self.seen.append(what)


def begin(number: int, attempt: int, view: int = 1) -> Begin:
    return Begin(LINEAGE, view, number, attempt, STEP, (A, B), (1.0, 1.0))


def expect(router: Router, opening: Begin) -> tuple[Taker, Taker]:
    reduction, kept = Taker(), Taker()
    router.expect_attempt(opening, reduction, kept)  # type: ignore[arg-type]  # fakes
    return reduction, kept


def header(number: int, attempt: int, view: int = 1, kind: int = FrameKind.CONTRIB) -> DataHeader:
    return DataHeader(kind, 0, 0, 1, LINEAGE[:8], view, number, attempt, 0)


@pytest.fixture
def router() -> Router:
    router = Router(lambda peer, why: None)
    router.enter(LINEAGE)
    return router


def test_each_round_has_its_own_attempt(router: Router) -> None:
    two, _ = expect(router, begin(2, 5))
    three, kept = expect(router, begin(3, 1))
    router.reserve(B, header(2, 5))
    router.reserve(B, header(3, 1))
    router.reserve(B, header(3, 1, kind=KEPT))
    assert (len(two.seen), len(three.seen), len(kept.seen)) == (1, 1, 1)
    assert two.seen[0][0].src == 1  # B's place among the participants
    router.end_attempt(begin(2, 4))  # an older one
    assert router.reserve(B, header(2, 5)) is not None
    router.end_attempt(begin(2, 5))
    assert router.reserve(B, header(2, 5)) is None
    assert router.reserve(B, header(3, 1)) is not None


@pytest.mark.parametrize(
    "late",
    [header(4, 2), header(4, 9, view=1), header(3, 99, view=2), header(2, 99, view=2)],
    ids=["older attempt", "older view", "round that is over", "long over"],
)
def test_what_is_over_is_dropped_at_once(
    router: Router, late: DataHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 1e6)  # else a wait would not show
    expect(router, begin(4, 3, view=2))
    router.settle(3)
    assert router.reserve(B, late) is None


def test_another_lineage_is_nobodys(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 0.0)
    expect(router, begin(2, 1))
    assert router.reserve(B, header(2, 1)._replace(lineage8=b"x" * 8)) is None


def test_a_frame_that_is_ahead_waits_for_its_begin(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", WAIT_S)
    expect(router, begin(2, 1))
    taken = threading.Event()

    def take() -> None:
        if router.reserve(B, header(3, 1)) is not None:
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    expect(router, begin(2, 2))  # not the one
    assert not taken.is_set()
    expect(router, begin(3, 1))
    assert taken.wait(WAIT_S)


def test_where_the_event_loop_is_late_a_frame_that_is_ahead_waits_longer(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_MAX_S", WAIT_S)
    expect(router, begin(2, 1))
    assert router.reserve(B, header(3, 1)) is None
    router.note_lag(WAIT_S)
    found: list[bool] = []
    taker = threading.Thread(
        target=lambda: found.append(router.reserve(B, header(3, 1)) is not None)
    )
    taker.start()
    expect(router, begin(3, 1))
    taker.join(WAIT_S)
    assert found == [True]


def test_once_begin_is_here_a_frame_waits_for_its_turn(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 0.0)  # without the promise it would be dropped
    found: list[bool] = []

    def take(number: int) -> threading.Thread:
        def run() -> None:
            found.append(router.reserve(B, header(number, 1)) is not None)

        router.promise_attempt(begin(number, 1))
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    assert router.reserve(B, header(3, 1)) is None
    waiter = take(3)
    expect(router, begin(3, 1))
    waiter.join(WAIT_S)
    assert found == [True]
    waiter = take(4)
    router.end_attempt(begin(4, 1))  # aborted before its turn
    waiter.join(WAIT_S)
    assert found == [True, False]


def test_the_end_of_an_attempt_leaves_that_of_the_next_view(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts count from one in each view; the old one ends when the new one is opened."""
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 0.0)
    expect(router, begin(3, 1, view=1))
    router.promise_attempt(begin(3, 1, view=2))
    found: list[bool] = []

    def run() -> None:
        found.append(router.reserve(B, header(3, 1, view=2)) is not None)

    waiter = threading.Thread(target=run, daemon=True)
    waiter.start()
    router.end_attempt(begin(3, 1, view=1))
    expect(router, begin(3, 1, view=2))
    waiter.join(WAIT_S)
    assert found == [True]


def test_after_a_rollback_the_same_round_counts_again(router: Router) -> None:
    router.settle(5)
    router.settle(4)
    taker, _ = expect(router, begin(5, 1, view=2))
    assert router.reserve(B, header(5, 1, view=2)) is not None
    assert taker.seen


def test_closing_lets_everyone_go(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 1e6)
    waiter = threading.Thread(target=router.reserve, args=(B, header(9, 1)), daemon=True)
    waiter.start()
    router.close()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


def test_who_takes_no_part_may_send_kept_chunks_only(router: Router) -> None:
    expect(router, begin(2, 1))
    with pytest.raises(RemoteProtocolError, match="takes no part"):
        router.reserve(b"c" * 32, header(2, 1))
    assert router.reserve(b"c" * 32, header(2, 1, kind=KEPT)) is not None


def test_a_broken_stream_reaches_all_that_wait_for_kept_chunks(router: Router) -> None:
    takers = [expect(router, begin(number, 1))[1] for number in (2, 3)]
    router.broken(B, "it ended")
    assert [taker.seen for taker in takers] == [[(B, "it ended")]] * 2


def test_whoever_gives_way_to_a_lower_view_waits_for_its_begin(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that overtakes BEGIN cannot be had again."""
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", WAIT_S)
    expect(router, begin(10, 1, view=50))
    frame = header(13, 1, view=7)._replace(lineage8=OTHER[:8])
    found: list[bool] = []

    def take() -> None:
        found.append(router.reserve(B, frame) is not None)

    early = threading.Thread(target=take, daemon=True)  # before the view is here ...
    early.start()
    router.enter(OTHER)
    late = threading.Thread(target=take, daemon=True)  # ... and after
    late.start()
    expect(router, replace(begin(13, 1, view=7), lineage=OTHER))
    for thread in (early, late):
        thread.join(WAIT_S)
    assert found == [True, True]


def test_frames_of_a_lineage_that_was_left_are_dropped_at_once(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_TIMEOUT_S", 1e6)
    monkeypatch.setattr(module, "WINDOW_TIMEOUT_S", 1e6)
    router.promise_attempt(begin(13, 1, view=50))
    router.enter(OTHER)
    assert router.reserve(B, header(13, 1, view=50)) is None
    router.enter(LINEAGE)  # and back: its numbers count from anew
    taker, _ = expect(router, begin(13, 1, view=9))
    assert router.reserve(B, header(13, 1, view=9)) is not None
    assert taker.seen
