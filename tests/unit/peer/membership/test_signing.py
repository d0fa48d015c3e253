"""Signed statements: forged, replayed and contradicting ones, and proofs of views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from harness.cluster import LINEAGE, Cluster, peer_id
from harness.world import Host

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.node import Node
from atoll.peer.membership.signing import Signatures
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Ballot, Banned, Member, Rules, View


class Keys:
    """Signs as one peer whose id is its public key."""

    def __init__(self, seed: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        self.peer = self._key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        return self._key.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(peer).verify(signature, text)
        except (InvalidSignature, ValueError):
            return False
        return True


A, B, C, D = (Keys(seed) for seed in range(1, 5))
MEMBERS = tuple(Member(keys.peer, 1) for keys in (A, B, C))
VIEW = View(LINEAGE, 3, MEMBERS, A.peer, 4, b"c" * 32)
NEXT = replace(VIEW, number=4, members=MEMBERS[1:], coordinator=B.peer)
BALLOT = Ballot(1, B.peer)


class Bench:
    """What C believes."""

    def __init__(self) -> None:
        self.effects: list[ev.Effect] = []
        self.signatures = Signatures(C.peer, C, self.effects.append)

    @property
    def notes(self) -> list[str]:
        return [effect.kind for effect in self.effects if isinstance(effect, ev.Note)]


def signed(keys: Keys, message: object, inc: int = 1) -> object:
    return Signatures(keys.peer, keys, lambda e: None).signed(message, inc)


def accepted(
    keys: Keys, proposal: View = NEXT, inc: int = 1, ballot: Ballot = BALLOT
) -> ms.Accepted:
    vote = signed(keys, ms.Accepted(LINEAGE, 3, ballot, proposal.digest), inc)
    assert isinstance(vote, ms.Accepted)
    return vote


def proof(*voters: Keys, proposal: View = NEXT, view: View = VIEW) -> ms.Proof:
    votes = []
    for keys in voters:
        vote = signed(keys, ms.Accepted(view.lineage, view.number, BALLOT, proposal.digest))
        assert isinstance(vote, ms.Accepted)
        votes.append(ms.Vote(keys.peer, vote.inc, vote.sig))
    return ms.Proof(view.lineage, view.number, BALLOT, tuple(votes))


COMMIT = ms.Commit(LINEAGE, 3, 5, 2, b"x" * 32)
PROMISE = ms.Promise(LINEAGE, 3, BALLOT, ms.Report(4, b"c" * 32, True))
ACCEPTED = ms.Accepted(LINEAGE, 3, BALLOT, NEXT.digest)
STATEMENTS = [COMMIT, PROMISE, ACCEPTED]


# ---------------------------------------------------------------- one statement


@pytest.mark.parametrize("message", STATEMENTS, ids=lambda m: type(m).__name__)
def test_genuine_only_from_who_has_signed_it(message: ms.Commit) -> None:
    bench = Bench()
    assert bench.signatures.genuine(A.peer, signed(A, message))  # type: ignore[arg-type]
    assert bench.signatures.genuine(A.peer, signed(A, message))  # type: ignore[arg-type]
    assert not bench.notes
    for forged in (
        message,
        replace(message, sig=b"x" * 64),
        signed(B, message),
        replace(signed(A, message), inc=2),  # type: ignore[type-var]
        replace(signed(A, message), view=2),  # type: ignore[type-var]
        replace(signed(A, message), lineage=b"M" * 32),  # type: ignore[type-var]
    ):
        assert not bench.signatures.genuine(A.peer, forged)  # type: ignore[arg-type]
        assert bench.notes.pop() == "forged"
        bench.effects.clear()


def test_one_kind_does_not_pass_for_another() -> None:
    """The signed text names the message's type."""
    vote = signed(A, ACCEPTED)
    assert isinstance(vote, ms.Accepted)
    commit = replace(COMMIT, inc=1, sig=vote.sig)
    assert not Bench().signatures.genuine(A.peer, commit)


@pytest.mark.parametrize("change", [{"chain": b"y" * 32}, {"attempt": 3}])
def test_two_different_commits_of_one_round_are_equivocation(change: dict[str, object]) -> None:
    bench = Bench()
    assert bench.signatures.genuine(A.peer, signed(A, COMMIT))  # type: ignore[arg-type]
    other = signed(A, replace(COMMIT, **change))  # type: ignore[arg-type]
    assert not bench.signatures.genuine(A.peer, other)  # type: ignore[arg-type]
    assert bench.notes == ["equivocation"]
    assert bench.signatures.genuine(A.peer, signed(A, COMMIT))  # type: ignore[arg-type]
    [note] = [effect for effect in bench.effects if isinstance(effect, ev.Note)]
    told: Any = note.fields["evidence"]
    assert note.fields["signer"] == A.peer.hex()
    for item in told:  # anybody can check it
        said, sig = bytes.fromhex(item["statement"]), bytes.fromhex(item["signature"])
        assert C.verify(A.peer, said, sig)
    assert told[0] != told[1]


