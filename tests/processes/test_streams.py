"""Real daemons and the ciphers of their data streams."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Fleet, fleet, until

from atoll.peer.daemon.status import render

LARGE = 8e6  # a reduce of this many parameters can be caught in the middle


def has_streams(run: Fleet, name: str, cipher: str, count: int) -> None:
    """All data streams of this peer, to the others and from them, have this cipher."""
    peer = run.peers[name]
    until(lambda: peer.status()["streams"] == {cipher: count}, f"{count} {cipher}", peer)
    assert f"streams    {count} {cipher}" in render(peer.status())


def test_sealed_streams_carry_the_rounds_and_a_member_is_killed(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, LARGE)
        for name in "abc":
            run.peers[name].reaches(2)
            has_streams(run, name, "aes-256-gcm", 4)
        victim = run.peers["b"]
        until(lambda: victim.try_status().get("attempt"), "b is in a reduce", victim)
        number = victim.status()["round"]
        victim.kill()
        for name in "ac":
            run.peers[name].reaches(number + 2)
            has_streams(run, name, "aes-256-gcm", 2)
        run.restart("b")
        for name in "abc":
            run.sees(name, 3)
        number = run.peers["a"].status()["round"]
        for name in "abc":
            run.peers[name].reaches(number + 2)
            has_streams(run, name, "aes-256-gcm", 4)
        assert run.agree("abc") >= 2
        assert not any("go through TLS" in peer.text for peer in run.peers.values())


@pytest.mark.parametrize(
    ("plain", "cipher"), [("abc", "none"), ("a", "aes-256-gcm")], ids=["everybody", "one"]
)
def test_without_a_cipher_where_everybody_wants_that(
    tmp_path: Path, plain: str, cipher: str
) -> None:
    with fleet(tmp_path) as run:
        run.options = lambda name: ("--plain-streams",) if name in plain else ()
        run.form("abc")
        for name in "abc":
            run.train(name)
        for name in "abc":
            run.peers[name].reaches(4)
            has_streams(run, name, cipher, 4)
            warned = "data streams are neither secret nor protected" in run.peers[name].text
            assert warned == (name in plain)
        assert run.agree("abc") >= 1
