"""The coordinator's rules for an all-reduce of trainers' own vectors: who holds, who attests."""

from __future__ import annotations

from atoll.peer.membership.attempt import Attempt
from atoll.peer.membership.events import Effect, Send
from atoll.peer.membership.link_graph import LinkGraph
from atoll.peer.membership.messages import GATHER, REDUCE, Begin, Notice, Ready, Repair
from atoll.peer.membership.operations import Operation, pack_objects
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import WITNESS, Member, View

TIMING = Timing()
A, B, C, D, E = EVERYONE = tuple(name.encode() * 32 for name in "abcde")
ROOT = b"1" * 32
SUM, GATHERS = Operation(REDUCE, 1000, "sum", "float32"), Operation(GATHER)


class Round:
    """An attempt of a coordinator among some of five members, and what it sends."""

    def __init__(self, *participants: bytes, lead: bytes = A, witness: bytes = b"") -> None:
        members = tuple(Member(p, 1, WITNESS if p == witness else "replica") for p in EVERYONE)
        view = View(b"L" * 32, 3, members, lead, 4, b"0" * 32)
        self.sent: list[Effect] = []
        weights = (1.0,) * len(participants)
        begin = Begin(b"L" * 32, 3, 5, 2, REDUCE, participants, weights, operation=SUM)
        self.attempt = Attempt(view, lead, begin, TIMING, self.sent.append, 0.0)
        self.sent.clear()

    def ready(self, *peers: bytes) -> None:
        for peer in peers:
            self.attempt.on_ready(peer, Ready(b"L" * 32, 3, 5, 2, ROOT))

    def committed(
        self, *dead: bytes, training: tuple[bytes, ...] = (), now_s: float = 1.0
    ) -> bytes:
        alive = [p for p in EVERYONE if p not in dead]
        return self.attempt.committable(now_s, alive, (), training)

    def noticed(self) -> set[bytes]:
        sends = [e for e in self.sent if isinstance(e, Send)]
        return {s.peer for s in sends if isinstance(s.message, Notice)}


def test_all_living_participants_hold_it_and_a_quorum_agrees() -> None:
    round_ = Round(A, B)
    round_.ready(A)
    assert round_.committed() == b""
    assert not round_.noticed()  # there may be another result yet
    round_.ready(B)
    assert round_.committed() == b""
    assert round_.noticed() == {C, D, E}
    round_.ready(D)
    assert round_.committed() == ROOT


def test_one_copy_is_enough_where_one_trainer_wants_it() -> None:
    """It is no state: of a step two replicas have to hold the result."""
    round_ = Round(A)
    round_.ready(A, C, D)
    assert round_.committed() == ROOT


def test_others_are_told_before_the_commit_also_where_they_are_not_needed() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    assert round_.committed() == ROOT
    assert round_.noticed() == {D, E}


def test_who_trains_is_given_a_moment_to_attest() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    assert round_.committed(training=(D,)) == b""
    round_.ready(D)
    assert round_.committed(training=(D,)) == ROOT
    late = Round(A, B, C)
    late.ready(A, B, C)
    assert late.committed(training=(D,)) == b""
    assert late.committed(training=(D,), now_s=1.0 + TIMING.grace_s) == ROOT


def test_a_coordinator_that_is_not_in_it_attests_first() -> None:
    """Else its own commit would leave it behind."""
    round_ = Round(B, C, D, lead=A)
    round_.ready(B, C, D)
    assert round_.committed() == b""
    assert A in round_.noticed()
    round_.ready(A)
    assert round_.committed() == ROOT


def test_a_witness_that_coordinates_holds_nothing_and_need_not_attest() -> None:
    round_ = Round(B, C, lead=A, witness=A)
    round_.ready(B, C, D)
    assert round_.committed() == ROOT


def test_what_attesters_say_is_no_copy() -> None:
    round_ = Round(A, B)
    round_.ready(A, C, D, E)
    assert round_.committed() == b""
    assert round_.committed(B) == ROOT  # it has died: A alone wants it now


def test_nobody_else_is_told_to_fetch_it() -> None:
    round_ = Round(A, B)
    round_.ready(A)
    step = round_.attempt.step(0.5, [A, C, D, E], 0, LinkGraph())  # B has died; A holds it
    assert step is None
    assert not [e for e in round_.sent if isinstance(e, Send) and isinstance(e.message, Repair)]


def test_a_long_begin_is_not_repeated_while_it_may_be_on_its_way() -> None:
    view = Round(A, B).attempt.view
    sent: list[Effect] = []
    blob = pack_objects([bytes(65_000)] * 4)
    begin = Begin(b"L" * 32, 3, 5, 2, GATHER, (A, B, C, D), (1.0,) * 4, blob, operation=GATHERS)
    attempt = Attempt(view, A, begin, TIMING, sent.append, 0.0)
    sent.clear()
    times = [tick / 4 for tick in range(1, 41)]  # as heartbeats come
    said = []
    for now_s in times:
        attempt.repeat(B, now_s)
        said += [now_s] * len(sent)
        sent.clear()
    assert said == [2.0, 4.0, 6.0, 8.0, 10.0]  # 260 kB at 1 Mbit/s
    short = Round(A, B)
    short.attempt.repeat(B, 0.01)
    short.attempt.repeat(B, 0.02)
    assert len(short.sent) == 2
