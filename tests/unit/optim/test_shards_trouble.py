"""Deals among trainers of which some are out of step, new, or gone: one trainer, the rest written
down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.collectives.errors import (
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConnectError,
    RoundTimeoutError,
)
from atoll.data import Shards
from atoll.optim import shards as shards_module
from atoll.optim.deck import Deal, Deck, HandReport, Seat, advance
from atoll.optim.every_step.gather import HEAD
from atoll.optim.shards import PURPOSE, packed
from atoll.peer.client.trainer_channel import Members

DECK = Deck(100, 1, 0, 0)
Given = Callable[[HandReport], "dict[str, HandReport]"]


class Vector:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def wait(self, timeout_s: float) -> None:
        """It is here."""

    def read(self) -> np.ndarray:
        return self._values

    def drop(self) -> None:
        """Nothing is kept."""


class Script:
    """A session called "me"; ``gathers``: what each comes to, an error or reports of others."""

    peer_name, run, round = "me", "run", 0

    def __init__(self, *gathers: Exception | Given) -> None:
        self.gathers = list(gathers)
        self.published: dict[str, Deal] = {}
        self.told: list[HandReport] = []

    @property
    def channel(self) -> Script:
        return self

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        mine = HandReport.from_bytes("me", data[HEAD.size :], DECK)
        self.told.append(mine)
        found = self.gathers.pop(0)
        if isinstance(found, Exception):
            raise found
        others = {n: r.to_bytes(DECK) for n, r in found(mine).items()}
        head = HEAD.pack(PURPOSE, 0, 1)
        return [("me", data), *((name, head + text) for name, text in others.items())]

    def members(self) -> Members:
        return Members(1, ("me", *self.published))

    def newest(self, peer: str, name: str) -> int:
        if peer not in self.published:
            raise ConnectError("it has gone")
        return self.published[peer].number

    def ask_vector(self, peer: str, name: str, number: int, *_: Any) -> Vector:
        self.newest(peer, name)
        return Vector(packed(self.published[peer]))

    def publish(self, name: str, number: int, values: np.ndarray, codec: str) -> None:
        self.published["me"] = shards_module.unpacked(values)


def nobody(mine: HandReport) -> dict[str, HandReport]:
    return {}


def drawn(shards: Shards, count: int) -> list[int]:
    spans = [shards.draw(1) for _ in range(count)]
    return [span[0] for span in spans if span is not None]


def test_the_first_of_all_asks_whether_there_is_a_deal_and_begins() -> None:
    session = Script(nobody, nobody)
    shards = Shards(100, session)
    assert drawn(shards, 3) == [0, 1, 2]
    assert [report.looked for report in session.told] == [False, True]
    assert session.published["me"].number == 1


def test_a_newcomer_waits_for_the_others_and_takes_their_deal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = Deal(4, 9, 50, (), (Seat("other", 4),))
    theirs = HandReport(4, others.digest, True, 1, 5, 6)

    def gathered(mine: HandReport) -> dict[str, HandReport]:
        told = {"me": mine, "other": theirs}
        session.published["other"], _ = advance(DECK, others, told)
        return {"other": theirs}

    session = Script(CollectiveMismatchError("a step"), CollectiveMissedError("late"), gathered)
    shards = Shards(100, session)
    assert drawn(shards, 2) == [56, 58]  # the other keeps 55, and has every second one
    assert shards.deals == 5
    assert capsys.readouterr().err.count("waits for the others' next round") == 1


def test_newcomers_among_themselves_take_the_last_deal_that_there_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trainers seem to be dead; they are given time, and what they had drawn is kept."""
    monkeypatch.setattr(shards_module, "PAUSES_S", (0.0,))
    session = Script(*[nobody] * 5)
    session.published["other"] = Deal(4, 3, 50, (), (Seat("other", 4, ((40, 42),)),))
    shards = Shards(100, session)
    assert drawn(shards, 1) == [56]
    assert [report.tries for report in session.told] == [0, 0, 1, 2, 3]
    seat = shards._deal.seat_of("other")
    assert seat is not None
    assert seat.kept == ((40, 42), (50, 56))
    assert "they may be dead" in capsys.readouterr().err


def test_where_the_others_do_something_else_it_goes_on_with_its_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Script(nobody, nobody, *[CollectiveMismatchError("a sum")] * 3)
    shards = Shards(100, session)
    first = drawn(shards, 3)
    shards.deal()
    assert first + drawn(shards, 2) == [0, 1, 2, 3, 4]
    assert shards.deals == 1
    assert "no deal of samples this time" in capsys.readouterr().err


def test_a_deal_that_was_made_while_the_daemon_was_started_again_is_taken() -> None:
    session = Script(nobody, nobody, CollectiveLostError("its daemon has ended"))
    shards = Shards(100, session)
    assert drawn(shards, 3) == [0, 1, 2]
    made, _ = advance(DECK, shards._deal, {"me": HandReport(1, "", True, 1, 3, 3)})
    session.published["other"] = made
    shards.deal()
    assert shards.deals == 2
    assert drawn(shards, 1) == [3]


def test_who_has_missed_two_deals_says_what_that_has_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gathered(mine: HandReport) -> dict[str, HandReport]:
        new = Deal(9, 3, 80, (), (Seat("other", 9), Seat("me", 9)))
        session.published["other"] = new
        return {"other": HandReport(8, "x", True, 1)}

    session = Script(nobody, nobody, gathered)
    shards = Shards(100, session)
    drawn(shards, 3)
    shards.deal()
    assert drawn(shards, 1) == [81]
    err = capsys.readouterr().err
    assert "3 samples that this trainer has used" in err
    assert "7 deals without it" in err


def test_a_long_wait_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    session = Script(nobody, RoundTimeoutError("no commit for 600 s"), nobody)
    assert drawn(Shards(100, session), 1) == [0]
    assert "still waits for samples to draw: no commit for 600 s" in capsys.readouterr().err
    with pytest.raises(RoundTimeoutError):
        Shards(100, Script(RoundTimeoutError("no commit"))).deal()
