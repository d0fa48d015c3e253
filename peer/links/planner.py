"""Plan the coming rounds from what was measured, and do what another's plan asks of this peer.

A plan has two parts. The *layout* (which collective, in which shape, who owns how much) goes into
BEGIN, because all participants must use the same one. Who sends over how many streams, and how
fast, is each peer's own affair: it is told in a message of its own (``StreamPlan``), and one that
never hears it is only slower.

A plan may have gaps: ways whose own rate nobody has measured. Shapes and shares follow from what
stands in for them, which at worst is what rounds without a plan do. Paces do not, for nobody: one
that is a guess holds a fast link back, and a stream without one fills the queues of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from atoll.collectives.chunks import ChunkGrid, grid_for
from atoll.collectives.codecs import Decoder, get_codec, mean_codec
from atoll.collectives.planning.choice import (
    KINDS,
    MARGIN,
    Choice,
    ReductionTask,
    choose,
    stream_bytes_per_s,
    task_of,
)
from atoll.collectives.planning.network_model import F64, Network
from atoll.collectives.planning.pacing import carried_bytes, paces
from atoll.collectives.planning.shards import butterfly_shards, shared_equally
from atoll.collectives.units import size
from atoll.optim.run_spec import CARRIED
from atoll.peer.daemon.ports import PlannerPort
from atoll.peer.links.link_table import GROWN
from atoll.peer.links.messages import StreamPlan
from atoll.peer.links.relayed_ways import NO_RELAYS, Pairs, RelayedWays, relayed_ways
from atoll.peer.membership.layout import WHY_CHARS_MAX, Advised, Layout
from atoll.peer.membership.messages import STEP
from atoll.peer.membership.node import Node
from atoll.peer.membership.view import short
from atoll.peer.membership.witness_owners import Owners
from atoll.peer.rounds.attempt_run import Replica
from atoll.peer.rounds.state import ReplicatedState

LOOK_S = 1.0  # between two looks whether the plan still suits
# Time between two plans for the same peers: so long a plan is tried before another one is made
# of what it taught.
REPLAN_S, REPLAN_PER_MEMBER_S = 5.0, 0.1
YOUNG_REPLAN_S = 2.0  # while only the first rounds have shown the links, see YOUNG_ROUNDS
# By how much another split must be faster than equal parts if only probes have shown what links
# have; else see UNEVEN_MARGIN.
PROBED_MARGIN = 0.2
# The first rounds show some links with up to YOUNG_FACTOR times less than they have; each plan that
# grows lets them show more. For so many rounds only larger differences are a reason for parts that
# are not equal (docs/log.md).
YOUNG_ROUNDS = 8
YOUNG_FACTOR = 2.0
NEVER = 1.0  # a margin by which nothing is faster
# Of a run without an optimizer nobody knows what its trainers will reduce: float32 gradients of
# some million elements, say. For much smaller ones a plan gains nothing.
COLLECTIVE_ELEMENTS = 4 << 20
# A plan waits for so long until all ways are known, and is made with gaps then: twice what probes
# of 8 peers on slow links take, or of 32 on fast ones, since rounds leave them half of the time.
# What never comes (a system that counts nothing, a budget that is spent, one joiner after the
# other) must not keep the others from what a plan is good for.
GAPS_WAIT_S = 120.0
# 1 Gbit/s. On faster links chunks wait for processors and not in queues: a pace gains nothing, and
# one from an estimate that is too low would cost.
PACED_BYTES_PER_S_MAX = 125e6
# By how much something must have changed before the plan is made again: estimates waver by less.
# What has grown was held back by the plan before, and is let grow on (link_table.py).
CHANGE = 0.10
# What streams to a lossy way may take of their pace without BBR: what is lost is sent again within.
LOSSY_SLACK = 1.1
# Latencies of less than this are those of a processor's queue, and decide nothing.
LATENCY_CHANGE_S = 0.002
LOSS_CHANGE = 0.001  # below it, a stream fills most paths
# Shares of a vector of any size are in so many parts: finer than that no rate is known.
FINE_PARTS = 1024


class PlannedStreams(Protocol):
    """Set the number and the pace of a daemon's data streams (peer/streams/manager.py)."""

    def widen(self, peer: bytes, count: int) -> None: ...

    def pace(self, peer: bytes, bytes_per_s: float, *, lossy: bool = False) -> None: ...


