"""Who plans, when, and who obeys: real machines, streams that write down what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness.cluster import Cluster, peer_id

from atoll.collectives.codecs import Decoder, Gathered
from atoll.collectives.planning.choice import KINDS
from atoll.collectives.planning.network_model import Network, measured
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import COLLECTIVES, RunSpec, blob
from atoll.peer.links import planner as module
from atoll.peer.links.messages import StreamPlan
from atoll.peer.links.planner import REPLAN_PER_MEMBER_S, REPLAN_S, YOUNG_ROUNDS, Planner, RoundPlan
from atoll.peer.membership import events as ev
from atoll.peer.membership.layout import Advised
from atoll.peer.rounds.state import ReplicatedState

SLOW, FAST = 1e6, 10e6  # bytes per second


STATE_SPEC = RunSpec(sync_every=1, codec="int8", outer_lr=1.0, outer_momentum=0.0)


def state(spec: RunSpec = STATE_SPEC) -> ReplicatedState:
    return ReplicatedState(blob(spec, Manifest.of([Parameter("w", (1 << 20,))])))


class Site:
    """One peer of a cluster with a planner."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.peer, self.node = peer_id(name), cluster.host(name).node
        self.rate, self.unknown = FAST, 0
        self.loss, self.has_bbr, self.has_seen = 0.0, True, True
        self.relays: dict[bytes, float] = {}
        self.state: ReplicatedState | None = state()
        self.stripes: dict[bytes, int] = {}
        self.paces: dict[bytes, float] = {}
        self.lossy: dict[bytes, bool] = {}
        self.advised: list[Advised] = []
        self.sent: list[tuple[bytes, object]] = []
        self.lines: list[str] = []
        self.planner = Planner(
            node=self.node,
            links=self,
            streams=self,
            replica=self,
            daemon=SimpleNamespace(
                send=lambda peer, message: bool(self.sent.append((peer, message))) or True,
                feed=self.advised.append,
                note=lambda kind, text: self.lines.append(text),
                relays=lambda: self.relays,
            ),
        )

    def widen(self, peer: bytes, count: int) -> None:
        self.stripes[peer] = count

    def pace(self, peer: bytes, bytes_per_s: float, *, lossy: bool = False) -> None:
        self.paces[peer] = bytes_per_s
        self.lossy[peer] = lossy

    def gaps(self, participants: Collection[bytes], apart: Collection[tuple[int, int]]) -> int:
        return min(self.unknown, ways(len(participants)) - 2 * len(apart))

    def network(self, participants: Collection[bytes]) -> Network:
        count = len(participants)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        return measured(
            count,
            pair=dict.fromkeys(pairs, self.rate),
            latency_s=dict.fromkeys(pairs, 0.02),
            loss=dict.fromkeys(pairs, self.loss),
        )

    def is_seen(self, participants: Collection[bytes]) -> bool:
        return self.has_seen

    def bbr(self, participants: Collection[bytes]) -> tuple[bool, ...]:
        return (self.has_bbr,) * len(participants)


def ways(count: int) -> int:
    return count * (count - 1)


def scenario(play: Callable[[Cluster, list[Site]], Awaitable[None]]) -> None:
    async def whole() -> None:
        cluster = Cluster("abc")
        cluster.form("abc")
        await play(cluster, [Site(cluster, name) for name in "abc"])

    asyncio.run(whole())


def test_the_coordinator_plans_and_tells_everyone() -> None:
    async def play(_: Cluster, sites: list[Site]) -> None:
        lead, *others = sites
        for site in sites:
            await site.planner.look()
        assert [len(site.advised) for site in sites] == [1, 0, 0]
        advice = lead.advised[0]
        assert advice.participants == tuple(sorted(site.peer for site in sites))
        assert len(lead.lines) == 1
        assert advice.layout.why in lead.lines[0]
        assert [peer for peer, _ in lead.sent] == [site.peer for site in others]
        for site, (_, told) in zip(others, lead.sent, strict=True):
            site.planner.on_message(lead.peer, told)
        for site in sites:
            assert site.paces.keys() == {s.peer for s in sites} - {site.peer}
            assert all(0 < pace <= FAST for pace in site.paces.values())
            assert set(site.stripes.values()) == {1}
        lead.node.handle(advice, lead.node.now_s)
        assert lead.node.coordinator is not None
        assert lead.node.coordinator.advice is advice

    scenario(play)


