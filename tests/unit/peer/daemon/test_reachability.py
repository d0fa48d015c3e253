"""Whether a peer can be dialled, as it is found out, remembered and put into words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.daemon.reach_lines import alone, describe_reach, relay_wanted, who_can_join
from atoll.peer.daemon.reach_watch import ReachWatch
from atoll.peer.daemon.reachability import (
    AFTER_LOSS_S,
    LATE_S,
    NEXT_S,
    OUTBOUND_AGAIN_S,
    PEERS_MAX,
    REACH_TRANSITIONS,
    REACHABLE_AGAIN_S,
    UNCONFIRMED_AGAIN_S,
    AskableMember,
    DialledBy,
    OthersReach,
    OwnReach,
    ReachState,
    ReachTrigger,
    judge_answers,
    leads_here,
    next_reach_state,
)
from atoll.peer.membership.view import short
from atoll.peer.net.reach_messages import (
    OK,
    OTHER,
    REFUSED,
    SILENT,
    ReachAnswer,
    ReachAt,
    ReachTold,
)

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))
HERE, THERE, ELSEWHERE = "203.0.113.7", "203.0.113.9", "198.51.100.4"
ADDRESS, PORT = f"{HERE}:29600", 29600


def found(**outcomes: str) -> DialledBy:
    """What came of asking A: ``a``, ``b``, ``c`` with the outcome of each that dialled."""
    peers = {"a": A, "b": B, "c": C}
    answers = (ReachAnswer(peers[n], out, 0.05, ELSEWHERE) for n, out in outcomes.items())
    return DialledBy(A, HERE, tuple(answers))


def asked(own: OwnReach, now_s: float = 0.0, peer: bytes = A) -> OwnReach:
    own.asked(peer, now_s)
    return own


# ---------------------------------------------------------------- what the answers mean


@pytest.mark.parametrize(
    ("answers", "trigger"),
    [
        (found(a=OK, b=OK), ReachTrigger.CONFIRMED),
        (found(a=SILENT, b=OK), ReachTrigger.CONFIRMED),
        (found(a=OK, b=SILENT, c=OK), ReachTrigger.CONFIRMED),
        (found(a=OK), ReachTrigger.NEIGHBOUR),
        (found(a=OK, b=SILENT), ReachTrigger.BLOCKED),  # it is a neighbour
        (found(a=SILENT), ReachTrigger.BLOCKED),
        (found(a=REFUSED, b=SILENT, c=OTHER), ReachTrigger.BLOCKED),
        (found(), ReachTrigger.UNANSWERED),
    ],
)
def test_what_members_got_decides(answers: DialledBy, trigger: ReachTrigger) -> None:
    assert judge_answers(answers, leads_here=True) is trigger


def test_a_failure_elsewhere_than_advertised_proves_nothing() -> None:
    assert judge_answers(found(a=SILENT), leads_here=False) is ReachTrigger.UNANSWERED
    assert judge_answers(found(b=OK), leads_here=False) is ReachTrigger.CONFIRMED
    home = "192.168.1.7"
    assert leads_here([HERE], HERE, HERE)
    assert leads_here([home], HERE, home)  # of no use to whoever is elsewhere
    assert leads_here(["100.64.0.7"], HERE, "100.64.0.7")
    assert not leads_here([home], HERE, HERE)  # a proxy's, in a private network
    assert not leads_here([ELSEWHERE], HERE, home)
    assert not leads_here(["gpu.example.org"], HERE, home)  # it could not be resolved
    assert leads_here(["2001:db8::1", HERE], HERE, home)


# ---------------------------------------------------------------- the machine


def test_every_state_knows_what_can_happen_in_it() -> None:
    """All triggers in all states, but answers where nothing was asked and a second LATE."""
    unknown = {
        (ReachState.UNKNOWN, trigger)
        for trigger in ReachTrigger
        if trigger not in (ReachTrigger.ASKED, ReachTrigger.DIALLED, ReachTrigger.CHANGED)
    }
    late = {
        (state, ReachTrigger.LATE)
        for state in (ReachState.UNCONFIRMED, ReachState.REACHABLE, ReachState.OUTBOUND)
    }
    missing = {(s, t) for s in ReachState for t in ReachTrigger} - REACH_TRANSITIONS.keys()
    assert missing == unknown | late | {(ReachState.ASKED, ReachTrigger.ASKED)}
    with pytest.raises(LocalProtocolError, match="unknown does not know 'no answer yet'"):
        next_reach_state(ReachState.UNKNOWN, ReachTrigger.LATE)


def test_not_confirmed_is_said_before_the_answer_comes() -> None:
    own = asked(OwnReach(), 10.0)
    own.tick(10.0 + LATE_S / 2)
    assert own.state is ReachState.ASKED
    own.tick(10.0 + LATE_S)
    assert own.state is ReachState.UNCONFIRMED
    assert "was asked to try, and has not answered" in describe_reach(own, ADDRESS, PORT)
    own.heard(found(a=SILENT, b=SILENT), leads_here=True)
    assert own.outbound


def test_who_was_reachable_is_outbound_after_two_answers_only() -> None:
    own = asked(OwnReach())
    own.heard(found(b=OK), leads_here=True)
    assert own.state is ReachState.REACHABLE
    asked(own, 1000.0).heard(found(b=SILENT), leads_here=True)
    assert own.state is ReachState.UNCONFIRMED
    assert "the next try decides" in describe_reach(own, ADDRESS, PORT)
    asked(own, 1100.0).heard(found(b=SILENT), leads_here=True)
    assert own.outbound
    asked(own, 1300.0).unanswered("it has left")
    assert own.outbound
    asked(own, 1500.0).heard(found(b=OK), leads_here=True)
    assert own.state is ReachState.REACHABLE


def test_a_member_of_another_network_that_dials_is_proof_unless_something_speaks_against() -> None:
    own = OwnReach()
    own.dialled(B, THERE, HERE, 0.0)
    assert own.state is ReachState.UNKNOWN  # a neighbour
    own.dialled(B, ELSEWHERE, HERE, 0.0)
    assert own.state is ReachState.REACHABLE
    assert f"{short(B)} has done so from {ELSEWHERE}" in describe_reach(own, ADDRESS, PORT)
    own = asked(OwnReach())
    own.heard(found(a=SILENT), leads_here=True)
    own.dialled(B, ELSEWHERE, HERE, 100.0)
    assert own.outbound
    assert own.next_asked([AskableMember(B, "b:1", ELSEWHERE)], HERE, 100.0) is not None


# ---------------------------------------------------------------- whom to ask, and when


def test_other_members_are_asked_until_something_is_known() -> None:
    near, far = AskableMember(A, "a:1", THERE), AskableMember(B, "b:1", ELSEWHERE)
    own = OwnReach()
    assert own.next_asked([], HERE, 0.0) is None
    assert own.next_asked([near, far], HERE, 0.0) == far
    asked(own, 0.0, B)
    assert own.next_asked([near, far], HERE, 5.0) is None  # one at a time
    own.unanswered("it has gone")
    assert own.next_asked([near, far], HERE, NEXT_S / 2) is None
    assert own.next_asked([near, far], HERE, NEXT_S) == near
    asked(own, NEXT_S, A).heard(found(a=OK), leads_here=True)
    assert own.next_asked([near, far], HERE, 60.0) is None
    assert own.next_asked([near, far], HERE, NEXT_S + UNCONFIRMED_AGAIN_S) == far


@pytest.mark.parametrize(
    ("outcome", "again_s"), [(SILENT, OUTBOUND_AGAIN_S), (OK, REACHABLE_AGAIN_S)]
)
def test_what_is_known_is_checked_now_and_then(outcome: str, again_s: float) -> None:
    own = asked(OwnReach(), 0.0)
    own.heard(found(c=outcome)._replace(asked=B), leads_here=True)
    asked(own, 0.0).heard(found(b=outcome), leads_here=True)
    members = [AskableMember(C, "c:1", ELSEWHERE)]  # never asked: no reason for haste any more
    assert own.next_asked(members, HERE, again_s - 1) is None
    assert own.next_asked(members, HERE, again_s) is not None


def test_it_is_settled_when_two_asked_members_have_said_the_same() -> None:
    a, b, c = (AskableMember(p, f"{p[0]}:1", ELSEWHERE) for p in (A, B, C))
    own = asked(OwnReach(), 0.0, A)
    own.heard(found(a=SILENT, b=SILENT), leads_here=True)
    assert own.outbound, "one word is taken at once ..."
    assert own.next_asked([a, b, c], HERE, 0.9 * NEXT_S) is None
    assert own.next_asked([a, b, c], HERE, NEXT_S) == b, "... and another one is asked at once"
    asked(own, 1.0, B).heard(found(c=OK)._replace(asked=B), leads_here=True)
    assert own.state is ReachState.REACHABLE
    assert own.next_asked([a, b, c], HERE, 2.0) == c
    asked(own, 2.0, C).heard(found(b=OK)._replace(asked=C), leads_here=True)
    assert own.next_asked([a, b, c], HERE, REACHABLE_AGAIN_S) is None


def test_an_answer_about_an_address_that_has_changed_counts_for_nothing() -> None:
    own = OwnReach()
    own.came_from(HERE, 0.0)
    asked(own, 0.0)
    own.came_from(ELSEWHERE, 1.0)
    own.heard(found(b=OK), leads_here=True)
    assert (own.state, own.found) == (ReachState.UNCONFIRMED, None)
    assert "the address of this peer has changed meanwhile" in describe_reach(own, ADDRESS, PORT)


def test_where_others_dial_is_told_when_two_have_named_it() -> None:
    a, b, c = (AskableMember(p, f"{p[0]}:1", ELSEWHERE) for p in (A, B, C))
    own = OwnReach()
    own.next_asked([a, b, c], HERE, 0.0)
    asked(own, 0.0, A).heard(found(b=OK)._replace(observed="192.0.2.66"), leads_here=True)
    assert (own.state, own.at) == (ReachState.REACHABLE, "")
    asked(own, 1.0, B).heard(found(c=OK)._replace(asked=B), leads_here=True)
    assert own.at == "", "the first one has named another"
    assert own.next_asked([a, b, c], HERE, 1.0 + UNCONFIRMED_AGAIN_S) == c
    asked(own, 70.0, C).heard(found(b=OK)._replace(asked=C), leads_here=True)
    assert own.at == HERE
    assert own.next_asked([a, b, c], HERE, 70.0 + REACHABLE_AGAIN_S - 1) is None
    asked(own, 1000.0, A).heard(found(b=OK)._replace(observed="192.0.2.66"), leads_here=True)
    assert own.at == "", "the address may have changed"
    assert own.next_asked([a, b, c], HERE, 1000.0 + UNCONFIRMED_AGAIN_S) == b


def test_one_names_where_others_dial_if_nobody_else_can() -> None:
    a, b = (AskableMember(p, f"{p[0]}:1", ELSEWHERE) for p in (A, B))
    own = OwnReach()
    own.next_asked([a], HERE, 0.0)
    asked(own, 0.0, A).heard(found(b=OK), leads_here=True)
    assert own.at == HERE
    own = OwnReach()
    own.next_asked([a, b], HERE, 0.0)
    asked(own, 0.0, A).heard(found(b=OK), leads_here=True)
    assert own.at == ""
    asked(own, 1.0, B).unanswered("it cannot be dialled")
    assert own.at == HERE
    asked(own, 100.0, A).heard(found(b=OK), leads_here=True)
    assert own.at == HERE, "who has not answered is not waited for"


def test_on_one_machine_one_that_gets_through_is_enough() -> None:
    here = found(a=OK)._replace(observed="127.0.0.1")
    assert judge_answers(here, leads_here=True) is ReachTrigger.CONFIRMED
    refused = found(a=REFUSED)._replace(observed="127.0.0.1")
    assert judge_answers(refused, leads_here=True) is ReachTrigger.BLOCKED


def test_lost_links_and_a_new_own_address_are_reasons_to_ask() -> None:
    own = asked(OwnReach(), 0.0)
    own.heard(found(b=OK), leads_here=True)
    members = [AskableMember(A, "a:1", ELSEWHERE)]
    own.link_lost(200.0)
    assert own.next_asked(members, HERE, 200.0) is None
    assert own.next_asked(members, HERE, 200.0 + AFTER_LOSS_S) is not None
    asked(own, 205.0).heard(found(b=OK), leads_here=True)
    own.came_from(HERE, 210.0)
    own.came_from(HERE, 211.0)
    assert own.state is ReachState.REACHABLE
    own.came_from(ELSEWHERE, 220.0)
    assert own.state is ReachState.UNCONFIRMED
    assert own.next_asked(members, HERE, 205.0 + UNCONFIRMED_AGAIN_S - 1) is None
    assert own.next_asked(members, HERE, 205.0 + UNCONFIRMED_AGAIN_S) is not None


# ---------------------------------------------------------------- others


def test_what_a_peer_says_of_itself_beats_what_others_say() -> None:
    others = OthersReach()
    assert not others.is_outbound(B)
    others.told(A, ReachTold(False, (B, C)))
    assert not others.is_outbound(B)
    others.coordinator = A
    assert others.is_outbound(B)
    assert others.hand_on([A, B, C]) == ((), ())  # nobody hands on what was handed on
    others.told(B, ReachTold(False))
    assert not others.is_outbound(B)
    others.told(C, ReachTold(True))
    assert others.hand_on([A, B, C]) == ((C,), ())
    others.unlinked(C)
    assert others.is_outbound(C)  # nobody has said otherwise
    others.told(A, ReachTold(False, (C,)))
    others.unlinked(A)
    assert others.is_outbound(C)  # nobody else would say it while the coordinator is gone
    others.told(A, ReachTold(False))
    others.told(C, ReachTold(False))
    assert not others.is_outbound(C)


def test_where_others_can_be_dialled_is_handed_on_once() -> None:
    others = OthersReach()
    others.coordinator = A
    assert others.address_of(B) == ""
    others.told(A, ReachTold(False, (), "198.51.100.4:1", (ReachAt(B, "192.0.2.3:1"),)))
    assert others.address_of(A) == "198.51.100.4:1"
    assert others.address_of(B) == "192.0.2.3:1"
    assert others.hand_on([A, B]) == ((), (ReachAt(A, "198.51.100.4:1"),))
    others.told(B, ReachTold(False))
    assert others.address_of(B) == ""


def test_others_are_remembered_in_bounded_memory() -> None:
    others = OthersReach()
    for number in range(PEERS_MAX + 10):
        others.told(number.to_bytes(32, "big"), ReachTold(True))
    assert len(others._own_word) == PEERS_MAX


# ---------------------------------------------------------------- words


def test_an_outbound_peer_reads_who_got_what_and_what_to_do() -> None:
    own = asked(OwnReach())
    own.heard(
        DialledBy(
            A,
            HERE,
            (
                ReachAnswer(A, OK, 0.02, THERE),
                ReachAnswer(B, SILENT, 2.5, ELSEWHERE),
                ReachAnswer(C, SILENT, 2.4, "192.0.2.3"),
            ),
        ),
        leads_here=True,
    )
    first, second = describe_reach(own, "192.168.1.7:29600", PORT).split("\n")
    assert f"others cannot dial it at {ADDRESS}: " in first
    b, c = f"{short(B)} ({ELSEWHERE})", f"{short(C)} (192.0.2.3)"
    assert first.endswith(f"{b} and {c} got no answer in 2.5 s")
    assert "trains fully" in second
    assert "let TCP port 29600 pass the firewall" in second
    own = asked(OwnReach())
    own.heard(found(b=OTHER, a=REFUSED), leads_here=True)
    text = describe_reach(own, ADDRESS, PORT)
    assert "found another program or peer there" in text
    assert "got a refusal after 50 ms" in text
    assert text.endswith("Two peers behind one router need two ports: --listen :PORT")


def test_an_outbound_peer_reads_what_is_of_no_use_to_it() -> None:
    own = asked(OwnReach())
    own.heard(found(b=SILENT, a=REFUSED), leads_here=True)
    assert "--relay is in vain" not in describe_reach(own, ADDRESS, PORT)
    lines = describe_reach(own, ADDRESS, PORT, relays=True).split("\n")
    assert lines[-1].startswith("--relay is in vain here: ")
    text = describe_reach(own, ADDRESS, PORT, proxied=True)
    assert "--advertise HOST:PORT" in text
    assert "firewall" not in text, "nobody dials this machine's port"


def test_a_private_address_that_is_forwarded_is_said_to_be() -> None:
    own = asked(OwnReach())
    own.heard(found(b=OK), leads_here=True)
    text = describe_reach(own, "192.168.1.7:29600", PORT)
    assert text.startswith(f"others can dial this peer at {ADDRESS}: {short(B)}")
    assert f"--advertise {ADDRESS}" in text
    assert "--advertise" not in describe_reach(own, ADDRESS, PORT)


def test_one_neighbour_confirms_nothing() -> None:
    own = asked(OwnReach())
    own.heard(found(a=OK), leads_here=True)
    text = describe_reach(own, ADDRESS, PORT)
    assert text.startswith("not confirmed yet that others can dial this peer at")
    assert text.endswith("got through in 50 ms, and nobody elsewhere is there to try it")
    asked(own, 100.0).unanswered("it cannot be asked")
    assert describe_reach(own, ADDRESS, PORT) == text, "what was found before still counts"


def test_a_neighbour_that_has_dialled_by_itself_is_named() -> None:
    own = asked(OwnReach())
    own.dialled(B, THERE, HERE, 1.0)
    own.unanswered("the others can only dial out, so that nobody can be asked")
    text = describe_reach(own, ADDRESS, PORT)
    assert text.endswith(f"{short(B)} ({THERE}), of the same network, has done so, and no other")


def test_founders_and_peers_that_are_alone_read_what_would_help() -> None:
    assert "only peers on this machine" in who_can_join("127.0.0.1:29600")
    private = who_can_join("192.168.1.7:29600")
    assert "only machines that have a way to 192.168.1.7 can join" in private
    assert "--advertise PUBLIC:29600" in private
    assert "atoll up --via FILE" in private
    relay = who_can_join("172.17.0.2:29600", relays=True)
    assert "only machines that have a way to 172.17.0.2 can join" in relay
    assert "--advertise PUBLIC:29600" in relay
    assert "--via" not in relay, "that is what others say to go through this one"
    assert "carrier-grade NAT" in who_can_join("100.70.1.7:29600")
    assert who_can_join("gpu.example.org:29600").startswith("not confirmed yet")
    assert who_can_join("[2001:db8::1]:29600").startswith("not confirmed yet")
    text = alone(["a1b2"], [], PORT)
    assert text.startswith("no link to a1b2: this peer is outbound, and so is the other side")
    assert "no relay is there between the two" in text
    assert "open a port of this machine" in text
    assert alone([], ["c3d4"], PORT) == "no link to c3d4: is that machine off? Start it again"
    assert alone(["a1b2"], ["c3d4", "e5f6"], PORT).startswith(
        "no link to c3d4 and e5f6: is that machine off? Start them again. no link to a1b2: "
    )


def test_a_run_most_of_whose_voters_are_outbound_reads_what_relay_it_lacks() -> None:
    assert relay_wanted(2, 4, [], 0) == "", "half are not most"
    assert relay_wanted(3, 5, ["a1b2", "c3d4"], 1) == ""
    few = relay_wanted(2, 3, ["a1b2"], 1)
    assert few.startswith("2 of 3 voters are outbound: only a1b2 relays between them")
    assert "`atoll join INVITE --witness --relay 20`" in few
    assert "no relay carries data of those" in relay_wanted(3, 5, ["a1b2", "c3d4"], 0)
    assert "nobody relays between them" in relay_wanted(3, 3, [], 0)


@pytest.mark.parametrize(("address", "count"), [("h:1", 1), ("x", 0), ("", 0), ("a:b:c", 0)])
def test_what_a_peer_says_of_its_address_may_be_anything(address: str, count: int) -> None:
    """Whoever says rubbish is asked nothing; it must not end the daemon."""
    link = SimpleNamespace(
        relay=b"",
        is_punched=False,
        is_proxied=False,
        dialled_address="",
        address=address,
        remote_ip="10.0.0.1",
        local_ip="10.0.0.2",
    )
    watch = object.__new__(ReachWatch)
    vars(watch).update(
        _host=SimpleNamespace(link_peers=lambda: (A,), link_of=lambda peer: link),
        _others=SimpleNamespace(is_outbound=lambda peer: False),
    )
    assert len(watch.observers()) == count
