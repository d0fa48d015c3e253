"""The commands that make a network of the kernel's own parts, without carrying them out."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import lab, netem
from atoll.peer.lab.settings import ALL, PathSettings

SHOWN = {"tx": {"packets": 10, "bytes": 1140}, "rx": {"packets": 2, "bytes": 228}}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def run(command: list[str]) -> str:
        made.append(" ".join(command))
        if command[:1] == ["ip"] and "-j" in command:
            return json.dumps([{"stats64": SHOWN}])
        return json.dumps([{"handle": "10:", "drops": 3}, {"handle": "11:", "drops": 5}])

    monkeypatch.setattr(netem, "_run", run)
    keeper = SimpleNamespace(stdin=io.BytesIO(), wait=lambda timeout_s=0: 0)
    monkeypatch.setattr(netem.subprocess, "Popen", lambda *_, **__: keeper)
    return made


def build(commands: list[str], hosts: int = 3) -> netem.Netem:
    network = netem.Netem("lab", hosts, 1500, 0)
    commands.clear()
    return network


def test_every_sender_has_a_class_at_every_receiver(commands: list[str]) -> None:
    netem.Netem("lab", 3, 1500, 0)
    for source, target in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)):
        end = f"match ip src 10.78.0.{source + 1}/32 flowid 1:{16 + source:x}"
        found = [c for c in commands if f"filter add dev to-{target} " in c and c.endswith(end)]
        assert len(found) == 1
    assert all("-netns lab-h3" in c for c in commands if "filter" in c), "in the hub"


def test_a_path(commands: list[str]) -> None:
    network = build(commands)
    network.set_path(0, 2, PathSettings(delay_ms=25, loss=0.5))
    place = "tc -netns lab-h3 qdisc replace dev to-2 parent 1:10 handle 10: netem"
    assert commands == [f"{place} limit 100000 delay 25ms loss 0.5%"]
    commands.clear()
    network.set_path(0, 2, PathSettings(delay_ms=25, jitter_ms=5))
    network.set_path(0, 2, PathSettings(delay_ms=25, jitter_ms=5, reorder=True))
    assert commands[0].endswith("delay 25ms 5ms rate 100000mbit"), "this keeps the order"
    assert commands[1].endswith("delay 25ms 5ms")


def test_rates_count_the_kernels_headers(commands: list[str]) -> None:
    build(commands).set_rate(1, (15.0, 30.0), (65536, 65536))
    uplink, *downlink = commands
    assert uplink.startswith("tc -netns lab-h1 qdisc replace dev eth0 root tbf rate 15140000bit")
    assert uplink.endswith("limit 65536")
    assert "classid 1:1 htb rate 30280000bit ceil 30280000bit" in downlink[0]
    assert "classid 1:10 htb rate 10093333bit ceil 30280000bit" in downlink[1]
    assert "limit 87" in downlink[-1], "packets on their way and in the queue"


def test_cuts_are_made_once_and_healed(commands: list[str]) -> None:
    network = build(commands)
    network.set_cut(0, 1, True)
    network.set_cut(0, 1, True)
    network.set_cut(ALL, ALL, False)
    rule = "pref 100 from 10.78.0.1 to 10.78.0.2 blackhole"
    assert commands == [f"ip -netns lab-h3 rule add {rule}", f"ip -netns lab-h3 rule del {rule}"]


def test_counters_are_of_ip_packets(commands: list[str]) -> None:
    found = build(commands).counters(0)
    assert (found.sent_packets, found.sent_bytes) == (10, 1000)
    assert (found.received_packets, found.received_bytes) == (2, 200)
    assert found.dropped_packets == 8 + 2 * 3, "its uplink, and its class at both others"


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(ConfigError, match="the lab's network: sh -c exit 3: exit status 3"):
        netem._run(["sh", "-c", "exit 3"])


@pytest.mark.parametrize(
    ("wanted", "can_build", "has", "chosen"),
    [
        ("auto", True, True, lab.Forwarder),
        ("auto", False, True, lab.Netem),
        ("auto", False, False, lab.Forwarder),  # which says what it lacks
        ("forwarder", False, True, lab.Forwarder),
        ("netem", True, True, lab.Netem),
        ("netem", True, False, None),
        ("none", True, True, None),
    ],
)
def test_which_network_is_taken(
    wanted: str, can_build: bool, has: bool, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "can_build", lambda: can_build)
    monkeypatch.setattr(lab, "has_netem", lambda: has)
    if chosen is None:
        with pytest.raises(ConfigError):
            lab._choose(wanted)
    else:
        assert lab._choose(wanted) is chosen