def test_a_plan_is_made_again_when_links_or_peers_change_and_not_before() -> None:
    async def play(cluster: Cluster, sites: list[Site]) -> None:
        lead, planner = sites[0], sites[0].planner
        lead.unknown = 1
        await planner.look()
        assert lead.advised == []  # it waits for what is still to be measured
        lead.unknown = 0
        for _ in range(3):
            await planner.look()
        assert len(lead.advised) == 1
        lead.rate = SLOW
        await planner.look()
        assert len(lead.advised) == 1  # it has just been made
        planner._made_s -= module.REPLAN_S + 1.0
        await planner.look()
        assert len(lead.advised) == 2
        assert max(lead.paces.values()) <= SLOW
        cluster.kill("c")
        cluster.until_round("ab")
        await planner.look()
        assert len(lead.advised[-1].participants) == 2
        assert lead.paces[peer_id("c")] == 0.0  # nothing is planned for it any more

    scenario(play)


def test_a_link_that_seems_slower_is_believed_after_some_rounds() -> None:
    """Keep parts equal at first: what the first rounds show may be too little."""

    async def play(cluster: Cluster, sites: list[Site]) -> None:
        lead = sites[0]
        ends = {"up": [FAST, FAST, 0.5 * FAST], "down": [FAST] * 3}
        lead.network = lambda participants: measured(  # type: ignore[method-assign]
            3, **ends, latency_s=dict.fromkeys([(0, 1), (0, 2), (1, 2)], 0.02)
        )
        await lead.planner.look()
        shares = lead.advised[-1].layout.shares
        assert max(shares) - min(shares) <= 1
        cluster.until_round("abc", YOUNG_ROUNDS)
        lead.planner._made_s -= REPLAN_S + 3 * REPLAN_PER_MEMBER_S
        await lead.planner.look()
        shares = lead.advised[-1].layout.shares
        assert shares[2] < min(shares[:2]) - 1

    scenario(play)


def test_on_lossy_ways_it_matters_who_has_bbr() -> None:
    async def play(_: Cluster, sites: list[Site]) -> None:
        lead = sites[0]
        lead.loss = 0.005
        await lead.planner.look()
        assert set(lead.stripes.values()) == {2}
        assert set(lead.lossy.values()) == {True}
        lead.has_bbr, lead.planner._made_for = False, ()
        await lead.planner.look()
        assert min(lead.stripes.values()) > 2

    scenario(play)


def test_a_plan_waits_for_gaps_only_so_long_and_says_once_that_it_has_some() -> None:
    async def play(_: Cluster, sites: list[Site]) -> None:
        lead, planner = sites[0], sites[0].planner
        lead.unknown = 2
        await planner.look()
        planner._gaps_s -= module.GAPS_WAIT_S - 1.0
        await planner.look()
        assert lead.advised == lead.lines == []
        planner._gaps_s -= 1.0
        await planner.look()
        assert len(lead.advised) == 1
        about_gaps = [line for line in lead.lines if "not measured yet" in line]
        assert [line.split(" links")[0] for line in about_gaps] == ["2 of 6"]
        lead.rate = SLOW
        planner._made_s -= module.REPLAN_S + 1.0
        await planner.look()
        assert len(lead.advised) == 1, "the next guess takes as long"
        planner._made_s -= module.GAPS_WAIT_S
        await planner.look()
        assert len(lead.advised) == 2
        assert len([line for line in lead.lines if "not measured yet" in line]) == 1
        lead.unknown, lead.rate = 0, FAST
        planner._made_s -= module.REPLAN_S + 1.0
        await planner.look()
        assert len(lead.advised) == 3, "what has come to be known is planned with at once"

    scenario(play)


def test_one_joiner_after_the_other_does_not_keep_rounds_from_being_planned() -> None:
    async def play(cluster: Cluster, sites: list[Site]) -> None:
        lead, planner = sites[0], sites[0].planner
        await planner.look()
        assert len(lead.advised) == 1
        lead.unknown = 3
        planner._made_for = ("a view before", "with somebody else")
        await planner.look()
        assert len(lead.advised) == 1
        planner._gaps_s -= module.GAPS_WAIT_S
        cluster.kill("c")
        cluster.until_round("ab")
        lead.unknown = 1
        await planner.look()
        assert len(lead.advised[-1].participants) == 2

    scenario(play)


