"""What `atoll status` says in words of its own."""

from __future__ import annotations

import pytest

from atoll.peer.daemon.status import carried, survives
from atoll.peer.membership.view import REPLICA, WITNESS, Member, View, short

LINEAGE, CHAIN = b"L" * 32, b"c" * 32


def peer(name: str) -> bytes:
    return name.encode() * 32


def view_of(replicas: str, witnesses: str = "") -> View:
    roles = [(name, REPLICA) for name in replicas] + [(name, WITNESS) for name in witnesses]
    members = tuple(Member(peer(name), 1, role, f"{name}:1") for name, role in roles)
    return View(LINEAGE, 1, members, peer(replicas[0]), 0, CHAIN)


@pytest.mark.parametrize(
    ("replicas", "witnesses", "keepers", "words"),
    [
        ("a", "", "a", "these are back: {a}"),
        ("ab", "", "ab", "this one is back: {a}"),
        ("ab", "", "b", "these are back: {a} and {b}"),
        ("abc", "", "abc", "these are back: any 2 of {a}, {b} and {c}"),
        ("abcd", "", "abcd", "any 3 of {a}, {b}, {c} and {d}, or {a} and 1 more of them"),
        ("abcde", "", "abcd", "one that has the last round (kept by {a}, {b}, {c} and {d})"),
        ("abcde", "", "abcde", "these are back: any 3 of {a}, {b}, {c}, {d} and {e}"),
        (
            "ab",
            "w",
            "a",
            "any 2 of {a}, {b} and {w}, among them one that has the last round (kept by {a})",
        ),
        ("abc", "", "", "no power cut of all: nobody keeps rounds on its disk"),
    ],
)
def test_who_has_to_come_back_after_a_power_cut(
    replicas: str, witnesses: str, keepers: str, words: str
) -> None:
    names = {name: short(peer(name)) for name in replicas + witnesses}
    text = survives(view_of(replicas, witnesses), {peer(name) for name in keepers})
    assert text.endswith(words.format(**names)), text


def test_nothing_is_said_without_a_view() -> None:
    assert survives(None, ()) == ""


def test_a_relay_tells_data_from_control_links() -> None:
    """Those who have met directly keep a link through it, and it carries no data of theirs."""
    link = {"between": ["a1", "b2"], "bulk": False, "count": 1}
    data = {"between": ["b2", "c3"], "bulk": True, "count": 2}
    relay = {"bytes_per_s": 2_500_000, "carried_bytes": 38_000_000, "circuits": [link]}
    most, reserve = "up to 20 Mbit/s of others' data", "control links, or their reserve, between"
    (line,) = carried(relay, outbound=False)
    assert line.endswith(f"{most}; {reserve} a1 and b2; 38 MB carried so far")
    (line,) = carried(relay | {"circuits": [link, data]}, outbound=False)
    assert f"{most}, now between b2 and c3; {reserve} a1 and b2; " in line
    (line,) = carried(relay | {"bytes_per_s": 0}, outbound=False)
    assert "data" not in line


def test_a_relay_that_nobody_can_dial_says_so() -> None:
    relay = {"bytes_per_s": 2_500_000, "carried_bytes": 0, "circuits": []}
    (line,) = carried(relay, outbound=True)
    assert line.endswith("nothing, because others cannot dial this peer")
    assert not carried(relay | {"bytes_per_s": 0}, outbound=True)
