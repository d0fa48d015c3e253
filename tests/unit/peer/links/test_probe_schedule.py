"""Whom to probe, when a probe is enough, and when the coordinator is told."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.links.link_table import ROW_PAUSE_PER_MEMBER_S, ROW_PAUSE_S, ROW_S, RowTimes
from atoll.peer.links.messages import LinkRow
from atoll.peer.links.planner import GAPS_WAIT_S
from atoll.peer.links.probe_schedule import (
    DUE_S,
    FAILED_S,
    HOUR_S,
    LINK_SHARE,
    PROBE_BYTES_MAX,
    PROBE_BYTES_MIN,
    PROBE_S_MAX,
    PROBED_MAX,
    QUIET_S,
    REFUSED_S,
    ProbeSchedule,
    ProbeTurns,
    RunningProbe,
    probed_peers,
)

A, B = b"a" * 32, b"b" * 32
NEVER = math.inf
PLENTY = 1 << 40  # bytes that a round sends


def test_a_pair_that_nothing_has_measured_is_probed() -> None:
    survey = ProbeSchedule()
    assert survey.next([(A, DUE_S - 1)], PLENTY, 0.0) is None
    probe = survey.next([(A, DUE_S - 1), (B, NEVER)], PLENTY, 0.0)
    assert probe is not None
    assert (probe.peer, probe.bytes_max) == (B, PROBE_BYTES_MAX)


def test_rounds_come_first() -> None:
    survey = ProbeSchedule()
    survey.busy(10.0)
    assert survey.next([(A, NEVER)], PLENTY, 10.0 + QUIET_S - 0.01) is None
    assert survey.next([(A, NEVER)], PLENTY, 10.0 + QUIET_S) is not None


def test_after_a_refusal_it_is_another_peers_turn() -> None:
    survey, pairs = ProbeSchedule(), [(A, NEVER), (B, NEVER)]
    survey.refused(A, 0.0)
    probe = survey.next(pairs, PLENTY, 0.0)
    assert probe is not None
    assert probe.peer == B
    survey.refused(B, 0.1)
    again = survey.next(pairs, PLENTY, REFUSED_S + 0.1)
    assert again is not None
    assert again.peer == A, "it was tried longest ago"


def test_who_wants_no_probes_is_left_alone_for_an_hour() -> None:
    survey = ProbeSchedule()
    survey.refused(A, 0.0, for_long=True)
    assert survey.next([(A, NEVER)], PLENTY, HOUR_S - 1) is None
    assert survey.next([(A, NEVER)], PLENTY, HOUR_S) is not None


def test_who_has_waited_longest_is_probed_first() -> None:
    survey = ProbeSchedule()
    probe = survey.next([(A, DUE_S), (B, DUE_S + 1)], PLENTY, 0.0)
    assert probe is not None
    assert probe.peer == B


def test_what_could_not_be_probed_is_left_alone_for_a_while() -> None:
    survey = ProbeSchedule()
    survey.ended(A, 0, 0.0, failed=True)
    assert survey.next([(A, NEVER)], PLENTY, FAILED_S - 0.1) is None
    assert survey.next([(A, NEVER)], PLENTY, FAILED_S) is not None


def test_probes_take_a_twentieth_of_the_link() -> None:
    survey = ProbeSchedule()
    survey.ended(A, PROBE_BYTES_MAX, 10.0, took_s=1.0)
    free_s = 10.0 + 1.0 / LINK_SHARE - 1.0
    assert survey.next([(B, NEVER)], PLENTY, free_s - 0.1) is None
    assert survey.next([(B, NEVER)], PLENTY, free_s) is not None


def test_a_probe_that_could_find_nothing_is_not_begun() -> None:
    survey = ProbeSchedule()
    survey.ended(A, PROBE_BYTES_MAX - PROBE_BYTES_MIN, 0.0)
    assert survey.next([(A, NEVER)], PLENTY, 100.0) is not None
    survey.ended(A, 1, 100.0)
    assert survey.next([(A, NEVER)], PLENTY, 200.0) is None


class Site:
    """What decides in a peer that probes others and is probed: one probe at a time."""

    def __init__(self, me: bytes, others: list[bytes], round_bytes: int) -> None:
        self.me, self.survey, self.turns = me, ProbeSchedule(), ProbeTurns(me)
        self.round_bytes = round_bytes
        self.last_s = dict.fromkeys(probed_peers(me, others, round_bytes), -NEVER)
        self.probe: RunningProbe | None = None
        self.sent: list[tuple[float, bytes, int]] = []

    @property
    def is_done(self) -> bool:
        return -NEVER not in self.last_s.values()

    def step(self, sites: dict[bytes, Site], now_s: float, probe_s: float) -> None:
        if self.probe is not None:
            if now_s - self.probe.began_s >= probe_s:
                self._end(sites[self.probe.peer], self.probe, now_s)
            return
        if self.turns.given(now_s):
            return
        ages_s = [(peer, now_s - at_s) for peer, at_s in self.last_s.items()]
        probe = self.survey.next(ages_s, self.round_bytes, now_s)
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

    def _end(self, other: Site, probe: RunningProbe, now_s: float) -> None:
        took_s = now_s - probe.began_s
        self.survey.ended(probe.peer, probe.bytes_max, now_s, took_s=took_s)
        self.turns.ends()
        other.turns.over(self.me, now_s)
        self.last_s[probe.peer], self.probe = now_s, None
        self.sent.append((now_s, probe.peer, probe.bytes_max))


def hours(
    count: int, round_bytes: int, lasts_s: float, probe_s: float = 1.0, step_s: float = 0.25
) -> tuple[list[Site], float]:
    """So many peers for so long; and when all had probed whom they are to probe."""
    peers = [bytes([n // 256, n % 256]) * 16 for n in range(count)]
    sites = {p: Site(p, [o for o in peers if o != p], round_bytes) for p in peers}
    draw, now_s, done_s = random.Random(1), 0.0, NEVER
    while now_s < lasts_s:
        for site in draw.sample(list(sites.values()), count):
            site.step(sites, now_s, probe_s)
        if done_s == NEVER and all(site.is_done for site in sites.values()):
            done_s = now_s
        now_s += step_s if done_s == NEVER else 60.0
    return list(sites.values()), done_s


@pytest.mark.parametrize(
    ("count", "round_bytes"), [(32, 600_000), (32, 20_000_000), (256, 20_000_000)]
)
def test_what_probes_cost_grows_with_the_number_of_peers(count: int, round_bytes: int) -> None:
    """Two hours in which nothing else measures. 600 kB are the round of 435,456 parameters in int8
    that the demo has, which leaves two probes of a quarter of a megabyte."""
    sites, _ = hours(count, round_bytes, 2 * HOUR_S, step_s=1.0)
    for site in sites:
        for begin_s in (0.0, HOUR_S):
            hour = [(p, n) for at_s, p, n in site.sent if begin_s < at_s <= begin_s + HOUR_S]
            assert sum(n for _, n in hour) <= round_bytes
            assert sum(n for _, n in hour) <= PROBED_MAX * PROBE_BYTES_MAX
            assert max(Counter(p for p, _ in hour).values(), default=0) <= 1
        assert 1 <= len(site.last_s) <= PROBED_MAX
    probed = Counter(peer for site in sites for peer in site.last_s)
    assert min(probed.values()) == max(probed.values()), "everybody is probed by as many"
    in_all = sum(n for site in sites for _, _, n in site.sent)
    assert 0 < in_all <= 2 * count * min(round_bytes, PROBED_MAX * PROBE_BYTES_MAX)


@pytest.mark.parametrize(("count", "probe_s"), [(4, 1.0), (8, 1.0), (32, 0.5), (32, 1.0)])
def test_soon_everybody_has_been_probed(count: int, probe_s: float) -> None:
    """In less than a plan waits for gaps, although rounds leave probes half of the time at best."""
    _, done_s = hours(count, PLENTY, GAPS_WAIT_S, probe_s)
    assert done_s <= 0.75 * GAPS_WAIT_S


def test_what_is_broken_off_all_the_time_does_not_keep_the_others_waiting() -> None:
    survey, asked = ProbeSchedule(), []
    for n in range(4):
        probe = survey.next([(A, NEVER), (B, NEVER)], PLENTY, 10.0 * n)
        assert probe is not None
        asked.append(probe.peer)
        survey.ended(probe.peer, PROBE_BYTES_MIN, 10.0 * n)
    assert asked == [A, B, A, B]


@pytest.mark.parametrize("round_bytes", [0, 1, PROBE_BYTES_MIN - 1])
def test_rounds_that_are_smaller_than_a_probe_have_none(round_bytes: int) -> None:
    assert probed_peers(A, [B], round_bytes) == []
    assert ProbeSchedule().next([(B, NEVER)], round_bytes, 0.0) is None


@given(
    st.lists(st.tuples(st.floats(0, 600), st.integers(0, 29)), max_size=120),
    st.integers(0, 12 << 20),
)
def test_no_hour_has_more_bytes_than_it_may(
    steps: list[tuple[float, int]], round_bytes: int
) -> None:
    """However often rounds break probes off, and whoever leaves and is back."""
    survey, now_s = ProbeSchedule(), 0.0
    everybody = [bytes([n]) * 32 for n in range(30)]
    sent: list[tuple[float, bytes, int]] = []
    for pause_s, first in steps:
        now_s += pause_s
        survey.keep(everybody[first % 7 :], now_s)
        peers = probed_peers(everybody[first], everybody[first % 7 :], round_bytes)
        probe = survey.next([(peer, NEVER) for peer in peers], round_bytes, now_s)
        if probe is None:
            continue
        now_s += 1.0
        survey.ended(probe.peer, probe.bytes_max, now_s)
        sent.append((now_s, probe.peer, probe.bytes_max))
    for end_s, peer, _ in sent:
        hour = [(p, n) for at_s, p, n in sent if end_s - 3600 < at_s <= end_s]
        assert sum(n for _, n in hour) <= round_bytes
        assert sum(n for p, n in hour if p == peer) <= PROBE_BYTES_MAX


def test_a_probe_has_an_end() -> None:
    assert RunningProbe(A, 1000, 0.0).enough(1000, 0.1)
    assert RunningProbe(A, 1000, 0.0).enough(10, PROBE_S_MAX)
    assert not RunningProbe(A, 1000, 0.0).enough(999, PROBE_S_MAX - 0.1)


def test_not_everybody_begins_with_the_same_peer() -> None:
    peers = [bytes([n]) * 32 for n in (3, 1, 2, 4)]
    orders = [probed_peers(me, [p for p in peers if p != me], PLENTY) for me in peers]
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
