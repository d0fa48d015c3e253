"""Every duration of the membership protocol in one place, in seconds.

The defaults come from design/membership.md, where they were simulated. A run changes them only
in tests; they are data so that the simulator can stretch them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    heartbeat_s: float = 0.25  # four chances inside the failure detector's shortest limit
    failure_s: float = 1.2  # silence that makes a peer suspect: 4 heartbeats and 200 ms of network
    stall_s: float = 1.5  # a reduce without one byte of progress
    straggle_min_s: float = 30.0  # a barrier waits at least this long for attached trainers
    gather_s: float = 0.05  # after a quorum of promises: wait for the rest, they may hold more
    stagger_s: float = 0.1  # between candidates, so that they seldom compete
    repeat_s: float = 0.05  # PREPARE and ACCEPT are repeated, votes may have been ignored
    ballot_retry_s: float = 1.5  # a ballot that got no quorum starts again, with +-30 % jitter
    remove_s: float = 8.0  # a dead member is voted out lazily: it may be back
    remove_eager_s: float = 2.5  # ... but sooner when one more loss would cost the quorum
    lost_s: float = 5.0  # nobody alive holds the base: how long to hope
    join_retry_s: float = 0.5  # a joiner repeats JOIN: views and coordinators change under it
    learner_stall_s: float = 10.0  # a learner without a byte of progress stops holding the boundary
    repair_s: float = 1.0  # between REPAIR orders for one peer
    leave_s: float = 4.0  # a leaver goes then, whether or not the others have agreed
    step_s: float = 0.025  # while something is pending the machine looks again this soon