def test_a_plan_of_guesses_alone_is_not_made() -> None:
    """Where no system counts anything, rounds go as they did before there were plans."""

    async def play(_: Cluster, sites: list[Site]) -> None:
        lead, planner = sites[0], sites[0].planner
        lead.unknown = ways(3)
        await planner.look()
        planner._gaps_s -= 10 * module.GAPS_WAIT_S
        await planner.look()
        assert lead.advised == []
        lead.unknown -= 1
        await planner.look()
        assert len(lead.advised) == 1

    scenario(play)


def test_a_trainer_alone_or_a_void_run_needs_no_plan() -> None:
    async def play(cluster: Cluster, sites: list[Site]) -> None:
        lead = sites[0]
        lead.state = None
        await lead.planner.look()
        lead.state = state()
        for name in "bc":
            cluster.detach(name)
        cluster.until_round("a")
        await lead.planner.look()
        assert lead.advised == []

    scenario(play)


def test_where_nothing_but_collectives_is_run_their_vectors_are_shared_out() -> None:
    async def play(_: Cluster, sites: list[Site]) -> None:
        lead = sites[0]
        spec = RunSpec(method=COLLECTIVES, sync_every=1, codec="float32")
        lead.state = ReplicatedState(blob(spec, Manifest.of([Parameter("nothing", (1,))])))
        await lead.planner.look()
        assert min(lead.advised[0].layout.shares) > 0
        assert all(0 < pace <= FAST for pace in lead.paces.values())

    scenario(play)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_method_that_needs_a_butterfly_gets_nothing_else(
    monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    asked: list[tuple[Decoder, tuple[str, ...]]] = []
    plan_rounds = module.plan_rounds

    def noted(*given: Any, kinds: tuple[str, ...], **options: Any) -> RoundPlan:
        asked.append((given[3], kinds))
        return plan_rounds(*given, kinds=kinds, **options)

    monkeypatch.setattr(module, "plan_rounds", noted)

    async def play(_: Cluster, sites: list[Site]) -> None:
        lead = sites[0]
        if sparse:
            spec = replace(STATE_SPEC, codec="topk", aggregate="senders", error_feedback=0.95)
            lead.state = state(spec)
        await lead.planner.look()
        [(codec, kinds)] = asked
        assert isinstance(codec, Gathered) == sparse
        assert kinds == (("butterfly",) if sparse else KINDS)
        assert codec.encoded_bytes(1 << 20) == (
            3 if sparse else 1
        ) * codec.part_codec.encoded_bytes(1 << 20)
        assert sum(lead.advised[0].layout.shares) == lead.state.grid.count

    scenario(play)


def test_only_the_coordinator_is_obeyed_and_about_members_only() -> None:
    async def play(_: Cluster, sites: list[Site]) -> None:
        a, b, c = sites
        stranger = b"s" * 32
        plan = StreamPlan((c.peer, stranger), (4, 4), (1e6, 1e6), (True, False))
        b.planner.on_message(c.peer, plan)
        b.planner.on_message(stranger, plan)
        assert b.paces == b.stripes == {}
        b.planner.on_message(a.peer, plan)
        assert (b.paces, b.stripes) == ({c.peer: 1e6}, {c.peer: 4})
        assert b.lossy == {c.peer: True}

    scenario(play)


def test_a_plan_is_made_for_the_links_that_there_are() -> None:
    """Who lacks a link is known by heartbeats; what nobody can measure is not waited for."""

    async def play(cluster: Cluster, sites: list[Site]) -> None:
        lead, planner = sites[0], sites[0].planner
        await planner.look()
        assert all(lead.advised[-1].layout.shares)
        b, c = peer_id("b"), peer_id("c")
        cluster.unlinkable.add(frozenset((b, c)))
        for here, there in (("b", c), ("c", b)):
            cluster.give(here, ev.LinkDown(there, "reset"))
        cluster.run(cluster.timing.linking_s + 1.0)
        await planner.look()
        assert len(lead.advised) == 2, "at once: it is another network"
        layout = lead.advised[-1].layout
        assert [share > 0 for share in layout.shares] == [True, False, False]
        assert "have no link: " in layout.why

    scenario(play)
