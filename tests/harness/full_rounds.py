"""Tell whether daemons train together: rounds in a row in which everybody takes part."""

from __future__ import annotations

import json
import re
from typing import Final

from atoll.peer.lab.lab import Lab
from harness.processes import Fleet, Peer, until

ELEMENTS: Final = 200_000
ROUNDS: Final = 3
PATIENCE_S: Final = 60.0
ROUND: Final = re.compile(r"^[0-9:]{8} round +(\d+) +(\d+) peers?", re.MULTILINE)


def sent_by_device(lab: Lab, host: int) -> int:
    """Return what a host has sent, to whomever. /sys would show another network's devices."""
    told = json.loads(lab.run(host, "ip", "-json", "-s", "link", "show", "eth0").stdout)
    return int(told[0]["stats64"]["tx"]["bytes"])


def rounds_with(peer: Peer, count: int) -> list[int]:
    """Rounds that this peer has seen committed with so many participants."""
    return [int(number) for number, peers in ROUND.findall(peer.text) if int(peers) == count]


def assert_trains(run: Fleet, names: str, method: str = "diloco", inner_s: float = 0.2) -> None:
    """Everybody takes part in every round, once all have the state, and has the same bits."""
    for name in names:
        run.train(name, ELEMENTS, inner_s=inner_s, method=method)
    assert_goes_on(run, names)


def assert_goes_on(run: Fleet, names: str, rounds: int = ROUNDS) -> None:
    """So many rounds in a row have everybody, after those so far."""
    everybody = [*run.peers.values(), *run.trainers.values()]
    since = max(run.peers[name].status()["round"] for name in names)

    def in_a_row() -> bool:
        found = [
            number for number in rounds_with(run.peers[names[0]], len(names)) if number > since
        ]
        return any(number + rounds - 1 in found for number in found) and len(found) >= rounds

    until(in_a_row, f"{rounds} rounds of all {len(names)}", *everybody, timeout_s=PATIENCE_S)
    last = max(run.peers[name].status()["round"] for name in names)
    for name in names:
        run.peers[name].reaches(last)
    assert run.agree(names)
