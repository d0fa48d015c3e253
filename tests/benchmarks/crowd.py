"""Measure what many members cost the membership machine alone: no daemons, no network, no clock.

    python tests/benchmarks/crowd.py [--members 16 32 64 128] [--idle-s 4] [--churn-s 60]

All join at once in the simulator, with links that take a millisecond. *Form* is the simulated time
until all are in one view, and what they have sent by then, in all and by the kinds that are most.
*Idle* is the share of a core that the coordinator's machine takes afterwards, while nobody trains,
and what it sends in a second. Bytes are payloads of messages.

*Churn*, where it is asked for: all train, and every CHURN_EVERY_S one is killed, the coordinator
now and then, and comes back as a newcomer AWAY_S later. Told are the bytes of all messages about
views for each change of the view, and the longest time without a commit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness.cluster
import harness.world
from harness import results
from harness.cluster import Cluster
from harness.host import Host

from atoll.peer.membership.node import Node
from atoll.peer.membership.packing import Packing
from atoll.peer.net.wire import encode, name_of

LIMIT_S = 300.0  # simulated, to form
SETTLE_S = 3.0
STEPS_MAX = 10_000_000
SHOWN = 5  # kinds of messages
CHURN_EVERY_S, AWAY_S, INNER_S = 10.0, 3.0, 2.0
COORDINATORS = 4  # one death in so many is the coordinator's
# Messages that a change of the view, or an election, is made of.
OF_VIEWS = frozenset(
    {
        "Join",
        "Redirect",
        "Learn",
        "Prepare",
        "Promise",
        "Accept",
        "Accepted",
        "Install",
        "ProbeView",
    }
)
FIRST_NAME = 0x4E00  # hosts have names of one letter


class Crowd(Cluster):
    """Count the bytes that each peer sends, and the time that one of them takes."""

    def __init__(self, names: str) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self._last: dict[str, tuple[object, int]] = {}  # one message goes to many
        self._packing, self._entered = Packing(), set[tuple[bytes, int]]()
        super().__init__(names)
        self.tracing = False

    def send(self, host: Host, peer: bytes, message: object) -> None:
        kind = name_of(message)
        known, size = self._last.get(kind, (None, 0))
        view = host.node.view
        if view is not None and (view.lineage, view.number) not in self._entered:
            self._entered.add((view.lineage, view.number))
            self._packing.enter(view)
        if known is not message:
            size = len(encode(self._packing.packed(peer, message)))
            self._last[kind] = (message, size)
        self.sent[host.name, kind] += size
        super().send(host, peer, message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--idle-s", type=float, default=4.0)
    parser.add_argument("--churn-s", type=float, default=0.0, help="simulated seconds of it")
    chosen = parser.parse_args()
    harness.cluster.STEPS_MAX = harness.world.EVENTS_MAX = STEPS_MAX
    harness.world.QUEUE_MAX = STEPS_MAX
    for count in chosen.members:
        crowd = measure(count, chosen.idle_s)
        if chosen.churn_s:
            churn(crowd, chosen.churn_s)


def measure(count: int, idle_s: float) -> Crowd:
    names = "".join(chr(FIRST_NAME + number) for number in range(count))
    crowd = Crowd(names)
    crowd.found(names[0])
    for number, name in enumerate(names):
        for other in names[:number]:
            crowd.link(name, other)
    formed_s = crowd.until(lambda: crowd.in_one_view(names), LIMIT_S)
    by_kind: Counter[str] = Counter()
    for (_, kind), size in crowd.sent.items():
        by_kind[kind] += size
    total = by_kind.total()
    most = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in by_kind.most_common(SHOWN))
    crowd.run(SETTLE_S)
    lead = next(host for host in crowd.living() if host.node.coordinator is not None)
    crowd.sent.clear()
    share = timed(lead.node, crowd, idle_s) / idle_s
    rate = sum(size for (name, _), size in crowd.sent.items() if name == lead.name) / idle_s
    print(
        f"{count} members: one view after {formed_s:.1f} s, {total / 1e6:.2f} MB ({most});"
        f" idle coordinator {share:.2%} of a core, sends {rate / 1e3:.1f} kB/s",
        flush=True,
    )
    results.say(f"{count}/form", total / count, "B")
    results.say(f"{count}/idle", 100 * share, "%")
    return crowd


def churn(crowd: Crowd, lasts_s: float) -> None:
    """Let one die every CHURN_EVERY_S while rounds of all go on, and print what that costs."""
    count = len(crowd.hosts)
    for host in crowd.hosts.values():
        host.inner_s = INNER_S
        crowd.train(host.name)
    crowd.until(lambda: crowd.committed >= 3, LIMIT_S)
    crowd.sent.clear()
    views, end_s = len(crowd.checker.views), crowd.now_s + lasts_s
    kill_s, deaths, since_s, longest_s, seen = crowd.now_s, 0, crowd.now_s, 0.0, crowd.committed
    while crowd.now_s < end_s:
        crowd.advance()
        if crowd.committed > seen:
            seen, longest_s, since_s = (
                crowd.committed,
                max(longest_s, crowd.now_s - since_s),
                crowd.now_s,
            )
        if crowd.now_s >= kill_s:
            kill_s += CHURN_EVERY_S
            deaths += 1
            one_dies(crowd, of_coordinator=deaths % COORDINATORS == 0)
    longest_s = max(longest_s, crowd.now_s - since_s)
    changes = len(crowd.checker.views) - views
    by_kind: Counter[str] = Counter()
    for (_, kind), size in crowd.sent.items():
        by_kind[kind] += size
    of_views = sum(by_kind[kind] for kind in OF_VIEWS) / max(1, changes)
    most = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in by_kind.most_common(SHOWN))
    print(
        f"{count} members, {deaths} deaths in {lasts_s:.0f} s: {changes} views,"
        f" {of_views / 1e6:.1f} MB each; {by_kind.total() / 1e6:.0f} MB in all ({most});"
        f" longest time between two commits {longest_s:.1f} s, of {seen} rounds",
        flush=True,
    )
    results.say(f"{count}/view_change", of_views, "B")
    results.say(f"{count}/stall", longest_s, "s")


def one_dies(crowd: Crowd, *, of_coordinator: bool) -> None:
    living = [host for host in crowd.living() if host.node.view is not None]
    victim = next(host for host in living if host.leads == of_coordinator)
    crowd.kill(victim.name)
    crowd.after(AWAY_S, lambda: crowd.restart(victim.name) and None)


def timed(node: Node, crowd: Crowd, idle_s: float) -> float:
    """Return the processor time that a machine takes in so long, in seconds."""
    spent_s, handle = 0.0, node.handle

    def clocked(*arguments: Any) -> Any:
        nonlocal spent_s
        began_s = time.process_time()
        try:
            return handle(*arguments)
        finally:
            spent_s += time.process_time() - began_s

    node.handle = clocked  # type: ignore[method-assign,assignment]
    crowd.run(idle_s)
    return spent_s


if __name__ == "__main__":
    main()
