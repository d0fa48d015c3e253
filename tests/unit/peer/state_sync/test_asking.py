"""How often donors are asked what they have, and what an answer without news costs."""

from __future__ import annotations

import pytest
from harness.donors import Store, donors_of, goal_of, own_of
from harness.sync_worlds import history_of

from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.machine import TICK_S, SyncMachine
from atoll.peer.state_sync.sources import SOON_DONORS, SOON_S, PieceScheduler


class Laggard:
    """One round behind, of donors that have not got there either."""

    def __init__(self, donors: int) -> None:
        self.history = history_of(5)
        self.donors = donors_of(self.history, [1000.0] * donors)
        for donor in self.donors:
            donor.round = 4
        self.machine = SyncMachine()
        self.now_s = 0.0
        self.asked = 0
        self.feed(ev.SetGoal(goal_of(self.history, self.donors), own_of(self.history, 4)))

    def feed(self, event: ev.Event) -> None:
        by_peer = {donor.member.peer: donor for donor in self.donors}
        for effect in self.machine.handle(event, self.now_s):
            if isinstance(effect, ev.SendToDonor) and isinstance(effect.message, msg.AskState):
                self.asked += 1
                answer = by_peer[effect.peer].answer(effect.message)
                self.feed(ev.DonorMessage(effect.peer, answer))
            elif isinstance(effect, ev.PrepareStore):
                own = list(self.history.states[4])
                self.feed(ev.StoreReady(Store(len(own), self.history.fragments, own)))

    def wait(self, span_s: float) -> None:
        linked = frozenset(donor.member.peer for donor in self.donors)
        for _ in range(round(span_s / TICK_S)):
            self.feed(ev.LinkedPeers(linked))
            self.now_s += TICK_S


@pytest.mark.parametrize("donors", [3, SOON_DONORS, 8, 16])
def test_who_is_behind_asks_no_more_questions_of_more_donors(donors: int) -> None:
    laggard = Laggard(donors)
    laggard.wait(10.0)
    a_second = laggard.asked / 10.0
    assert a_second <= 1.05 * (SOON_DONORS + 1) / SOON_S  # and the coordinator, as often as ever
    assert a_second >= 0.85 * min(donors, SOON_DONORS) / SOON_S, (
        "they apply a commit within moments"
    )


def test_an_answer_without_news_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    laggard = Laggard(4)
    laggard.wait(1.0)
    plans: list[float] = []
    planned = PieceScheduler.plan

    def plan(pieces: PieceScheduler, now_s: float) -> object:
        plans.append(now_s)
        return planned(pieces, now_s)

    monkeypatch.setattr(PieceScheduler, "plan", plan)
    donor = laggard.donors[0]
    same = donor.answer(msg.AskState(5))
    for _ in range(50):
        laggard.feed(ev.DonorMessage(donor.member.peer, same))
    assert not plans
    donor.round = 5
    laggard.feed(ev.DonorMessage(donor.member.peer, donor.answer(msg.AskState(5))))
    assert plans