class MeasuredLinks(Protocol):
    """Tell what is measured of the links between peers (peer/links/monitor.py)."""

    def gaps(self, participants: Collection[bytes], apart: Collection[tuple[int, int]]) -> int: ...

    def network(self, participants: Collection[bytes]) -> Network: ...

    def is_seen(self, participants: Collection[bytes]) -> bool: ...

    def bbr(self, participants: Collection[bytes]) -> tuple[bool, ...]: ...


class Planner:
    """Make and follow plans, in the event loop. ``send`` is false without a control link."""

    def __init__(
        self,
        *,
        node: Node,
        links: MeasuredLinks,
        streams: PlannedStreams,
        replica: Replica,
        daemon: PlannerPort,
    ) -> None:
        self._node, self._links, self._streams = node, links, streams
        self._replica, self._daemon = replica, daemon
        self._loop = asyncio.get_running_loop()
        self._made_for: tuple[object, ...] = ()  # the view, who takes part, and over what
        self._network: Network | None = None
        self._made_s = float("-inf")
        self._was_seen = self._was_young = False  # of the last plan: see plan_rounds
        self._young_since = -1  # the round of the first plan, or when all links had been seen
        self._gaps_s = float("inf")  # since when there have been gaps ...
        self._said_gaps = False  # ... and whether the log has a line about them
        self._said = ""
        self.predicted_s = 0.0  # what the last plan promises for an exchange; 0: there is none
        self._paced: set[bytes] = set()  # to whom streams keep to a plan

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Make a plan if there is none that suits, and this peer is to make it."""
        node, state, training = self._node, self._replica.state, self._training()
        participants, apart, relayed = training
        if owners := self._witness_owner(participants):  # a witness has no state, and may lead
            self._say_owner(owners, len(participants))
            return
        plannable = state is not None and not state.spec.is_asynchronous  # who is in it changes
        if node.view is None or state is None or not plannable or len(participants) < 2:
            self._made_for, self._gaps_s, self.predicted_s = (), float("inf"), 0.0
            return
        now_s, (grid, codec) = self._loop.time(), _reduced(state, len(participants))
        ways_by_relay = relayed_ways(participants, relayed, self._daemon.relays())
        rates = tuple(sorted(ways_by_relay.bytes_per_s.items()))
        made_for = (node.view.lineage, node.view.number, *training, rates, grid, codec)
        same = made_for == self._made_for
        pause_s = YOUNG_REPLAN_S if self._was_young else REPLAN_S
        if same and now_s - self._made_s < pause_s + REPLAN_PER_MEMBER_S * len(participants):
            return
        unmeasured = (*apart, *relayed)  # what a relay leaves is known without probes
        gaps = self._links.gaps(participants, unmeasured)
        ways = len(participants) * (len(participants) - 1) - 2 * len(unmeasured)
        if self._waits(gaps, ways, now_s, same=same):
            return  # rounds are butterflies of equal shares, or go on as planned before
        network = self._links.network(participants)
        bbr, is_seen = self._links.bbr(participants), self._links.is_seen(participants)
        is_young = self._is_young(is_seen=is_seen)
        same = same and (is_seen, is_young) == (self._was_seen, self._was_young)
        before = self._network if same else None
        if before is not None and not differs(before, network):
            return
        kinds = ("butterfly",) if state.spec.needs_butterfly else KINDS
        plan = await asyncio.to_thread(
            plan_rounds,
            participants,
            network,
            grid,
            codec,
            bbr,
            kinds=kinds,
            apart=apart,
            relayed=ways_by_relay,
            is_seen=is_seen,
            is_young=is_young,
        )
        if self._training() != training:
            return
        self._made_for, self._network, self._made_s = made_for, network, now_s
        self._was_seen, self._was_young = is_seen, is_young
        self._publish(plan)
        if gaps and not self._said_gaps:
            self._daemon.note(
                "plan", f"{gaps} of {ways} links are not measured yet: the plan guesses their rates"
            )
        self._said_gaps = gaps > 0

    def _waits(self, gaps: int, ways: int, now_s: float, *, same: bool) -> bool:
        """Return whether a plan must wait, because so many of the ``ways`` are unknown.

        The time runs from the first gap on, whoever comes meanwhile: else one joiner after the
        other would keep all the others waiting. ``same``: there is a plan for these.
        """
        self._gaps_s = min(self._gaps_s, now_s) if gaps else float("inf")
        if not gaps:
            return False
        is_blind = gaps == ways  # a plan of guesses alone is none
        just_made = same and now_s - self._made_s < GAPS_WAIT_S
        return is_blind or just_made or now_s - self._gaps_s < GAPS_WAIT_S

    def _is_young(self, *, is_seen: bool) -> bool:
        """Return whether only a few rounds have gone by, or only a few have shown the links.

        Some links may never be seen, as those of a peer that owns nothing.
        """
        now = self._node.follower.round
        if self._young_since < 0 or (is_seen and not self._was_seen):
            self._young_since = now
        return now - self._young_since < YOUNG_ROUNDS

    def _training(self) -> tuple[tuple[bytes, ...], Pairs, Pairs]:
        """Return who will take part in the next round, in ascending order of peer id.

        Beside it, the pairs of them between whom data have no way, and those that a relay carries.
        That is nobody where another peer coordinates.
        """
        lead = self._node.coordinator
        if lead is None:
            return (), (), ()
        attached = tuple(sorted(lead.roster.attached(lead.roster.alive(self._node.now_s))))
        peers = lead.eligibility.with_links(STEP, attached)
        links = lead.roster.links
        return peers, links.apart(peers), links.relayed(peers)

    def _witness_owner(self, participants: tuple[bytes, ...]) -> Owners | None:
        """Return the witness that owns all in their rounds, if one has to: then nothing is planned.

        As it is no participant, nobody has measured the links to it, and there is one shape only.
        """
        lead = self._node.coordinator
        return lead.eligibility.helper(STEP, participants, 0) if lead is not None else None

    def _say_owner(self, owners: Owners, count: int) -> None:
        """Say what a witness that owns all moves in each round of so many participants."""
        self._made_for, self._gaps_s, self.predicted_s = (), float("inf"), 0.0
        if not owners.elements:
            return  # nobody has said yet what is reduced
        codec, grid = mean_codec(owners.codec), ChunkGrid(owners.elements, owners.chunk_elements)
        parts = size(count * codec.part_codec.encoded_bytes(grid.total))
        results = size(count * codec.encoded_bytes(grid.total))
        said = f"{owners.why}; of each round {parts} come to it and {results} go from it"
        if said != self._said:
            self._said = said
            self._daemon.note("plan", said)

    def _publish(self, plan: RoundPlan) -> None:
        self.predicted_s = plan.choice.predicted_s
        self._daemon.feed(plan.advice)
        for peer, told in plan.told.items():
            if peer == self._node.me.peer:
                self._obey(told)
            else:
                self._daemon.send(
                    peer, told
                )  # without a link there will be no round with it, either
        layout = plan.advice.layout
        said = f"{layout.kind} {layout.order} {layout.shares}"
        if said != self._said:
            self._said = said
            self._daemon.note("plan", layout.why)

    def on_message(self, source: bytes, message: StreamPlan) -> None:
        """Follow a plan, if it is that of the coordinator."""
        view = self._node.view
        if view is not None and source == view.coordinator:
            self._obey(message)

    def _obey(self, plan: StreamPlan) -> None:
        """Follow a plan from the next round on.

        What an earlier plan has said of others does not hold any more: they share no link with
        these.
        """
        view = self._node.view
        known = [row for row in plan.rows() if view is not None and row[0] in view.peers]
        for peer in self._paced - {row[0] for row in known}:
            self._streams.widen(peer, 1)
            self._streams.pace(peer, 0.0)
        for peer, count, bytes_per_s, lossy in known:
            self._streams.widen(peer, count)
            self._streams.pace(peer, bytes_per_s, lossy=lossy)
        self._paced = {row[0] for row in known}


def round_bytes(state: ReplicatedState | None, count: int) -> int:
    """Return the bytes that each of so many peers sends in a round of equal shares.

    0 while nobody knows what their rounds reduce, as in a run without an optimizer.
    """
    if state is None or state.spec.method in CARRIED or count < 2:
        return 0
    grid, codec = _reduced(state, count)
    both = codec.part_codec.encoded_bytes(grid.total) + codec.encoded_bytes(grid.total)
    return both * (count - 1) // count


def _reduced(state: ReplicatedState, count: int) -> tuple[ChunkGrid, Decoder]:
    """Return the chunk grid of the vector of a round of so many, and the codec of its result."""
    if state.spec.method in CARRIED:
        return grid_for(COLLECTIVE_ELEMENTS), get_codec("float32")
    return state.fragment_grid(0), state.spec.result_codec((1.0,) * count)


# ---------------------------------------------------------------- the plan itself: no clock


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Hold what the coordinator is advised, what each participant is told, and why."""

    advice: Advised
    told: Mapping[bytes, StreamPlan]
    choice: Choice
    relayed_bytes: Mapping[bytes, float]  # what each relay carries of a round


