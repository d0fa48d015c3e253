"""What becomes of submissions in asynchronous runs, with a machine that is told by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from atoll.peer.daemon.trainer_async import LOOK_S, AsyncSubmissions
from atoll.peer.membership import events as ev
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import REPLICA, Member
from atoll.peer.rounds.entries import INIT, STEP

ME, OTHER = b"m" * 32, b"o" * 32


class Site:
    """A follower, the submissions that it gets, and what is said about them."""

    def __init__(self) -> None:
        self.own = MemberState(Member(ME, 1, REPLICA, ""), self._emit)
        self.own.round = 5
        self.fed: list[ev.Event] = []
        self.told: list[ev.TellTrainer] = []
        self.taken = 0
        self.trainers = AsyncSubmissions(self.own, self._feed, self._take)

    def _emit(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.TellTrainer):
            self.told.append(effect)

    def _feed(self, event: ev.Event) -> None:
        self.fed.append(event)
        if isinstance(event, ev.Attached):
            self.own.came(event.waits)
        elif isinstance(event, ev.Detached):
            self.own.detached()
        elif isinstance(event, ev.Submitted):
            self.own.submitted(event)

    def _take(self) -> None:
        self.taken += 1

    def begin(self, *participants: bytes, attempt: int = 1) -> None:
        """The next round, or another attempt at it."""
        weights = (1.0,) * len(participants)
        tag = (b"lineage", 1, self.own.round + 1, attempt)
        self.own.on_begin(Begin(*tag, STEP, participants, weights))

    def commit(self) -> None:
        number = self.own.round + 1
        self.own.on_reduced(number, self.own.begins[number].attempt, b"root")
        held = self.own.held[number]
        self.own._apply(held)

    def hear(self) -> list[str]:
        """The kinds of what the trainer hears of all that was told."""
        told, self.told = self.told, []
        return [effect.kind for effect in told if self.trainers.is_over(effect)]

    @property
    def weight(self) -> float | None:
        waiting = self.own.submissions.get(0)
        return waiting.weight if waiting else None


def site(test: Callable[[Site], Awaitable[None]]) -> Callable[[], None]:
    """In an event loop."""

    def run() -> None:
        async def body() -> None:
            here = Site()
            await test(here)
            here.trainers.close()

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def again() -> None:
    await asyncio.sleep(2 * LOOK_S)


@site
async def test_a_trainer_that_computes_is_attached_while_a_round_is_open(here: Site) -> None:
    await again()
    assert not here.own.attached
    here.begin(OTHER)
    await again()
    assert here.own.attached
    here.commit()
    await again()
    assert not here.own.attached
    assert here.fed == [ev.Attached(), ev.Attached(waits=False)]


@site
async def test_a_trainer_is_attached_while_it_waits(here: Site) -> None:
    here.trainers.submit(3.0)
    assert [type(event) for event in here.fed] == [ev.Attached, ev.Submitted]
    assert (here.own.attached, here.weight, here.taken) == (True, 3.0, 1)
    here.begin(ME)
    here.commit()
    assert here.own.attached
    assert here.hear() == ["committed"]
    assert not here.own.attached
    assert here.own.submissions == {}


@site
async def test_what_comes_in_a_round_of_others_is_for_the_next(here: Site) -> None:
    here.begin(OTHER)
    here.trainers.submit(1.0)
    assert (here.own.attached, here.weight, here.taken) == (True, None, 0)
    await again()
    assert here.weight is None
    here.commit()
    await again()
    assert (here.weight, here.taken) == (1.0, 1)
    assert here.told == []  # the machine was never asked too early
    here.begin(ME, OTHER)
    here.commit()
    assert here.hear() == ["committed"]


@site
async def test_an_attempt_that_is_over_is_no_round_of_others(here: Site) -> None:
    here.begin(OTHER)
    here.trainers.submit(1.0)
    here.own.closed.add(6)  # its coordinator has asked what is left of it
    await again()
    assert here.weight == 1.0


@site
async def test_a_begin_that_crossed_it_is_not_its_round(here: Site) -> None:
    """Nor is a retry without this peer."""
    here.trainers.submit(1.0)
    here.begin(ME, OTHER)
    here.begin(OTHER, attempt=2)
    here.commit()
    assert here.own.submissions == {}
    assert here.hear() == []
    assert (here.weight, here.taken, here.own.submissions[0].base_round) == (1.0, 2, 6)


@pytest.mark.parametrize("what", ["missed", "reload"])
def test_catching_up_and_going_back_do_not_matter(what: str) -> None:
    async def body() -> None:
        here = Site()
        here.trainers.submit(1.0)
        getattr(here.own, what)()
        assert here.weight is None
        assert here.hear() == []
        assert here.weight == 1.0
        assert here.own.submissions[0].epoch == here.own.epoch
        here.trainers.close()

    asyncio.run(body())


@site
async def test_what_was_told_earlier_does_not_count_it_twice(here: Site) -> None:
    """A reload is told also where nothing waits; the trainer submits before that is heard."""
    here.own.reload()
    here.trainers.submit(1.0)
    here.begin(ME)
    given = here.own.submissions[0]
    assert here.hear() == []
    await again()
    assert here.own.submissions[0] is given
    assert sum(isinstance(event, ev.Submitted) for event in here.fed) == 1
    here.commit()
    assert here.hear() == ["committed"]
    await again()
    assert here.own.submissions == {}


@site
async def test_what_no_round_can_use_goes_back_to_the_trainer(here: Site) -> None:
    here.trainers.submit(1.0)
    here.begin(ME, OTHER)
    here.own.unusable(6, "it has NaN in it")
    assert here.hear() == ["missed"]
    here.trainers.submit(2.0)
    assert here.weight is None
    here.commit()
    await again()
    assert here.weight == 2.0


@site
async def test_nothing_is_submitted_for_a_trainer_that_has_ended(here: Site) -> None:
    here.begin(OTHER)
    here.trainers.submit(1.0)
    here.trainers.close()
    here.commit()
    await again()
    assert here.own.submissions == {}


@site
async def test_the_first_parameters_are_not_its_round_either(here: Site) -> None:
    here.own.round = 0
    here.own.begins[1] = Begin(b"lineage", 1, 1, 1, INIT, (OTHER,), (1.0,))
    here.trainers.submit(1.0)
    assert here.weight is None
    del here.own.begins[1]
    await again()
    assert here.weight == 1.0


@pytest.mark.parametrize("what", ["missed", "reload"])
def test_what_the_log_knows_of_is_not_submitted_again(what: str) -> None:
    """It is in a round, or nobody can tell."""

    async def body() -> None:
        here = Site()
        here.trainers.submit(1.0)
        getattr(here.own, what)()
        assert all(here.trainers.is_over(effect, is_logged=True) for effect in here.told)
        await again()
        assert here.weight is None
        assert not here.own.attached
        here.trainers.close()

    asyncio.run(body())


@site
async def test_what_an_earlier_process_had_is_held_back_until_the_log_tells(here: Site) -> None:
    said: list[bool | None] = [None, None, False]
    here.trainers.submit(1.0, lambda: said.pop(0))
    await again()
    while said:
        assert here.weight is None
        assert not any(isinstance(event, ev.Submitted) for event in here.fed)
        await again()
    assert here.weight == 1.0
