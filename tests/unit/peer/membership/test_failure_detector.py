"""Silence becomes a suspicion after a limit that follows what is known of the other machine."""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.membership.failure_detector import (
    LIMIT_MAX_S,
    PEAK_WINDOW_S,
    FailureDetector,
    Machines,
    Peaks,
)
from atoll.peer.membership.timing import Timing

A, B = b"a" * 32, b"b" * 32
TIMING = Timing()
SECOND = replace(TIMING, failure_s=1.0)


def test_who_is_silent_for_longer_than_the_limit_is_suspected() -> None:
    detector = FailureDetector(TIMING, (A, B), 10.0)
    detector.heard(A, 11.0)
    assert not detector.suspects(A, 12.2)
    assert detector.suspects(B, 11.25)
    assert detector.silent_s(B, 11.25) == 1.25
    assert detector.last_heard_s(A) == 11.0


def test_who_was_heard_lately_is_trusted_whatever_others_say() -> None:
    detector = FailureDetector(SECOND, (A,), 0.0)
    assert detector.trusts(A, 0.4)
    assert not detector.trusts(A, 0.6)
    assert not detector.suspects(A, 0.6)


def test_silence_from_before_counts_and_our_own_pause_does_not() -> None:
    detector = FailureDetector(SECOND, (A, B), 10.0)
    detector.silent_since(A, 8.5)
    detector.silent_since(B, 12.0)  # later than the start: nothing was silent before
    assert detector.suspects(A, 10.0)
    assert detector.last_heard_s(B) == 10.0
    detector.discount_pause(5.0)
    assert not detector.suspects(B, 15.5)


def test_who_is_forgiven_has_said_nothing() -> None:
    detector = FailureDetector(TIMING, (A,), 0.0)
    for now_s in (1.0, 2.0, 3.0):
        detector.forgive(A, now_s)
    assert detector.usual_limit_s(A, 3.0) == TIMING.failure_s
    assert detector.suspects(A, 4.3)


def test_a_process_that_is_silent_on_a_machine_that_lives_is_slow() -> None:
    machines = Machines()
    detector = FailureDetector(TIMING, (A, B), 0.0, machines)
    for now_s in (0.7, 1.2, 1.9):
        machines.answered(A, now_s)
    assert detector.suspects(B, 1.3)
    assert not detector.suspects(A, TIMING.slow_s)
    assert detector.suspects(A, TIMING.slow_s + 0.1)
    assert detector.suspects(A, 5.0)


def test_a_machine_that_has_gone_is_no_slow_process() -> None:
    machines = Machines()
    detector = FailureDetector(TIMING, (A,), 0.0, machines)
    machines.answered(A, 0.1)
    assert not detector.suspects(A, 1.3)  # it may be the network's turn yet
    assert detector.suspects(A, 1.4)


def test_the_limit_follows_gaps_that_come_again_and_again() -> None:
    detector = FailureDetector(TIMING, (A,), 0.0)
    for now_s in (2.5, 3.5, 6.0):  # stopped twice, and once for a second
        detector.heard(A, now_s)
        assert detector.usual_limit_s(A, now_s) == TIMING.failure_s
    detector.heard(A, 10.0)  # stopped for longer than anybody lacks a processor
    assert detector.usual_limit_s(A, 10.0) == TIMING.failure_s
    detector.heard(A, 11.0)
    assert detector.usual_limit_s(A, 11.0) == 4.0
    assert not detector.suspects(A, 14.9)
    assert detector.suspects(A, 15.1)
    assert detector.usual_limit_s(A, 3.0 + PEAK_WINDOW_S) == TIMING.failure_s


def test_the_limit_follows_the_lag_that_a_peer_announces_up_to_a_bound() -> None:
    machines = Machines()
    detector = FailureDetector(TIMING, (A, B), 0.0, machines)
    machines.says_lag(A, 1.5)
    assert not detector.suspects(A, 2.9)
    assert detector.suspects(A, 3.1)
    machines.says_lag(A, 50.0)
    assert detector.suspects(A, LIMIT_MAX_S + 0.1)
    for nonsense in (float("nan"), float("inf"), -1.0, 1e9):
        machines.says_lag(B, nonsense)
        assert detector.suspects(B, 1.3)
    machines.keep([B])
    assert detector.suspects(A, 1.3)


def test_kernels_are_looked_at_while_peers_say_nothing_and_not_too_often() -> None:
    detector = FailureDetector(TIMING, (A, B), 0.0)
    detector.heard(B, 0.5)
    assert detector.to_look_at(0.5) == []
    assert detector.to_look_at(0.7) == [A]
    assert detector.to_look_at(0.75) == []
    assert detector.to_look_at(0.9) == [A]


def test_peaks_keep_what_is_long_for_a_while() -> None:
    peaks = Peaks(0.3)
    assert peaks.usual_s(0.0) == 0.0
    for value_s in (0.2, 2.9, 0.1, 2.0, 3.0, 9.0):
        peaks.note(value_s, 1.0)
    assert peaks.usual_s(2.0) == 0.0
    peaks.note(1.0, 1.0)
    assert peaks.usual_s(2.0) == 1.0
    peaks.note(2.5, 1.0)
    assert peaks.usual_s(2.0) == 2.0
    assert peaks.usual_s(2.0 + PEAK_WINDOW_S) == 0.0