def plan_rounds(
    participants: Sequence[bytes],
    network: Network,
    grid: ChunkGrid,
    codec: Decoder,
    bbr: tuple[bool, ...] = (),
    *,
    kinds: tuple[str, ...] = KINDS,
    apart: Pairs = (),
    relayed: RelayedWays = NO_RELAYS,
    is_seen: bool = True,
    is_young: bool = False,
) -> RoundPlan:
    """Plan rounds of these participants over a vector of this grid. May take seconds for very many.

    They are in ascending order of peer id, as ``network`` has them. ``codec`` is that of the
    result. ``bbr``, ``kinds``, ``apart``: see ReductionTask. ``relayed``: the pairs that relays
    carry. Their ways are used where that is faster, by more than the model may be wrong by, than to
    go without them: they cost somebody else twice what they carry. ``is_seen``: false if of some
    links no more is known than what short probes have found. Then nothing has a pace, and all own
    equal parts where another split is not much faster: such probes may be wrong by half, and a pace
    would keep rounds from showing it. ``is_young``: only the first rounds have shown the links, so
    that another split has to be faster even if those that seem slower were not.
    """
    network = relayed.limit(network, participants)
    task = task_of(grid, codec, kinds=kinds, bbr=bbr, apart=apart)
    if is_young and _is_even(choose(_lifted(network), task), task):
        task = replace(task, uneven_margin=NEVER)
    elif not is_seen:
        task = replace(task, uneven_margin=PROBED_MARGIN)
    task, choice = _choose(network, task, tuple(map(short, participants)), relayed)
    part_bytes = codec.part_codec.encoded_bytes(grid.total)
    result_bytes = codec.encoded_bytes(grid.total)
    order = choice.order if choice.kind == "ring" else choice.sites
    whole = part_bytes / sum(choice.shards)
    shards = tuple(share * whole for share in choice.shards)
    carried = carried_bytes(choice.routes(), shards, result_bytes / part_bytes)
    by_relays = relayed.carried_bytes(carried)
    why = _why(choice, relayed.describe(by_relays))
    layout = Layout(choice.kind, choice.shards, order, max(1, choice.arity), why)
    pace = paces(network, carried)
    if not is_seen:
        pace[:] = 0.0
    streams = {(source, target): count for source, target, count in choice.streams}
    told, without = {}, frozenset(task.apart)
    for source, peer in enumerate(participants):
        others = [
            target
            for target in range(len(participants))
            if target != source and (min(source, target), max(source, target)) not in without
        ]
        lossy = tuple(_is_lossy(network, source, n, float(pace[source, n])) for n in others)
        told[peer] = StreamPlan(
            peers=tuple(participants[target] for target in others),
            streams=tuple(streams.get((source, target), 1) for target in others),
            pace=tuple(
                _pace(float(pace[source, n]), lossy=mark, bbr=task.has_bbr(source))
                for n, mark in zip(others, lossy, strict=True)
            ),
            lossy=lossy,
        )
    owners, chunks = task.owners(network.count), sum(choice.shards)
    if choice.kind == "butterfly" and _is_even(choice, task) and chunks >= network.count:
        # What is not worth it in these rounds is not worth it in collectives, or without somebody.
        fine = shared_equally(network.count, FINE_PARTS, owners)
    else:
        fine = butterfly_shards(network, FINE_PARTS, owners)
    advice = Advised(tuple(participants), layout, fine)
    return RoundPlan(advice, told, choice, by_relays)