def test_two_votes_at_one_ballot_are_equivocation_but_a_restart_is_not() -> None:
    bench = Bench()
    assert bench.signatures.genuine(B.peer, accepted(B))
    other = replace(NEXT, base_round=9)
    assert bench.signatures.genuine(B.peer, accepted(B, other, inc=2))
    assert bench.signatures.genuine(B.peer, accepted(B, other, ballot=Ballot(2, B.peer)))
    assert bench.signatures.genuine(A.peer, accepted(A, other))  # somebody else's
    assert not bench.notes
    assert not bench.signatures.genuine(B.peer, accepted(B, other))
    assert bench.notes == ["equivocation"]


def test_a_new_view_starts_with_nothing_said() -> None:
    bench = Bench()
    for view in (3, 4):
        commit = signed(A, replace(COMMIT, view=view, chain=bytes([view]) * 32))
        assert bench.signatures.genuine(A.peer, commit)  # type: ignore[arg-type]
        bench.signatures.new_view()
    assert not bench.notes


# ---------------------------------------------------------------- proofs of views


@pytest.mark.parametrize(
    ("voters", "fine"),
    [((A, B), True), ((A, B, C), True), ((B,), False), ((A, D), False), ((), False)],
)
def test_a_view_needs_a_quorum_of_the_voters_before_it(
    voters: tuple[Keys, ...], fine: bool
) -> None:
    install = ms.Install(NEXT, proof(*voters))
    assert Bench().signatures.proven(install, VIEW) is fine


def test_votes_for_another_view_or_doubled_prove_nothing() -> None:
    signatures = Bench().signatures
    other = replace(NEXT, base_round=9)
    assert not signatures.proven(ms.Install(other, proof(A, B)), VIEW)
    assert not signatures.proven(ms.Install(NEXT, proof(B, B)), VIEW)
    assert not signatures.proven(ms.Install(NEXT, None), VIEW)
    mixed = proof(A, B)
    swapped = replace(mixed, votes=(mixed.votes[0], replace(mixed.votes[0], peer=B.peer)))
    assert not signatures.proven(ms.Install(NEXT, swapped), VIEW)


def test_votes_of_an_older_view_prove_nothing_about_a_later_one() -> None:
    """Signed for view 2, shown as if they had been for view 3."""
    older = replace(VIEW, number=2)
    told = replace(proof(A, B, view=older), view=3)
    assert not Bench().signatures.proven(ms.Install(NEXT, told), VIEW)


def test_who_has_missed_views_checks_that_the_votes_are_genuine() -> None:
    signatures = Bench().signatures
    later = replace(NEXT, number=9)
    before = replace(VIEW, number=8)
    assert signatures.proven(ms.Install(later, proof(A, B, proposal=later, view=before)), VIEW)
    forged = proof(A, B, proposal=later, view=before)
    forged = replace(forged, votes=(forged.votes[0], replace(forged.votes[1], sig=b"x" * 64)))
    assert not signatures.proven(ms.Install(later, forged), VIEW)
    assert not signatures.proven(ms.Install(later, replace(forged, votes=())), VIEW)
    strangers = proof(D, proposal=later, view=before)
    assert not signatures.proven(ms.Install(later, strangers), VIEW), "anybody can make a key"
    assert signatures.proven(ms.Install(later, strangers), None), "who is outside knows nobody"


def test_a_fork_is_proven_by_all_that_are_in_it_where_the_policy_allows() -> None:
    alone = replace(NEXT, members=MEMBERS[1:2], coordinator=B.peer, fork=True, lineage=b"F" * 32)
    install = ms.Install(alone, proof(B, proposal=alone))
    signatures = Bench().signatures
    assert not signatures.proven(install, VIEW)
    any_view = replace(VIEW, rules=Rules(policy="any"))
    assert signatures.proven(install, any_view)
    assert not signatures.proven(ms.Install(alone, proof(C, proposal=alone)), any_view)


# ---------------------------------------------------------------- several machines


class SignedCluster(Cluster):
    """Machines with keys; ids are names still, so the keys are looked up by them."""

    keys: dict[bytes, Keys]

    def make_node(self, member: Member) -> Node:
        self.keys = getattr(self, "keys", {})
        keys = self.keys.setdefault(member.peer, Keys(100 + len(self.keys)))
        return Node(member, self.timing, _ByName(keys, self.keys))


class _ByName:
    def __init__(self, keys: Keys, known: dict[bytes, Keys]) -> None:
        self._keys, self._known = keys, known

    def sign(self, text: bytes) -> bytes:
        return self._keys.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        keys = self._known.get(peer)
        return keys is not None and keys.verify(keys.peer, text, signature)


