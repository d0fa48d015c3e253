"""How a peer that is behind reaches the group's state: what it asks for, and when it is synced."""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.membership.events import CaughtUp, Effect, Goal, StartSync, TellTrainer, Undo
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.syncing import PAUSE_MAX_S, StateSync
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import WITNESS, Member, View

ME, LEAD, OTHER, EYE = (name.encode() * 32 for name in "mloe")
LINEAGE = b"L" * 32
MEMBERS = (Member(LEAD, 1), Member(ME, 1), Member(OTHER, 1), Member(EYE, 1, WITNESS))
VIEW = View(LINEAGE, 3, MEMBERS, LEAD, 9, b"9" * 32)


def chain(number: int) -> bytes:
    return bytes([number]) * 32


class Bench:
    """A member at round 5 that has fallen behind, and the effects of its syncing."""

    def __init__(self, target: int = 9, me: Member = MEMBERS[1]) -> None:
        here = self.here = Situation(me, Timing())
        own = self.own = MemberState(me, here.emit)
        self.syncing = StateSync(here, own)
        own.round, own.chain, own.previous = 5, chain(5), (4, chain(4))
        own.fell_behind("a test")
        self.syncing.aim(target, chain(target), VIEW, anew=True)
        self.took()

    def took(self) -> list[Effect]:
        return self.here.take_effects()

    def step(self) -> list[Effect]:
        self.syncing.step()
        return self.took()

    def caught_up(self, number: int) -> list[Effect]:
        self.syncing.on_caught_up(CaughtUp(number, chain(number), b"d" * 32))
        return self.took()


GOAL = Goal(9, chain(9), LEAD, (MEMBERS[0], MEMBERS[2]))


def test_it_asks_the_replicas_once_and_anew_for_every_later_target() -> None:
    bench = Bench()
    assert bench.step() == [StartSync(GOAL)]  # neither the witness nor itself
    assert bench.step() == []
    bench.syncing.aim(8, chain(8), VIEW)  # a late word
    assert bench.step() == []
    bench.syncing.aim(10, chain(10), VIEW)
    [effect] = bench.step()
    assert isinstance(effect, StartSync)
    assert effect.goal.round == 10


def test_only_the_latest_target_makes_it_synced() -> None:
    bench = Bench()
    bench.step()
    bench.syncing.aim(10, chain(10), VIEW)
    bench.step()
    bench.caught_up(9)
    assert (bench.own.round, bench.own.unsynced) == (9, True)
    bench.caught_up(10)
    assert (bench.own.round, bench.own.unsynced) == (10, False)


def test_who_is_synced_hears_no_outcome_of_an_older_order() -> None:
    bench = Bench()
    bench.step()
    bench.caught_up(9)
    bench.caught_up(7)
    bench.syncing.on_failed("no donor")
    assert (bench.own.round, bench.own.unsynced) == (9, False)


def test_after_a_failure_it_asks_again_after_a_pause() -> None:
    bench = Bench()
    bench.step()
    bench.syncing.on_failed("no donor")
    bench.took()
    assert bench.step() == []
    bench.here.now_s += bench.here.timing.repair_s
    assert bench.step() == [StartSync(GOAL)]


def test_failures_one_after_the_other_make_the_pause_longer_up_to_a_limit() -> None:
    bench = Bench()
    bench.step()

    def pause_s() -> float:
        bench.syncing.on_failed("no donor")
        bench.took()
        begun_s = bench.here.now_s
        while not bench.step():
            bench.here.now_s += 0.5
        return bench.here.now_s - begun_s

    first_s = bench.here.timing.repair_s
    assert [pause_s() for _ in range(3)] == [first_s, 2 * first_s, 4 * first_s]
    assert [pause_s() for _ in range(20)][-1] == PAUSE_MAX_S
    bench.syncing.aim(9, chain(9), replace(VIEW, number=4))
    assert pause_s() == first_s
    bench.caught_up(8)
    assert pause_s() == first_s


def test_one_round_behind_is_a_missed_round_and_more_is_a_new_state_for_the_trainer() -> None:
    near, far = Bench(6), Bench(9)
    for bench in (near, far):
        bench.syncing._foreign = False  # a member all along
        bench.step()
    near.caught_up(6)
    assert near.own.epoch == 1
    told = [e for e in far.caught_up(9) if isinstance(e, TellTrainer)]
    assert [tell.kind for tell in told] == ["reload"]
    assert far.own.epoch == 2


def test_the_last_commit_is_undone_rather_than_fetched() -> None:
    bench = Bench(4)
    assert bench.step() == [Undo(4, chain(4))]
    bench.syncing.on_failed("not here any more")
    bench.took()
    bench.here.now_s += bench.here.timing.repair_s
    [effect] = bench.step()
    assert isinstance(effect, StartSync)  # once is enough
    bench.caught_up(4)
    assert (bench.own.round, bench.own.unsynced, bench.own.epoch) == (4, False, 2)


def test_bytes_in_doubt_are_not_trusted_for_an_undo() -> None:
    bench = Bench(4)
    bench.own.suspect = True
    [effect] = bench.step()
    assert isinstance(effect, StartSync)
    assert effect.goal.suspect


def test_a_witness_needs_no_state() -> None:
    bench = Bench(me=MEMBERS[3])
    assert bench.step() == []
    assert (bench.own.round, bench.own.unsynced) == (9, False)


def test_a_witness_that_has_caught_up_reports_no_state() -> None:
    bench = Bench(me=MEMBERS[3])
    bench.step()
    bench.syncing.on_caught_up(CaughtUp(9, chain(9), b""))
    assert (bench.own.round, bench.own.digest_round) == (9, -1)


def test_an_order_is_recalled_once_and_ends_where_it_has_come_to() -> None:
    bench = Bench()
    bench.step()
    assert not bench.syncing.recall()
    assert bench.took() == [StartSync(replace(GOAL, round=5, chain=chain(5)))]
    assert not bench.syncing.recall()
    assert bench.took() == []
    assert bench.caught_up(5) == []
    assert bench.syncing.recall(), "it is answered"
    assert (bench.own.round, bench.own.unsynced) == (5, True)


def test_what_had_arrived_before_an_order_was_recalled_counts() -> None:
    bench = Bench()
    bench.step()
    bench.syncing.recall()
    bench.took()
    told = [effect for effect in bench.caught_up(9) if isinstance(effect, TellTrainer)]
    assert told
    assert (bench.own.round, bench.own.unsynced) == (9, False)
    assert bench.syncing.recall(), "nothing is under way"


def test_who_is_synced_meanwhile_has_nothing_to_recall() -> None:
    """Ignore how that ends which is under way: it is the outcome of an older order."""
    bench = Bench()
    bench.step()
    bench.own.unsynced = False
    assert bench.syncing.recall()
    assert bench.took() == []
    assert bench.caught_up(9) == []
