"""Silence becomes a suspicion after the limit, and our own pauses are nobody's silence."""

from __future__ import annotations

from atoll.peer.membership.failure_detector import FailureDetector

A, B = b"a" * 32, b"b" * 32


def test_who_is_silent_for_longer_than_the_limit_is_suspected() -> None:
    detector = FailureDetector(1.2, (A, B), 10.0)
    detector.heard(A, 11.0)
    assert not detector.suspects(A, 12.2)
    assert detector.suspects(B, 11.25)
    assert detector.silent_s(B, 11.25) == 1.25
    assert detector.last_heard_s(A) == 11.0


def test_who_was_heard_lately_is_trusted_whatever_others_say() -> None:
    detector = FailureDetector(1.0, (A,), 0.0)
    assert detector.trusts(A, 0.4)
    assert not detector.trusts(A, 0.6)
    assert not detector.suspects(A, 0.6)


def test_silence_from_before_counts_and_our_own_pause_does_not() -> None:
    detector = FailureDetector(1.0, (A, B), 10.0)
    detector.silent_since(A, 8.5)
    detector.silent_since(B, 12.0)  # later than the start: nothing was silent before
    assert detector.suspects(A, 10.0)
    assert detector.last_heard_s(B) == 10.0
    detector.discount_pause(5.0)
    assert not detector.suspects(B, 15.5)
