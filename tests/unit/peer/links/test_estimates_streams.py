"""What one stream, and what several, have to say of a way that one does not fill."""

from __future__ import annotations

import pytest

from atoll.peer.links.estimates import FORGOTTEN_S, KEPT_S, PairEstimate
from atoll.peer.links.tcp_info import TcpInterval

# 1 Gbit/s over 200 ms, and what a window of 4 MiB carries there.
FAT, FAR_S = 125e6, 0.2
ONE_WINDOW = 4 * 2**20 / FAR_S
STEP_S, STEPS = 0.25, 20


class Link:
    """One pair, and a clock."""

    def __init__(self, *, rtt_s: float = FAR_S, loss: float = 0.0, bbr: bool = True) -> None:
        self.pair, self.now_s = PairEstimate(bbr=bbr), 1000.0
        self.rtt_s, self.loss = rtt_s, loss

    def carry(self, rate: float, streams: int, *, alone: bool = True, full: bool = False) -> None:
        """For five seconds, over all of these together."""
        one = STEP_S * rate / streams
        for _ in range(STEPS):
            self.now_s += STEP_S
            moved = TcpInterval(
                STEP_S,
                busy_s=STEP_S,
                delivered=one,
                sent=one,
                lost=self.loss * one,
                rate=rate / streams if full else 0.0,
                unsent=10_000,
                rtt_s=self.rtt_s,
                min_rtt_s=self.rtt_s,
            )
            self.pair.handle([moved] * streams, self.now_s, alone=alone, full=full)
        self.pair.handle([], self.now_s, alone=True, full=False)

    def probe(self, rate: float) -> None:
        self.pair.begin_probe()
        self.carry(rate, 1, full=True)
        self.pair.probed(self.now_s)

    @property
    def out(self) -> float:
        return self.pair.now(self.now_s).out


def test_one_stream_says_nothing_of_what_several_have_carried() -> None:
    link = Link()
    link.probe(0.8 * ONE_WINDOW)
    assert link.out == pytest.approx(0.8 * ONE_WINDOW)
    link.carry(FAT, 8, alone=False)  # in a round without paces
    assert link.out == pytest.approx(FAT)
    link.now_s += KEPT_S
    link.probe(0.8 * ONE_WINDOW)
    assert link.out == pytest.approx(FAT)
    assert link.pair.now(link.now_s).age_s == 0, "there is nothing more that a probe could find"


def test_what_several_have_carried_is_forgotten_when_nothing_bears_it_out() -> None:
    link = Link()
    link.carry(FAT, 8)
    link.now_s += FORGOTTEN_S
    assert link.out == 0
    link.probe(0.8 * ONE_WINDOW)
    assert link.out == pytest.approx(0.8 * ONE_WINDOW)


def test_as_many_streams_find_a_way_that_has_become_slower() -> None:
    link = Link()
    link.carry(FAT, 8)
    for streams, known in ((1, FAT), (8, FAT / 2)):
        link.now_s += KEPT_S
        link.carry(FAT / 2, streams)
        assert link.out == pytest.approx(known)


def test_where_one_stream_would_do_it_finds_a_way_that_has_become_slower() -> None:
    link = Link()
    link.carry(0.7 * ONE_WINDOW, 1)
    link.now_s += KEPT_S
    link.probe(0.3 * ONE_WINDOW)
    assert link.out == pytest.approx(0.3 * ONE_WINDOW)


@pytest.mark.parametrize("bbr", [False, True])
def test_losses_limit_a_stream_only_without_bbr(bbr: bool) -> None:
    """1 % of loss on 20 Mbit/s and 50 ms: a stream that heeds it has 3 of them."""
    rate = 2.5e6
    link = Link(rtt_s=0.05, loss=0.01, bbr=bbr)
    link.carry(rate, 8)
    link.now_s += KEPT_S
    link.probe(rate / 8)
    assert link.out == pytest.approx(rate / 8 if bbr else rate)
