"""Keep every duration of the membership protocol in one place, in seconds.

The defaults were found by simulating the protocol. A run changes them only in tests; they are data
so that the simulator can stretch them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BEATS_IN_FAILURE = 4  # chances to be heard within the failure limit
MEMBERS_BEAT_FAST = 64  # in larger views a coordinator hears each member half as often
# Each view is sent to every member by every other one: where there are so many, newcomers that come
# together enter together.
MEMBERS_ADMIT_AT_ONCE = 8
ADMIT_S = 1.0
# What is repeated to all is answered by all: no sooner than a busy machine gets round to it.
REPEAT_PER_MEMBER_S = 0.008


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    heartbeat_s: float = 0.25  # four chances inside the failure detector's shortest limit
    failure_s: float = 1.2  # silence that makes a peer suspect: 4 heartbeats and 200 ms of network
    slow_s: float = 2.0  # the same of a peer whose kernel answers: it may only lack a processor
    stall_s: float = 1.5  # a reduce without one byte of progress
    # A link that can be made is there by then, or rounds go without it for a moment. Not longer:
    # until then such a pair looks broken, and costs attempts (FlakyPeers counts them).
    linking_s: float = 2.0
    # How long a barrier waits for attached trainers that are late follows what rounds take
    # (participation.py): a hung one must not stop fast rounds, nor a short pause cost a round ...
    straggle_min_s: float = 3.0
    straggle_max_s: float = 30.0  # ... and so long where nothing is known, or late is an error
    gather_s: float = 0.05  # after a quorum of promises: wait for the rest, they may hold more
    stagger_s: float = 0.1  # between candidates, so that they seldom compete
    repeat_s: float = 0.05  # PREPARE and ACCEPT are repeated, votes may have been ignored
    ballot_retry_s: float = 1.5  # a ballot that got no quorum starts again, with +-30 % jitter
    remove_s: float = 8.0  # a dead member is voted out lazily: it may be back
    remove_eager_s: float = 2.5  # ... but sooner when one more loss would cost the quorum
    better_s: float = 60.0  # somebody has more links than the coordinator: each change is a view
    cut_off_s: float = 10.0  # ... and reaches somebody who takes no part for want of a link
    spare_s: float = 30.0  # ... and is not voted out meanwhile: three chances to hand over
    callers_s: float = 20.0  # a new coordinator lasts so long, whoever calls at other members
    lost_s: float = 5.0  # nobody alive holds the base: how long to hope
    join_retry_s: float = 0.5  # a joiner repeats JOIN: views and coordinators change under it
    admit_s: float = 0.0  # a view that only lets newcomers in comes so long after the one before
    joiner_stall_s: float = 60.0  # a joiner without progress makes room: a donor that reduces may
    # send it a chunk at 5 % of a slow link
    behind_s: float = 5.0  # a member with a trainer that is behind for so long gets a boundary held
    hold_s: float = 4.0  # a boundary waits so long for somebody who cannot quite keep up, or as
    # long as an exchange takes, which is what copying its result takes
    grace_s: float = (
        0.5  # a commit waits so long for trainers that have missed the round to copy it
    )
    kept_s: float = 0.25  # for the lists of finished chunks, before an attempt is begun again
    fork_min_s: float = 6.0  # without a quorum: then who is left may go on, where the policy ...
    fork_max_s: float = 10.0  # ... says so; spread, so that not everybody does at once
    fork_restarted_s: float = (
        60.0  # ... nor sooner than that after its own restart: after a power cut
    )
    # machines come back seconds apart, and each would go on alone
    meet_s: float = 1.5  # between two looks for peers of other lineages
    hello_s: float = 0.5  # between two calls to the other founders of a run
    hello_gather_s: float = 3.0  # after enough have called: wait for the rest, they may hold more
    run_lost_s: float = 10.0  # a founder that has found the run alive hopes so long for its voice
    repair_s: float = 1.0  # between REPAIR orders for one peer
    leave_s: float = 4.0  # a leaver goes then, whether or not the others have agreed
    ask_s: float = 30.0  # a change of the rules is asked for so long: the view may have no quorum
    step_s: float = 0.025  # while something is pending the machine looks again this soon

    def paced(self, srtt_s: float, members: int = 1) -> Timing:
        """Return these durations, with the limits that follow the round trip and the view's size.

        ``srtt_s`` is the slowest round trip of the links, and the view has so many members.

        Over long ways heartbeats come more often, so that the failure limit need not grow with
        them: up to 350 ms of round trip it stays what it is.
        """
        heartbeat_s = (self.failure_s - 2 * srtt_s) / BEATS_IN_FAILURE
        heartbeat_s = min(max(heartbeat_s, self.heartbeat_s / 2), self.heartbeat_s)
        if members > MEMBERS_BEAT_FAST:
            heartbeat_s = 2 * self.heartbeat_s
        failure_s = min(3.0, max(self.failure_s, BEATS_IN_FAILURE * heartbeat_s + 2 * srtt_s))
        return replace(
            self,
            heartbeat_s=heartbeat_s,
            failure_s=failure_s,
            gather_s=max(self.gather_s, 1.5 * srtt_s),
            stagger_s=max(self.stagger_s, srtt_s),
            repeat_s=max(self.repeat_s, srtt_s, REPEAT_PER_MEMBER_S * members),
            admit_s=ADMIT_S if members > MEMBERS_ADMIT_AT_ONCE else self.admit_s,
            kept_s=max(self.kept_s, 2 * srtt_s),
            ballot_retry_s=max(self.ballot_retry_s, 8 * srtt_s),
            repair_s=max(self.repair_s, 4 * srtt_s),
        )
