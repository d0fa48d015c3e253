"""Real daemons beside one that is not as it should be, or that does what no trainer can do yet."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from harness.processes import Fleet, Process, fleet, until

from atoll.peer.membership.view import short

FRAGMENTS = 3


def equivocations(run: Fleet, name: str) -> list[dict[str, Any]]:
    events = run.peers[name].try_status().get("events", [])
    return [event for event in events if event["kind"] == "equivocation"]


def is_proven(event: dict[str, Any]) -> bool:
    """Anybody can check it: one key, two statements, both signed."""
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(event["signer"]))
    pair = event["evidence"]
    for item in pair:
        key.verify(bytes.fromhex(item["signature"]), bytes.fromhex(item["statement"]))
    return len(pair) == 2 and pair[0]["statement"] != pair[1]["statement"]


def lied_to(liar: Process) -> set[str]:
    return {line["lied_to"] for line in liar.lines if "lied_to" in line}


def test_a_coordinator_that_commits_two_things_is_shown_and_does_no_harm(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.odd["a"] = "commits-twice:4"
        run.form("abc")
        for name in "abc":
            run.train(name, inner_s=0.1)
        named = {run.peers[name].status()["peer"]: name for name in "bc"}
        [victim] = until(lambda: lied_to(run.peers["a"]), "a lies", run.peers["a"])
        name = named[short(bytes.fromhex(victim))]
        [first, *_] = until(lambda: equivocations(run, name), f"{name} sees it", run.peers[name])
        assert is_proven(first)
        signer = short(bytes.fromhex(first["signer"]))
        assert signer == run.peers["a"].status()["peer"]
        assert f"{signer} signed two different Commit at 4" in first["text"]
        # It has not believed the first, cannot use the second, and takes the state from the others.
        assert run.peers[name].said("unsynced")
        for each in "abc":
            run.peers[each].reaches(8)
        assert run.agree("abc") >= 1
        assert not run.peers["bc".replace(name, "")].said("equivocation")


def test_a_voter_that_votes_for_two_views_is_shown_and_one_is_decided(tmp_path: Path) -> None:
    """One of three is stopped, so that nothing can be decided before the liar has voted twice."""
    with fleet(tmp_path) as run:
        run.odd["b"] = "votes-twice:4"
        run.form("abc")
        run.peers["c"].kill(signal.SIGSTOP)
        run.join("d")
        [event, *_] = until(lambda: equivocations(run, "a"), "a sees it", run.peers["a"])
        assert is_proven(event)
        assert "signed two different Accepted at Ballot" in event["text"]
        assert short(bytes.fromhex(event["signer"])) == run.peers["b"].status()["peer"]
        run.peers["c"].kill(signal.SIGCONT)
        for name in "abcd":
            assert not run.sees(name, 4)["fork"]
            run.train(name, inner_s=0.1)
        for name in "abcd":
            run.peers[name].reaches(3)
        assert len({run.peers[name].status()["lineage"] for name in "abcd"}) == 1
        assert run.agree("abcd") >= 1


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("b", id="member", marks=pytest.mark.slow),  # as test_kills.py has it
        pytest.param("a", id="coordinator"),
    ],
)
def test_one_dies_while_it_reduces_several_fragments(tmp_path: Path, victim: str) -> None:
    """No trainer hands over fragments yet, so these daemons do it themselves."""
    with fleet(tmp_path) as run:
        dies = {name: 6 if name == victim else 0 for name in "abc"}
        run.odd = {name: f"fragments:{FRAGMENTS}:3:{dies[name]}" for name in "abc"}
        run.form("abc")
        assert run.peers[victim].ends() == -9
        [dying] = [line["reducing"] for line in run.peers[victim].lines if "reducing" in line]
        assert len({number % FRAGMENTS for number in dying}) > 1
        survivors = "abc".replace(victim, "")
        for name in survivors:
            run.sees(name, 2)
            status = run.peers[name].reaches(max(dying) + 2 * FRAGMENTS)
            assert not status["fork"]
            assert status["spec"]["fragments"] == status["spec"]["rounds_in_flight"] == FRAGMENTS
        assert run.agree(survivors) >= FRAGMENTS
