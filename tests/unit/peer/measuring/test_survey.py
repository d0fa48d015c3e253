"""Whom to probe, when a probe is enough, and when the coordinator is told."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.measuring.messages import LinkRow
from atoll.peer.measuring.planner import GAPS_WAIT_S
from atoll.peer.measuring.survey import (
    AGREE,
    DUE_S,
    FAILED_S,
    PAIR_HOUR_BYTES_MAX,
    PEER_HOUR_BYTES_MAX,
    PROBE_BYTES_MAX,
    PROBE_BYTES_MIN,
    PROBE_S_MAX,
    QUIET_S,
    REFUSED_S,
    ROW_PAUSE_PER_MEMBER_S,
    ROW_PAUSE_S,
    ROW_S,
    UNSURE_S,
    Probe,
    RowTimes,
    Survey,
    probing_order,
    share_bytes,
)
from atoll.peer.measuring.turns import ProbeTurns

A, B = b"a" * 32, b"b" * 32
NEVER = math.inf
FAST_PROBE_BYTES = 19 << 19  # until three windows of a fast link agree


def test_a_pair_that_nothing_has_measured_is_probed() -> None:
    survey = Survey()
    assert survey.next([(A, DUE_S - 1)], 0.0) is None
    probe = survey.next([(A, DUE_S - 1), (B, NEVER)], 0.0)
    assert probe is not None
    assert (probe.peer, probe.bytes_max) == (B, PROBE_BYTES_MAX)


def test_rounds_come_first() -> None:
    survey = Survey()
    survey.busy(10.0)
    assert survey.next([(A, NEVER)], 10.0 + QUIET_S - 0.01) is None
    assert survey.next([(A, NEVER)], 10.0 + QUIET_S) is not None


def test_after_a_refusal_it_is_another_peers_turn() -> None:
    survey, pairs = Survey(), [(A, NEVER), (B, NEVER)]
    survey.refused(A, 0.0)
    probe = survey.next(pairs, 0.0)
    assert probe is not None
    assert probe.peer == B
    survey.refused(B, 0.1)
    again = survey.next(pairs, REFUSED_S + 0.1)
    assert again is not None
    assert again.peer == A, "it was tried longest ago"


def test_who_has_waited_longest_is_probed_first() -> None:
    survey = Survey()
    probe = survey.next([(A, DUE_S), (B, DUE_S + 1)], 0.0)
    assert probe is not None
    assert probe.peer == B


def test_what_could_not_be_probed_is_left_alone_for_a_while() -> None:
    survey = Survey()
    survey.ended(A, 0, 0.0, failed=True)
    assert survey.next([(A, NEVER)], FAILED_S - 0.1) is None
    assert survey.next([(A, NEVER)], FAILED_S) is not None


def probes(rates: list[float], hours: float = 1.0, nbytes: int = 1000) -> list[float]:
    """When a pair is probed that finds these rates, one after the other and then the last one."""
    survey, now_s, found_s, age_s = Survey(), 0.0, [], NEVER
    while now_s < 3600 * hours:
        if survey.next([(A, age_s)], now_s) is not None:
            survey.ended(A, nbytes, now_s, rate=rates[min(len(found_s), len(rates) - 1)])
            found_s.append(now_s)
        now_s += 1.0
        age_s = now_s - found_s[-1]
    return found_s


def test_a_rate_that_nothing_has_confirmed_is_measured_again_soon() -> None:
    assert probes([1e6])[:3] == [0, UNSURE_S, UNSURE_S + DUE_S]
    assert probes([1e6, 0.99e6 * AGREE, 1e6])[1:3] == [UNSURE_S, UNSURE_S + DUE_S]


def test_a_measurement_that_was_disturbed_is_found_by_the_next_ones() -> None:
    assert probes([1e6, 2e6, 2e6])[:4] == [0, UNSURE_S, 3 * UNSURE_S, 3 * UNSURE_S + DUE_S]
    sure_s = UNSURE_S + DUE_S
    later = [sure_s, sure_s + UNSURE_S, sure_s + 3 * UNSURE_S, sure_s + 3 * UNSURE_S + DUE_S]
    assert probes([2e6, 2e6, 1e6, 2e6, 2e6], hours=2.0)[2:6] == later


def test_a_link_that_is_never_the_same_is_not_probed_all_the_time() -> None:
    found_s = probes([1e6 * 2 ** (n % 2) for n in range(1000)], hours=10.0)
    pauses_s = [after - before for before, after in pairwise(found_s)]
    assert pauses_s[:5] == [UNSURE_S, 2 * UNSURE_S, 4 * UNSURE_S, 8 * UNSURE_S, 16 * UNSURE_S]
    assert set(pauses_s[5:]) == {DUE_S}


def test_a_probe_that_could_find_nothing_is_not_begun() -> None:
    survey = Survey()
    survey.ended(A, PAIR_HOUR_BYTES_MAX - PROBE_BYTES_MIN, 0.0)
    assert survey.next([(A, NEVER)], 100.0) is not None
    survey.ended(A, 1, 100.0)
    assert survey.next([(A, NEVER)], 200.0) is None


def test_every_pair_of_many_fast_links_has_its_turn() -> None:
    """32 peers, of which one is looked at: each of its probes would send 9.5 MiB."""
    survey, now_s = Survey(), 0.0
    peers = [bytes([n]) * 32 for n in range(31)]
    last_s, found = dict.fromkeys(peers, -NEVER), []
    while now_s < 8 * 3600:
        probe = survey.next([(peer, now_s - last_s[peer]) for peer in peers], now_s)
        if probe is not None:
            now_s += 0.5
            survey.ended(probe.peer, min(FAST_PROBE_BYTES, probe.bytes_max), now_s, rate=1e8)
            last_s[probe.peer] = now_s
            found.append((now_s, probe.peer))
        now_s += 0.25 if probe else 10.0
    firsts = found[: len(peers)]
    assert {peer for _, peer in firsts} == set(peers), "first probes come before second ones"
    assert firsts[-1][0] < 60.0
    turns = Counter(peer for _, peer in found)
    assert min(turns.values()) >= 7, "one an hour"
    assert max(turns.values()) - min(turns.values()) <= 1


@pytest.mark.parametrize(("count", "probe_s", "known_s"), [(8, 3.0, 60.0), (32, 0.5, 60.0)])
def test_soon_all_ways_are_known(count: int, probe_s: float, known_s: float) -> None:
    """Half of what a plan waits for gaps, since rounds leave probes half of the time at best."""
    assert known_s <= GAPS_WAIT_S / 2
    peers = [bytes([n]) * 32 for n in range(count)]
    sites = {peer: Prober(peer, [p for p in peers if p != peer]) for peer in peers}
    draw, now_s = random.Random(1), 0.0
    while not all(site.is_done for site in sites.values()):
        for site in draw.sample(list(sites.values()), count):
            site.step(sites, now_s, probe_s)
        now_s += 0.25
        assert now_s < known_s


class Prober:
    """What decides in a peer that probes others and is probed: one probe at a time."""

    def __init__(self, me: bytes, others: list[bytes]) -> None:
        self.me, self.survey, self.turns = me, Survey(), ProbeTurns(me)
        self.last_s = dict.fromkeys(probing_order(me, others), -NEVER)
        self.probe: Probe | None = None

    @property
    def is_done(self) -> bool:
        return -NEVER not in self.last_s.values()

    def step(self, sites: dict[bytes, Prober], now_s: float, probe_s: float) -> None:
        if self.probe is not None:
            if now_s - self.probe.began_s >= probe_s:
                self._end(sites[self.probe.peer], self.probe, now_s)
            return
        if self.turns.given(now_s):
            return
        ages_s = [(peer, now_s - at_s) for peer, at_s in self.last_s.items()]
        probe = self.survey.next(ages_s, now_s)
        if probe is None:
            return
        other = sites[probe.peer]
        self.turns.asks()
        granted = other.turns.ask(self.me, now_s, busy=other.probe is not None)
        if granted and self.turns.begins(now_s):
            self.probe = probe
        else:
            self.turns.ends()
            self.survey.refused(probe.peer, now_s)

    def _end(self, other: Prober, probe: Probe, now_s: float) -> None:
        sent_bytes = min(FAST_PROBE_BYTES, probe.bytes_max)
        self.survey.ended(probe.peer, sent_bytes, now_s, rate=1e8)
        self.turns.ends()
        other.turns.over(self.me, now_s)
        self.last_s[probe.peer], self.probe = now_s, None


def test_what_is_broken_off_all_the_time_does_not_keep_the_others_waiting() -> None:
    survey, asked = Survey(), []
    for n in range(4):
        probe = survey.next([(A, NEVER), (B, NEVER)], 10.0 * n)
        assert probe is not None
        asked.append(probe.peer)
        survey.ended(probe.peer, PROBE_BYTES_MIN, 10.0 * n)
    assert asked == [A, B, A, B]


def test_who_comes_when_all_others_have_been_probed_is_probed_in_the_same_hour() -> None:
    survey, peers = Survey(), [bytes([n]) * 32 for n in range(31)]
    for n, peer in enumerate(peers):
        probe = survey.next([(p, NEVER if p == peer else 0.0) for p in peers], float(n))
        assert probe is not None
        assert probe.bytes_max == share_bytes(len(peers))
        survey.ended(peer, probe.bytes_max, float(n), rate=1e8)
    newcomers = [bytes([100 + n]) * 32 for n in range(8)]
    for n, peer in enumerate(newcomers):
        ages_s = [*((p, 60.0) for p in peers), (peer, NEVER)]
        probe = survey.next(ages_s, 60.0 + n)
        assert probe is not None
        assert probe.peer == peer
        survey.ended(peer, probe.bytes_max, 60.0 + n, rate=1e8)


@pytest.mark.parametrize("pairs", [1, 8, 9, 31, 128, 129, 1023])
def test_shares_of_the_hour(pairs: int) -> None:
    share = share_bytes(pairs)
    assert PROBE_BYTES_MIN <= share <= PAIR_HOUR_BYTES_MAX
    assert (share == PAIR_HOUR_BYTES_MAX) == (pairs <= 8)
    assert (pairs * share <= PEER_HOUR_BYTES_MAX) == (pairs <= 128)


@given(st.lists(st.tuples(st.floats(0, 600), st.integers(0, 29)), max_size=120))
def test_no_hour_has_more_bytes_than_it_may(steps: list[tuple[float, int]]) -> None:
    """However often rounds break probes off, and whoever leaves and is back."""
    survey, now_s = Survey(), 0.0
    peers = [bytes([n]) * 32 for n in range(30)]
    sent: list[tuple[float, bytes, int]] = []
    for pause_s, first in steps:
        now_s += pause_s
        survey.keep(peers[first % 7 :], now_s)
        order = peers[first:] + peers[:first]
        probe = survey.next([(peer, NEVER) for peer in order], now_s)
        if probe is None:
            continue
        now_s += 1.0
        survey.ended(probe.peer, probe.bytes_max, now_s)
        sent.append((now_s, probe.peer, probe.bytes_max))
    for end_s, peer, _ in sent:
        hour = [(p, n) for at_s, p, n in sent if end_s - 3600 < at_s <= end_s]
        assert sum(n for _, n in hour) <= PEER_HOUR_BYTES_MAX
        assert sum(n for p, n in hour if p == peer) <= PAIR_HOUR_BYTES_MAX


def test_a_probe_is_enough_when_windows_agree_and_the_kernel_does_not_know_better() -> None:
    def probe(*rates: float, hint: float = 0.0) -> bool:
        made = Probe(A, PROBE_BYTES_MAX, 0.0)
        return [made.enough(1, n, rate, hint, 1.0) for n, rate in enumerate(rates, 1)][-1]

    assert not probe(1e6)
    assert not probe(1e6, 1e6)
    assert probe(1e6, 1.01e6, 0.9e6)
    assert not probe(1e6, 1e6, 1e6, 2e6), "it still grows"
    assert not probe(1e6, 1e6, 1e6, hint=1.3e6), "its sender is kept from sending"


def test_a_probe_has_an_end() -> None:
    assert Probe(A, 1000, 0.0).enough(1000, 0, 0.0, 0.0, 0.1)
    assert Probe(A, 1000, 0.0).enough(10, 0, 0.0, 0.0, PROBE_S_MAX)
    assert not Probe(A, 1000, 0.0).enough(999, 0, 0.0, 0.0, PROBE_S_MAX - 0.1)


def test_samples_from_before_a_probe_are_not_its_own() -> None:
    probe = Probe(A, PROBE_BYTES_MAX, 0.0, last_samples=7)
    assert not any(probe.enough(1, 7, 1e6, 0.0, 0.1 * n) for n in range(10))


def test_not_everybody_begins_with_the_same_peer() -> None:
    peers = [bytes([n]) * 32 for n in (3, 1, 2, 4)]
    orders = [probing_order(me, [p for p in peers if p != me]) for me in peers]
    assert len({order[0] for order in orders}) == len(peers)
    assert all(len(order) == len(peers) - 1 for order in orders)


# ---------------------------------------------------------------- rows


def row(
    out: float | None = 1e6, rtt_s: float = 0.02, loss: float | None = 0.0, **totals: float
) -> LinkRow:
    return LinkRow((A, B), (0.02, rtt_s), (1e6, out), (0.0, loss), **totals)


def test_the_coordinator_is_told_what_has_changed_and_again_after_a_while() -> None:
    times, to = RowTimes(), (A, 3)
    assert times.due(row(), to, 3, 0.0)
    times.sent(row(), to, 0.0)
    assert not times.due(row(out=2e6), to, 3, ROW_PAUSE_S - 0.1), "not so soon"
    for same in (row(out=1.1e6), row(rtt_s=0.0215), row(loss=0.001)):
        assert not times.due(same, to, 3, ROW_PAUSE_S)
    for other in (
        row(out=1.3e6),
        row(out=0.7e6),
        row(out=None),
        row(rtt_s=0.03),
        row(loss=0.01),
        row(loss=None),
        row(up=1e6),
        LinkRow((A,), (0.02,), (1e6,), (0.0,)),
    ):
        assert times.due(other, to, 3, ROW_PAUSE_S)
    assert times.due(row(), (B, 4), 3, ROW_PAUSE_S), "another coordinator knows nothing"
    assert not times.due(row(), to, 3, ROW_S - 0.1)
    assert times.due(row(), to, 3, ROW_S)


def test_the_coordinator_of_many_hears_ten_rows_a_second() -> None:
    times, to = RowTimes(), (A, 3)
    times.sent(row(), to, 0.0)
    pause_s = 1024 * ROW_PAUSE_PER_MEMBER_S
    assert not times.due(row(out=9e6), to, 1024, pause_s - 0.1)
    assert times.due(row(out=9e6), to, 1024, pause_s)
