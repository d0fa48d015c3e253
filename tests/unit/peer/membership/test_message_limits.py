"""The most extreme messages: what is refused, what must not raise."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from harness.cluster import Cluster, peer_id
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import RemoteProtocolError
from atoll.optim.manifest import ELEMENTS_MAX
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.node import Node
from atoll.peer.membership.operations import BARRIER, pack_objects
from atoll.peer.membership.view import (
    ON_FORK,
    ON_LOST,
    POLICIES,
    Absent,
    Ballot,
    Member,
    Newcomer,
    Rules,
    View,
)
from atoll.peer.membership.witness_owners import Owners
from atoll.peer.net.wire import (
    Within,
    decode,
    encode,
    frame,
)
from atoll.peer.rounds.entries import EntryOrigin
from atoll.peer.streams.frames import DataHeader, pack_header

LINEAGE, CHAIN = b"L" * 32, b"c" * 32
NUMBER_MAX, ROUND_MAX = (1 << 31) - 1, (1 << 62) - 1
CLASSES = [
    cls
    for name in ms.__all__
    if isinstance(cls := getattr(ms, name), type) and cls is not ms.InView
] + [Absent, Ballot, Layout, Member, Newcomer, EntryOrigin, Rules, Terms, View]


# ---------------------------------------------------------------- what is refused


def bounds_of(hint: Any) -> Within | None:
    return get_args(hint)[1] if get_origin(hint) is Annotated else None


def bounded_fields(kind: type) -> list[tuple[type, str, Within | None]]:
    found = []
    for cls in CLASSES:
        hints = get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            plain = get_args(hints[field.name])[0] if bounds_of(hints[field.name]) else None
            if kind in (plain, hints[field.name]):
                found.append((cls, field.name, bounds_of(hints[field.name])))
    return found


INTS = bounded_fields(int)


def test_every_whole_number_that_may_arrive_is_bounded() -> None:
    assert len(INTS) > 40
    assert [(cls.__name__, name) for cls, name, bounds in INTS if bounds is None] == []


@pytest.mark.parametrize(("cls", "name", "bounds"), INTS, ids=lambda x: getattr(x, "__name__", x))
def test_extreme_numbers_are_refused_when_they_arrive(cls: type, name: str, bounds: Within) -> None:
    assert bounds.high < 1 << 63  # one more still fits wherever u64 does
    if name in ("view", "attempt"):
        assert bounds.high < 1 << 31  # ... or u32
    kind, values = msgpack.unpackb(encode(example(cls)))
    for value in (bounds.low, bounds.high):
        decode(msgpack.packb([kind, values | {name: value}]))
    for value in (bounds.low - 1, bounds.high + 1, -(1 << 63), (1 << 64) - 1):
        with pytest.raises(RemoteProtocolError, match=f"{name} is -?\\d+; .* are allowed"):
            decode(msgpack.packb([kind, values | {name: value}]))


@pytest.mark.parametrize(
    ("peers", "lives"),
    [((b"b" * 32, b"a" * 32), (0, 0)), ((b"a" * 32,), ()), ((b"a" * 32,) * 2, (0, 0))],
)
def test_owners_are_named_once_in_order_with_a_life_each(
    peers: tuple[bytes, ...], lives: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="owners are named"):
        Owners(peers, lives)


def test_an_owner_beside_the_participants_is_none_of_them() -> None:
    begin = example(ms.Begin)
    with pytest.raises(ValueError, match="no participant"):
        replace(begin, owners=Owners(begin.participants[:1], (0,)))


@pytest.mark.parametrize("name", ["chain", "digest", "root", "base_chain", "lineage"])
def test_a_digest_cannot_blow_up_what_is_made_of_it(name: str) -> None:
    found = [(cls, bounds) for cls, field, bounds in bounded_fields(bytes) if field == name]
    assert found
    assert all(bounds is not None and bounds.high == 32 for _, bounds in found)


# ---------------------------------------------------------------- what must not raise

PEERS = [peer_id(name) for name in "abcd"]  # d has no part in the view


OPERATIONS = (
    {"kind": ms.GATHER},
    {"kind": ms.GATHER, "op": BARRIER},
    {"kind": ms.REDUCE, "elements": 1000, "op": "mean", "codec": "int8"},
    {"kind": ms.REDUCE, "elements": ELEMENTS_MAX, "op": "max", "codec": "no such codec"},
)
RULES = {"policy": POLICIES, "on_lost": ON_LOST, "on_fork": ON_FORK}


def edges(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([low, low + 1, high - 1, high]) | st.integers(low, high)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    bounds = bounds_of(hint)
    inner = get_args(hint)[0] if bounds else hint
    if bounds is not None and inner is int:
        return edges(bounds.low, bounds.high)
    if inner is bytes:
        return st.sampled_from([*PEERS, LINEAGE] + ([b""] if bounds and not bounds.low else []))
    if get_origin(inner) is tuple and get_args(inner)[0] is not float:
        return st.lists(values_of(get_args(inner)[0]), max_size=4).map(tuple)
    if inner in (bool, float, str):
        return {
            bool: st.booleans(),
            float: st.sampled_from([0.0, 1.0, 1e15, float("inf")]),
            str: st.text(max_size=9),
        }[inner]
    options = [arg for arg in get_args(inner) if arg is not type(None)]
    return st.none() | messages_of(options[0]) if options else messages_of(inner)


@st.composite
def messages_of(draw: st.DrawFn, cls: type) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    drawn = {f.name: draw(values_of(hints[f.name])) for f in fields(cls) if f.name != "weights"}
    if cls is Member:
        drawn |= {"peer": draw(st.sampled_from(PEERS)), "role": "replica"}
        drawn["inc"] = draw(st.sampled_from([1, 2, (1 << 63) - 1]))
    elif cls is View:
        unique = {member.peer: member for member in drawn["members"]}
        members = tuple(unique.values()) or (Member(PEERS[0], 1),)
        drawn |= {"members": members, "lineage": LINEAGE}
        drawn["coordinator"] = draw(st.sampled_from([member.peer for member in members]))
        new, gone = ({x.peer: x for x in drawn[name]} for name in ("newcomers", "absent"))
        drawn["newcomers"] = tuple(new[m.peer] for m in members if m.peer in new)
        named = {member.peer for member in members}
        drawn["absent"] = tuple(x for peer, x in gone.items() if peer not in named)
        out = {x.peer: x for x in drawn["banned"]}
        drawn["banned"] = tuple(x for peer, x in out.items() if peer not in named)
        drawn["outbound"] = tuple(sorted(named.intersection(drawn["outbound"])))
    elif cls is Terms:
        drawn["rule"] = draw(st.sampled_from(["", "trimmed(f=1)"]))
    elif cls is Owners:
        drawn["peers"] = tuple(sorted(set(drawn["peers"]))) or (PEERS[0],)
        drawn["lives"] = (drawn["lives"] or (1,))[:1] * len(drawn["peers"])
    elif cls is ms.Begin:
        participants = tuple(sorted(set(drawn["participants"]))) or (PEERS[0],)
        drawn |= {"participants": participants, "weights": (1e15,) * len(participants)}
        drawn["kind"] = draw(st.sampled_from([ms.INIT, ms.STEP]))
        drawn["lives"] = tuple(drawn["lives"][:1]) * len(participants)
        owners = drawn["owners"]
        if owners is not None and {*owners.peers} & {*participants}:
            drawn["owners"] = None
        shares = (1,) * len(participants)
        layouts = [None, Layout("butterfly", shares), Layout("tree", shares, arity=2)]
        drawn["layout"] = draw(st.sampled_from(layouts))
        if drawn["operation"] is not None:
            drawn["kind"] = drawn["operation"].kind
        if drawn["kind"] == ms.GATHER:
            drawn["blob"] = pack_objects([peer[:3] for peer in participants])
    elif cls is Layout:
        drawn |= {"kind": "tree", "shares": (1, *drawn["shares"]), "order": ()}
    elif cls is ms.Operation:
        drawn = draw(st.sampled_from(OPERATIONS))
    elif cls is ms.Heartbeat:
        weight = draw(st.sampled_from([0.0, 1e15]))
        drawn |= {"weights": (weight,) * len(drawn["arrived"]), "inc": 1}
        for paths in ("unlinked", "control_only", "relayed"):
            drawn[paths] = tuple(sorted(set(drawn[paths])))
    elif cls is EntryOrigin:
        participants = tuple(sorted(set(drawn["participants"]))) or (PEERS[0],)
        drawn |= {"participants": participants, "weights": (1.0,) * len(participants)}
    elif cls is Rules:
        drawn = {name: draw(st.sampled_from(known)) for name, known in RULES.items()}
    return cls(**drawn)


def example(cls: type) -> Any:
    """Some message of this class; nothing in it matters."""
    hints = get_type_hints(cls, include_extras=True)
    member = Member(b"p" * 32, 1)
    view = View(LINEAGE, 1, (member,), member.peer, 0, CHAIN)
    known: dict[Any, Any] = {Member: member, View: view, Ballot: Ballot(1, b"p" * 32)}
    known |= {
        ms.Report: ms.Report(0, CHAIN, True),
        Rules: Rules(),
        bool: True,
        float: 1.0,
        str: "x",
    }
    if cls in known:
        return known[cls]
    if cls is ms.Begin:
        return ms.Begin(LINEAGE, 1, 1, 1, ms.STEP, (member.peer,), (1.0,))
    if cls is Layout:
        return Layout("tree", (1,))
    if cls is ms.Operation:
        return ms.Operation(ms.REDUCE, 1, "sum", "float32")
    if cls is EntryOrigin:
        return EntryOrigin((member.peer,), (1.0,))
    if cls is ms.Meet:
        return ms.Meet(LINEAGE, 1, member)
    known |= {ms.Meet: ms.Meet(LINEAGE, 1, member), ms.BootstrapConfig: ms.BootstrapConfig()}

    def value(hint: Any) -> Any:
        inner = get_args(hint)[0] if bounds_of(hint) else hint
        if get_origin(inner) is tuple:
            return ()
        if inner in (int, bytes):
            return 1 if inner is int else b"p" * 32
        return known.get(inner)

    return cls(**{field.name: value(hints[field.name]) for field in fields(cls)})


HOSTILE = st.one_of([messages_of(cls) for cls in CLASSES if issubclass(cls, ms.MEMBERSHIP)])


class Shell:
    """Carries out what it can, and checks that everything that a machine says can be sent."""

    def __init__(self, node: Node, now_s: float) -> None:
        self.node, self.now_s = node, now_s

    def feed(self, event: ev.Event) -> None:
        self.now_s += 0.01
        for effect in self.node.handle(event, self.now_s):
            answer = self._carry_out(effect)
            if answer is not None:
                self.feed(answer)

    def _carry_out(self, effect: ev.Effect) -> ev.Event | None:
        if isinstance(effect, ev.Send):
            frame(encode(effect.message))
        elif isinstance(effect, ev.Reduce | ev.Fetch):
            begin = effect.begin
            numbers = (begin.view, begin.round, begin.attempt)
            pack_header(DataHeader(1, 0, 0, 0, begin.lineage[:8], *numbers, 0))
            return ev.AttemptReduced(begin.round, begin.attempt, b"r" * 32)
        elif isinstance(effect, ev.Apply):
            return ev.Applied(effect.begin.round, b"d" * 32)
        elif isinstance(effect, ev.StartSync):
            return ev.CaughtUp(effect.goal.round, effect.goal.chain, b"d" * 32)
        elif isinstance(effect, ev.Undo):
            return ev.Applied(effect.round, b"d" * 32)
        elif isinstance(effect, ev.ListFinal):
            return ev.FinalChunks(effect.round, effect.attempt, b"d" * 64)
        elif isinstance(effect, ev.Renew):
            return ev.Incarnated(self.node.me.inc + 1)
        elif isinstance(effect, ev.ProbePeer):
            return ev.Probed(effect.peer, "refused" if effect.peer == PEERS[2] else "silent")
        return None


def shell_of(role: str) -> Shell:
    """A machine of three that are in the middle of training, or one that wants to join."""
    cluster = Cluster("abc")
    cluster.form("abc")
    name = "a" if role == "coordinator" else "b"
    shell = Shell(cluster.host(name).node, cluster.now_s)
    if role == "joiner":
        shell.node = Node(Member(PEERS[3], 1, address="d:1"))
        shell.feed(ev.LinkUp(PEERS[0]))
    if role == "candidate":
        shell.now_s += 5.0
        shell.feed(ev.Tick())
        shell.now_s += 0.2  # not long enough to be taken for a pause of its own
        for _ in range(20):
            shell.now_s += 0.2
            shell.feed(ev.Tick())
        assert shell.node.phase.value == "candidate"
    return shell


@pytest.mark.parametrize("role", ["coordinator", "member", "candidate", "joiner"])
@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.tuples(st.sampled_from(PEERS), HOSTILE, st.integers(-1, 1)), max_size=12),
)
def test_whatever_may_arrive_is_survived(role: str, said: list[tuple[bytes, Any, int]]) -> None:
    shell = shell_of(role)
    for source, msg, ahead in said:
        view = shell.node.view
        if view is not None and isinstance(msg, ms.InView):  # else it is dropped at once
            msg = replace(msg, lineage=view.lineage, view=max(0, view.number + ahead * (ahead > 0)))
        if source != shell.node.me.peer:
            shell.feed(ev.Received(source, msg))
    for _ in range(12):
        shell.now_s += 0.2
        shell.feed(ev.Tick())


def test_numbers_at_their_limit_are_counted_on_without_an_error() -> None:
    shell = shell_of("member")
    view, me = shell.node.view, shell.node.me
    assert view is not None
    last = replace(
        view, number=NUMBER_MAX, coordinator=me.peer, base_round=ROUND_MAX, base_chain=CHAIN
    )
    shell.feed(ev.Received(PEERS[0], decode(encode(ms.Install(last)))))
    assert shell.node.coordinator is not None
    for _, peer in itertools.product(range(10), (PEERS[0], PEERS[2])):
        shell.now_s += 0.1
        beat = replace(
            example(ms.Heartbeat),
            lineage=LINEAGE,
            view=NUMBER_MAX,
            inc=1,
            round=ROUND_MAX,
            chain=CHAIN,
            frozen=True,
            promised=ROUND_MAX,
            unsynced=False,
            arrived=(0,),
            weights=(1e15,),
        )
        shell.feed(ev.Received(peer, beat))
    assert shell.node.election is not None
    assert shell.node.election.acceptor.promised.number > ROUND_MAX  # it has outbid them
    promise = ms.Promise(
        LINEAGE,
        NUMBER_MAX,
        shell.node.election.acceptor.promised,
        ms.Report(ROUND_MAX, CHAIN, True),
    )
    shell.feed(ev.Received(PEERS[0], promise))
    shell.now_s += 0.2
    shell.feed(ev.Tick())
    candidate = shell.node.election.candidate
    assert candidate is not None
    assert candidate.proposal is not None
    assert candidate.proposal.number > NUMBER_MAX


@pytest.mark.parametrize(
    "wrong", [{"policy": "x"}, {"on_lost": "x"}, {"on_fork": "x"}, {"min_trainers": -1}]
)
def test_rules_that_nobody_knows_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} "):
        Rules(**wrong)
    sent = encode(Rules())
    name, values = msgpack.unpackb(sent)
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([name, values | wrong]))
