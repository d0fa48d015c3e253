"""The coordinator's rules for one round: commit, finish, retry, whom to exclude."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.peer.membership.attempt import REPAIRS_MAX, SPOKEN_BEATS, Attempt
from atoll.peer.membership.events import Effect, Send
from atoll.peer.membership.failure_detector import Silence
from atoll.peer.membership.link_graph import LinkGraph
from atoll.peer.membership.messages import STEP, Begin, Miss, Notice, Ready, Repair
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import WITNESS, Member, View, short

TIMING = Timing()
A, B, C, D, E = (name.encode() * 32 for name in "abcde")
ROOT, OTHER = b"1" * 32, b"2" * 32
EVERYONE = (A, B, C, D, E)


class Round:
    """An attempt of coordinator A among some of five members, and what it sends."""

    def __init__(
        self,
        *participants: bytes,
        witnesses: tuple[bytes, ...] = (),
        apart: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        members = tuple(Member(p, 1, WITNESS if p in witnesses else "replica") for p in EVERYONE)
        self.view = View(b"L" * 32, 3, members, A, 4, b"0" * 32)
        self.sent: list[Effect] = []
        weights = (1.0,) * len(participants)
        begin = Begin(b"L" * 32, 3, 5, 2, STEP, participants, weights)
        self.links = LinkGraph(apart)
        self.attempt = Attempt(self.view, A, begin, TIMING, self.sent.append, 0.0, self.links)
        self.sent.clear()

    def ready(self, *peers: bytes, root: bytes = ROOT) -> None:
        for peer in peers:
            self.attempt.on_ready(peer, Ready(b"L" * 32, 3, 5, 2, root))

    def holds(self, *peers: bytes, pending: bool, kept: bool) -> None:
        """READY of peers whose disks have it, or do not yet, or never will."""
        for peer in peers:
            said = Ready(b"L" * 32, 3, 5, 2, ROOT, pending=pending, keeps_rounds=kept)
            self.attempt.on_ready(peer, said)

    def miss(self, source: bytes, *peers: bytes) -> None:
        self.attempt.on_miss(source, Miss(b"L" * 32, 3, 5, 2, peers))

    def step(
        self,
        now_s: float,
        dead: tuple[bytes, ...] = (),
        progress_bytes: int = 0,
    ) -> tuple[bytes, ...] | None:
        alive = [p for p in EVERYONE if p not in dead]
        return self.attempt.step(now_s, alive, progress_bytes, self.links)

    def committed(self, dead: tuple[bytes, ...] = (), unsynced: tuple[bytes, ...] = ()) -> bytes:
        return self.attempt.committable(1.0, [p for p in EVERYONE if p not in dead], unsynced)

    def repaired(self) -> list[tuple[bytes, bytes]]:
        sends = [e for e in self.sent if isinstance(e, Send)]
        self.sent.clear()
        return [(s.peer, s.message.holder) for s in sends if isinstance(s.message, Repair)]


# ---------------------------------------------------------------- the commit rule


def test_begin_goes_to_everyone_in_the_view() -> None:
    sent: list[Effect] = []
    view = Round(A).view
    begin = Begin(b"L" * 32, 3, 5, 1, STEP, (A,), (1.0,))
    Attempt(view, A, begin, TIMING, sent.append, 0.0)
    assert [e.peer for e in sent if isinstance(e, Send)] == list(EVERYONE)


def test_commit_when_all_living_participants_are_ready() -> None:
    round_ = Round(*EVERYONE)
    round_.ready(A, B, C, D)
    assert round_.committed() == b""  # E lives and is not ready
    round_.ready(E)
    assert round_.committed() == ROOT


def test_no_commit_before_the_coordinator_holds_the_result() -> None:
    round_ = Round(B, C, D)
    round_.ready(B, C, D, E)
    assert round_.committed() == b""
    round_.ready(A)
    assert round_.committed() == ROOT


def test_no_commit_without_a_quorum_of_all_voters_however_many_live() -> None:
    round_ = Round(A, B)
    round_.ready(A, B)
    assert round_.committed(dead=(C, D, E)) == b""
    round_.ready(C)
    assert round_.committed(dead=(D, E)) == ROOT


def test_a_vote_of_one_that_died_since_still_counts_for_the_quorum() -> None:
    """Its promise can no longer contradict it: an incarnation votes once."""
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    assert round_.committed(dead=(C, D, E)) == ROOT


def test_what_was_in_memory_only_is_no_copy_after_a_restart() -> None:
    """It is fetched anew, also by who has said READY before; votes and files stay (seed 2594)."""
    round_ = Round(A, B)
    round_.attempt.keepers = {A, B}
    round_.holds(A, pending=False, kept=True)
    round_.holds(B, pending=True, kept=True)
    round_.holds(C, pending=False, kept=False)  # its vote, on a disk that has no room for results
    round_.attempt.restarted = {B}
    for peer in (A, B, C):
        round_.attempt.lost_memory(peer)
    assert round_.committed(dead=(D, E)) == b""
    round_.step(0.1, dead=(D, E))
    assert {peer for peer, _ in round_.repaired()} == {B, C}
    round_.holds(B, pending=False, kept=True)
    assert round_.committed(dead=(D, E)) == ROOT


def test_replicas_outside_are_waited_for_only_if_the_quorum_needs_them() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    assert round_.committed() == ROOT  # D and E live and follow by the log
    round_ = Round(A, B)
    round_.ready(A, B)
    assert round_.committed() == b""
    round_.ready(D)
    assert round_.committed() == ROOT


def test_no_commit_with_the_only_copy_while_another_replica_lives() -> None:
    """Witnesses alone would make it a quorum."""
    round_ = Round(A, witnesses=(C, D, E))
    round_.ready(A, C, D, E)
    assert round_.committed() == b""
    assert round_.committed(unsynced=(B,)) == ROOT  # nobody else can hold it
    assert round_.committed(dead=(B,)) == ROOT
    round_.ready(B)
    assert round_.committed() == ROOT


def test_a_participant_that_fell_behind_is_not_waited_for() -> None:
    round_ = Round(A, B, C, D)
    round_.ready(A, B, C)
    assert round_.committed() == b""
    assert round_.committed(unsynced=(D,)) == ROOT


def test_copies_of_the_dead_and_the_unsynced_are_no_living_copies() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    assert round_.committed(dead=(B, C), unsynced=()) == b""  # D or E has to fetch it first
    round_.ready(E)
    assert round_.committed(dead=(B, C)) == ROOT


def test_witnesses_are_asked_once_enough_copies_are_there_and_again_later() -> None:
    round_ = Round(A, B, witnesses=(D, E))

    def noticed() -> list[bytes]:
        sends = [e for e in round_.sent if isinstance(e, Send)]
        round_.sent.clear()
        return [s.peer for s in sends if isinstance(s.message, Notice) and s.message.root == ROOT]

    round_.ready(A)
    assert round_.committed() == b""
    assert noticed() == []  # one copy: a single death could take it
    round_.ready(B)
    assert round_.committed() == b""
    assert noticed() == [D, E]
    assert round_.attempt.committable(1.5, EVERYONE, ()) == b""
    assert noticed() == []
    assert round_.attempt.committable(1.0 + TIMING.repair_s, EVERYONE, ()) == b""
    assert noticed() == [D, E]  # the first was lost
    round_.ready(D)
    assert round_.committed() == ROOT


def test_what_witnesses_attest_does_not_make_a_dispute() -> None:
    """They repeat what they were told, perhaps by an older NOTICE."""
    round_ = Round(A, B, witnesses=(E,))
    round_.ready(A, B, C)
    round_.ready(E, root=OTHER)
    assert round_.step(0.1, progress_bytes=1) is None
    assert not round_.attempt.dispute
    assert round_.committed() == ROOT


def test_votes_for_another_root_do_not_count() -> None:
    round_ = Round(*EVERYONE)
    round_.ready(A, B)
    round_.ready(C, D, E, root=OTHER)
    assert round_.committed() == b""


def test_votes_of_another_attempt_are_ignored() -> None:
    round_ = Round(A, B, C)
    round_.attempt.on_ready(B, Ready(b"L" * 32, 3, 5, 1, ROOT))
    round_.attempt.on_miss(B, Miss(b"L" * 32, 3, 5, 1, (C,)))
    assert not round_.attempt.ready
    assert not round_.attempt.misses


# ---------------------------------------------------------------- different results


@pytest.mark.parametrize("wrong", [(E,), (A, B)])
def test_the_minority_is_excluded_even_if_it_is_the_coordinator(wrong: tuple[bytes, ...]) -> None:
    round_ = Round(*EVERYONE)
    round_.ready(*(p for p in EVERYONE if p not in wrong))
    round_.ready(*wrong, root=OTHER)
    assert round_.step(0.1) == tuple(p for p in EVERYONE if p not in wrong)
    assert round_.attempt.minority == set(wrong)


def test_the_first_to_speak_do_not_pass_for_all() -> None:
    round_ = Round(A, B, C)
    round_.ready(A)
    round_.ready(B, root=OTHER)
    assert round_.step(0.1, progress_bytes=1) is None
    round_.ready(C, root=OTHER)
    assert round_.step(0.2, progress_bytes=1) == (B, C)


def test_who_never_speaks_is_not_waited_for() -> None:
    round_ = Round(A, B, C)
    round_.ready(A)
    round_.ready(B, root=OTHER)
    assert round_.step(0.1, dead=(C,), progress_bytes=1) == (A, B)
    assert round_.step(TIMING.stall_s + 0.2, progress_bytes=1) == (A, B, C)
    assert not round_.attempt.minority


def test_without_a_majority_the_same_again_and_it_is_said_who_holds_what() -> None:
    round_ = Round(A, B)
    round_.ready(A)
    round_.ready(B, root=OTHER)
    assert round_.step(0.1) == (A, B)
    assert round_.attempt.dispute == (
        f"{ROOT.hex()[:16]} on {short(A)}; {OTHER.hex()[:16]} on {short(B)}"
    )


def test_outsiders_copies_are_no_votes() -> None:
    round_ = Round(A, B)
    round_.ready(A, B)
    round_.ready(C, D, E, root=OTHER)
    assert round_.step(0.1) == (A, B)
    assert round_.attempt.minority == {C, D, E}


def test_reports_of_and_about_outsiders_do_not_count() -> None:
    round_ = Round(A, B, C)
    round_.miss(D, A)
    round_.miss(B, E, b"x" * 32)
    assert round_.attempt.misses == {B: ()}
    assert round_.step(TIMING.repair_s + 0.1, progress_bytes=1) is None


# ---------------------------------------------------------------- finish or retry


def test_a_participant_dies_and_nobody_holds_the_result() -> None:
    assert Round(A, B, C).step(0.1, dead=(B,)) == (A, C)


def test_all_participants_die() -> None:
    assert Round(B, C).step(0.1, dead=(B, C)) == ()


def test_a_holder_lives_so_the_others_fetch_from_it() -> None:
    round_ = Round(A, B, C)
    round_.ready(C)
    assert round_.step(0.1, dead=(B,)) is None
    assert sorted(round_.repaired()) == [(A, C), (D, C), (E, C)]
    assert round_.step(0.2, dead=(B,)) is None
    assert round_.repaired() == []  # not twice within the repair time


def test_the_only_holder_died() -> None:
    round_ = Round(A, B, C)
    round_.ready(B)
    assert round_.step(0.1, dead=(B,)) == (A, C)


def test_repair_is_repeated_with_other_holders_and_given_up() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    holders = []
    now_s = 0.0
    for _ in range(REPAIRS_MAX):
        assert round_.step(now_s, dead=(E,)) is None
        holders += [holder for peer, holder in round_.repaired() if peer == D]
        now_s += TIMING.repair_s
        assert D not in round_.attempt.unrepairable(now_s - 0.01)
    assert len(holders) == REPAIRS_MAX
    assert set(holders) == {A, B, C}
    assert round_.attempt.unrepairable(now_s) == {D}


def test_after_a_try_in_vain_the_coordinator_hands_the_result_out() -> None:
    """Behind a partition that it bridges most others are out of reach, and nobody knows of whom."""
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    repaired = []
    for now_s in (0.0, TIMING.repair_s):
        assert round_.step(now_s) is None
        repaired.append(dict(round_.repaired()))
    assert {*repaired[0].values()} != {A}, "the work is shared at first"
    assert all(A in (repaired[0][peer], repaired[1][peer]) for peer in (D, E))


def test_a_fetch_that_moves_bytes_is_not_given_up() -> None:
    round_ = Round(A, B, C)
    round_.ready(A, B, C)
    for tick in range(100):
        assert round_.step(tick * 0.5, progress_bytes=tick) is None
    assert len(round_.repaired()) == 2  # D and E, once each
    assert round_.attempt.unrepairable(50.0) == set()


def test_no_byte_for_the_stall_time_retries() -> None:
    round_ = Round(A, B, C)
    assert round_.step(0.0, progress_bytes=1) is None
    assert round_.step(TIMING.stall_s - 0.1, progress_bytes=1) is None
    assert round_.step(TIMING.stall_s + 0.1, progress_bytes=1) == (A, B, C)


def test_the_coordinators_own_pause_is_no_stall() -> None:
    round_ = Round(A, B, C)
    assert round_.step(0.0, progress_bytes=1) is None
    round_.attempt.discount_pause(20.0)
    assert round_.step(20.5, progress_bytes=1) is None


@pytest.mark.parametrize("broken_s", [0.1, 60.0], ids=["early", "at half of a long round"])
def test_a_broken_edge_is_given_a_moment_to_show_as_a_death(broken_s: float) -> None:
    round_ = Round(A, B, C)
    assert round_.step(broken_s - 0.1, progress_bytes=0) is None
    round_.miss(B, C)
    round_.miss(C, B)
    assert round_.step(broken_s, progress_bytes=1) is None
    assert round_.step(broken_s + TIMING.repair_s / 2, progress_bytes=2) is None
    kept = round_.step(broken_s + TIMING.repair_s + 0.1, progress_bytes=3)
    assert kept is not None
    assert len(kept) == 2
    assert A in kept


def test_whom_two_others_name_is_not_waited_for() -> None:
    round_ = Round(A, B, C, D)
    round_.miss(B, C)
    assert round_.step(60.0, progress_bytes=1) is None  # either may be to blame
    round_.miss(D, C)
    assert round_.step(60.1, progress_bytes=2) == (A, B, D)


def test_a_newcomer_is_no_second_voice_against_one_who_counts() -> None:
    """Two others name C, one of whom counts for nothing: it loses nothing by saying so."""
    round_ = Round(A, B, C, D)
    round_.attempt.begin = replace(round_.attempt.begin, weights=(1.0, 1.0, 1.0, 0.0))
    round_.miss(B, C)
    round_.miss(D, C)
    assert round_.step(60.0, progress_bytes=1) is None
    round_.miss(A, C)
    assert round_.step(60.1, progress_bytes=2) is not None


def test_who_speaks_again_has_a_moment_for_its_data() -> None:
    round_ = Round(A, B, C)
    stalled_s = TIMING.stall_s + TIMING.slow_s
    assert round_.step(0.0) is None
    round_.attempt.silence = Silence(is_open=True)
    assert round_.step(stalled_s) is None
    round_.attempt.silence = Silence()
    moment_s = SPOKEN_BEATS * TIMING.heartbeat_s
    assert round_.step(stalled_s + moment_s / 2) is None
    assert round_.step(stalled_s + 1.1 * moment_s) == (A, B, C)


# ---------------------------------------------------------------- audited rounds


def test_nobodys_result_is_lent_before_most_have_verified_the_same() -> None:
    """A liar says READY at once, and that it misses somebody: nobody is told to fetch from it."""
    part = Round(A, B, C, D, E)
    part.attempt.audited = True
    part.ready(E, root=OTHER)
    part.miss(E, A)
    assert part.step(0.1) is None
    assert part.repaired() == []
    part.ready(D, root=OTHER)
    assert part.step(0.2, dead=(B,)) == (A, C, D, E)
    assert part.repaired() == []


def test_once_most_have_it_the_others_fetch_it_and_a_liar_is_left_out() -> None:
    part = Round(A, B, C, D)
    part.attempt.audited = True
    part.ready(A, B)
    assert part.step(0.1) is None
    assert part.repaired() == []
    part.ready(C)
    assert part.step(0.2, dead=(D,)) is None
    assert [peer for peer, _ in part.repaired()] == [E]
    part.ready(D, root=OTHER)
    assert part.committed() == b""
    assert part.step(0.3) == (A, B, C)


@pytest.mark.parametrize("audited", [False, True])
def test_newcomers_lend_nothing_and_leave_out_nobody_by_being_many(audited: bool) -> None:
    part = Round(*EVERYONE)
    part.attempt.begin = replace(part.attempt.begin, weights=(1.0, 1.0, 0.0, 0.0, 0.0))
    part.attempt.audited = audited
    part.ready(A)
    part.ready(C, D, E, root=OTHER)
    assert part.step(0.1) is None  # b may have theirs
    assert bool(part.attempt.copies) == (not audited)  # one of two who count
    part.ready(B)
    assert part.step(0.2) == (A, B)


# ---------------------------------------------------------------- pairs without a link


def test_a_pair_without_a_link_is_no_broken_edge() -> None:
    """They exchange nothing; what others report of either still counts."""
    round_ = Round(*EVERYONE, apart=((B, C),))
    round_.miss(B, C)
    round_.miss(C, B)
    assert round_.step(0.0) is None
    assert round_.step(2 * TIMING.repair_s, progress_bytes=1) is None
    round_.miss(B, C, D)
    round_.miss(E, D)
    assert round_.step(3 * TIMING.repair_s, progress_bytes=2) == (A, B, C, E)


def test_who_copies_the_result_is_sent_to_a_holder_it_has_a_link_to() -> None:
    round_ = Round(A, B, C, apart=((A, D), (B, D), (A, E), (B, E), (C, E)))
    round_.ready(A, B, C)
    round_.step(0.0)
    assert round_.repaired() == [(D, C)], "E has a link to nobody who holds it"
    round_.ready(D)
    round_.step(1.5 * TIMING.repair_s)
    assert round_.repaired() == [(E, D)], "but then to D"


def test_who_has_a_link_to_no_holder_is_not_waited_for() -> None:
    round_ = Round(A, B, C, D, apart=tuple((peer, E) for peer in (A, B, C, D)))
    round_.ready(A, B, C, D)
    for second in range(REPAIRS_MAX + 1):
        round_.step(float(second) * 1.1 * TIMING.repair_s)
    assert not round_.repaired()
    assert round_.committed() == ROOT


def test_who_keeps_votes_only_is_no_copy() -> None:
    """A power cut would leave a majority of votes, and the result on one disk."""
    round_ = Round((A, B, C))
    round_.attempt.keepers = {A, B}
    said = Ready(b"L" * 32, 3, 5, 2, ROOT)
    round_.attempt.on_ready(A, replace(said, keeps_rounds=True))
    for peer in (C, D, E):
        round_.attempt.on_ready(peer, said)
    round_.attempt.on_ready(B, replace(said, pending=True))
    assert round_.committed() == b""
    round_.attempt.on_ready(B, replace(said, keeps_rounds=True))
    assert round_.committed() == ROOT


def test_where_no_disk_has_room_rounds_go_on() -> None:
    round_ = Round((A, B, C))
    round_.attempt.keepers = {B}
    round_.ready(A, B, C, D)  # B's disk was full at this one
    assert round_.committed(unsynced=(E,)) == ROOT