def _is_even(choice: Choice, task: ReductionTask) -> bool:
    """Return whether all who may own parts own equal ones."""
    count = len(choice.shards)
    return choice.shards == shared_equally(count, sum(choice.shards), task.owners(count))


def _lifted(network: Network) -> Network:
    """Return the network in which the links that seem a little slower than others are like these.

    "A little" is up to YOUNG_FACTOR; that of two peers is limited by the ends of both.
    """
    up, down = float(np.median(network.up)), float(np.median(network.down))
    return replace(
        network,
        up=_lift(network.up, up),
        down=_lift(network.down, down),
        pair=_lift(network.pair, min(up, down)),
    )


def _lift(rates: F64, usual: float) -> F64:
    is_near = (rates < usual) & (rates >= usual / YOUNG_FACTOR)
    return np.where(is_near, usual, rates)


def _choose(
    network: Network, task: ReductionTask, names: tuple[str, ...], relayed: RelayedWays
) -> tuple[ReductionTask, Choice]:
    """Return the fastest collective, and whether relays are used in the task it is for."""
    direct = replace(task, apart=tuple(sorted({*task.apart, *relayed.all})))
    found = [
        (each, choose(network, each, names))
        for each in dict.fromkeys((direct, task))
        if each.has_owners(network.count) or each is task
    ]
    (best, choice), *others = found
    for each, other in others:
        if other.predicted_s < (1 - MARGIN) * choice.predicted_s:
            best, choice = each, other
    return best, choice