def test_a_life_with_signatures_raises_no_alarm() -> None:
    cluster = SignedCluster("abcd", Timing())
    cluster.form("abcd")
    cluster.kill("a")
    cluster.until_round("bcd")
    cluster.restart("a")
    cluster.until_round("abcd", limit_s=10.0)
    cluster.isolate("d")
    cluster.run(12.0)
    cluster.heal()
    cluster.until_round("abcd", limit_s=20.0)
    cluster.leave("b")
    cluster.until_round("acd", limit_s=10.0)
    assert not cluster.noted("forged")
    assert not cluster.noted("equivocation")


@pytest.mark.parametrize("cut_s", [4.0, 15.0, 30.0])
def test_forks_and_joins_with_signatures_raise_no_alarm(cut_s: float) -> None:
    cluster = SignedCluster("abcde")
    cluster.rules = Rules(policy="any")
    cluster.form("abcde")
    cluster.isolate("de")
    cluster.run(cut_s)
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abcde"), limit_s=40.0)
    cluster.until_round("abcde")
    assert not cluster.noted("forged")
    assert not cluster.noted("equivocation")


def hear(host: Host, source: bytes, message: object) -> list[str]:
    effects = host.node.handle(ev.Received(source, message), host.node.now_s)
    return [effect.kind for effect in effects if isinstance(effect, ev.Note)]


def test_a_commit_that_the_coordinator_has_not_signed_is_not_applied() -> None:
    """Its link is authenticated, but the statement is nobody's: say so, and stay where we are."""
    cluster = SignedCluster("abc")
    cluster.form("abc")
    host = cluster.host("b")
    own, view = host.node.follower, host.node.view
    assert view is not None
    forged = ms.Commit(view.lineage, view.number, own.round + 1, 99, b"x" * 32, 1, b"s" * 64)
    assert hear(host, view.coordinator, forged) == ["forged"]
    beat = ms.CoordinatorBeat(view.lineage, view.number, own.round, own.chain, forged)
    assert "forged" in hear(host, view.coordinator, beat)
    assert not own.unsynced


def test_a_view_without_its_proof_is_not_entered() -> None:
    cluster = SignedCluster("abc")
    cluster.form("abc")
    host = cluster.host("b")
    view = host.node.view
    assert view is not None
    later = replace(view, number=view.number + 1, members=view.members[1:], coordinator=host.peer)
    assert hear(host, view.coordinator, ms.Install(later)) == ["forged"]
    assert host.node.view == view


def test_promises_and_votes_in_anothers_name_do_not_count() -> None:
    cluster = SignedCluster("abc")
    cluster.form("abc")
    host = cluster.host("b")
    view, election = host.node.view, host.node.election
    assert view is not None
    assert election is not None
    ballot = Ballot(1, host.peer)
    vote = ms.Accepted(view.lineage, view.number, ballot, view.digest, 1, b"s" * 64)
    assert hear(host, view.coordinator, vote) == ["forged"]
    assert not election.acceptor._votes


def test_who_has_missed_views_believes_no_ban_on_one_vote() -> None:
    """A liar makes up a view, and the vote of a view before it that nobody knows."""
    cluster = SignedCluster("abcde")
    cluster.form("abcde")
    liar, victim = cluster.host("d"), peer_id("a")
    view = liar.node.view
    assert view is not None
    members = tuple(member for member in view.members if member.peer != victim)
    made_up = replace(
        view,
        number=view.number + 2,
        members=members,
        coordinator=liar.peer,
        banned=(Banned(victim, b"x" * 32),),
    )

    def install(voters: str) -> ms.Install:
        ballot, votes = Ballot(0, victim), []
        for name in voters:
            host = cluster.host(name)
            said = ms.Accepted(view.lineage, view.number + 1, ballot, made_up.digest)
            vote = host.node.signatures.signed(said, host.node.me.inc)
            votes.append(ms.Vote(host.peer, vote.inc, vote.sig))
        return ms.Install(made_up, ms.Proof(view.lineage, view.number + 1, ballot, tuple(votes)))

    host = cluster.host("b")
    assert hear(host, liar.peer, install("d")) == ["unproven"]
    assert hear(host, liar.peer, install("cd")) == ["unproven"]
    assert host.node.view == view
    hear(host, liar.peer, install("cde"))
    assert host.node.view == made_up


def test_who_is_that_far_behind_is_voted_out_and_comes_back() -> None:
    cluster = SignedCluster("abcde")
    cluster.form("abcde")
    cluster.isolate("e")
    for banned in "dc":  # while its link hangs; the view that it is in has five members
        out = peer_id(banned)
        rest = [host.peer for host in cluster.living() if host.name not in (banned, "e")]
        cluster.outlaws.convict(out, rest, stands_alone=True)
        cluster.until(
            lambda out=out: all(
                (view := cluster.host(name).node.view) is not None and view.is_banned(out)
                for name in "ab"
            ),
            limit_s=30.0,
        )
        cluster.kill(banned)
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abe"), limit_s=60.0)
    view = cluster.host("e").node.view
    assert view is not None
    assert len(view.banned) == 2