def _is_lossy(network: Network, source: int, target: int, bytes_per_s: float) -> bool:
    """Return whether a stream that gives way to every loss would fall short of this pace."""
    trip_s = float(network.latency_s[source, target] + network.latency_s[target, source])
    loss = float(network.loss[source, target])
    return loss > 0 and stream_bytes_per_s(trip_s, loss) < bytes_per_s


def _pace(bytes_per_s: float, *, lossy: bool, bbr: bool) -> float:
    """Return the pace to tell a sender, in bytes per second; 0: none.

    BBR has a pace of its own, and is slower with two (docs/log.md).
    """
    if not 0 < bytes_per_s < PACED_BYTES_PER_S_MAX or (lossy and bbr):
        return 0.0
    return LOSSY_SLACK * bytes_per_s if lossy else bytes_per_s


def _why(choice: Choice, of_relays: str) -> str:
    first, *others = choice.reasons
    why = "; ".join(filter(None, (first, of_relays, *others)))
    return why if len(why) <= WHY_CHARS_MAX else f"{why[: WHY_CHARS_MAX - 3]}..."


def differs(before: Network, now: Network) -> bool:
    """Return whether a plan for the one network may not suit the other."""
    if before.count != now.count or before.sites != now.sites:
        return True
    for one, other in ((before.up, now.up), (before.down, now.down), (before.pair, now.pair)):
        if (other > (1 + GROWN) * one).any() or (other < (1 - CHANGE) * one).any():
            return True
    return not (
        np.allclose(before.latency_s, now.latency_s, rtol=2 * CHANGE, atol=LATENCY_CHANGE_S)
        and np.allclose(before.loss, now.loss, rtol=0.5, atol=LOSS_CHANGE)
    )
