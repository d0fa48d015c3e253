"""Measure what peers that can only dial out cost a run: rounds, bytes, the plan, joining; as root.

    python tests/benchmarks/reachable.py [--hosts 4] [--mbit 100] [--rtt-ms 50] [--mib 16]
        [--rounds 5] [--times 3] [--sides one two three] [--kinds exchange mixed]
        [--join-parameters 10e6] [--only rounds join]

Each peer is a daemon with a numpy trainer on a host of a lab; ``outbound`` ones are behind a router
that lets nothing in. Codec float32. The sides take turns, ``--times`` turns each, and the figures
are medians; ``--rounds`` of each turn count, after the links are measured and the rounds planned.

- ``exchange``: trainers hand in at once, so a round is an exchange;
- ``mixed``: they train so long that the exchange, as the all-reachable side has it, is 30 % of a
  round.

Bytes are what a host's line has sent in these rounds, with headers, of the host that sends most:
shares follow measured rates. A prediction is the plan's own, as ``atoll status`` shows
it. A joiner's time is from ``atoll join`` until it has the state. ``--join-parameters 100e6`` is
the size that the issue names: 800 MB of state, more than a minute a turn and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, Peer, fleet, until

from atoll.peer.lab.lab import Lab

SIDES = {"reachable": 0, "one": 1, "two": 2, "three": 3}  # so many outbound, the last ones
KINDS = ("exchange", "mixed")
EXCHANGE_SHARE = 0.3  # of a mixed round
LIMIT_S = 900.0  # of anything that is waited for
JOIN_INNER_S = 20.0  # between rounds while somebody joins: most of the time is the transfer's
PREDICTED = re.compile(r", about ([0-9.]+) (ms|s|min) per round")
SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
WARM_INNER_S = 4.0  # before the rounds that count: probes have time between rounds
ROUND = re.compile(r"^[0-9:]{8} round +(\d+) +(\d+) peers?", re.MULTILINE)


class Turn(NamedTuple):
    """One run: seconds of each round, its last exchange, the plan's word, bytes of each host."""

    rounds_s: list[float]
    exchange_s: float
    predicted_s: float | None
    bytes_of: list[float]  # of a round
    between: float  # of a round, between the last two hosts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--mib", type=float, default=16.0, help="of parameters, float32")
    parser.add_argument("--rounds", type=int, default=5, help="that count, of each turn")
    parser.add_argument("--times", type=int, default=3, help="turns of each side")
    parser.add_argument("--sides", nargs="+", default=list(SIDES)[1:], choices=list(SIDES)[1:])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--join-parameters", type=float, default=10e6)
    parser.add_argument("--only", nargs="+", default=["rounds", "join"])
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{chosen.hosts} hosts, {chosen.mbit:g} Mbit/s, {chosen.rtt_ms:g} ms, {chosen.mib:g} MiB of"
        f" float32; {os.cpu_count()} cores, load {load:.1f} at the start",
        flush=True,
    )
    if "rounds" in chosen.only:
        rounds(chosen)
    if "join" in chosen.only:
        joining(chosen)


@contextmanager
def site(chosen: argparse.Namespace, outbound: Sequence[int]) -> Iterator[tuple[Lab, Fleet]]:
    nat = dict.fromkeys(outbound, "restricted")
    with (
        Lab(chosen.hosts, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms, nat=nat) as lab,
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        yield lab, run


def last_hosts(chosen: argparse.Namespace, count: int) -> range:
    return range(chosen.hosts - count, chosen.hosts)


# ---------------------------------------------------------------- rounds


def rounds(chosen: argparse.Namespace) -> None:
    sides = ["reachable", *chosen.sides]
    exchange = turns(chosen, "exchange", sides if "exchange" in chosen.kinds else sides[:1], 0.0)
    exchange_s = statistics.median(turn.exchange_s for turn in exchange["reachable"])
    inner_s = exchange_s * (1 - EXCHANGE_SHARE) / EXCHANGE_SHARE
    every = {"exchange": exchange}
    if "mixed" in chosen.kinds:
        every["mixed"] = turns(chosen, "mixed", [s for s in sides if s != "three"], inner_s)
    for kind, found in every.items():
        base = found["reachable"]
        for side, its in found.items():
            per_hour = 3600 / median_s(its)
            results.say(f"{kind}/{side}/rounds_per_hour", per_hour, "1/h")
            if side == "reachable":
                continue
            results.say(f"{kind}/{side}/rounds", 100 * median_s(base) / median_s(its), "%")
            results.say(f"{kind}/{side}/bytes", 100 * most_bytes(its) / most_bytes(base), "%")
            if side == "two":
                between = statistics.median(turn.between for turn in its)
                results.say(f"{kind}/{side}/between", between / 2**10, "KiB")
    for side, its in exchange.items():
        errors = [turn.exchange_s / turn.predicted_s - 1 for turn in its if turn.predicted_s]
        if errors:
            results.say(f"exchange/{side}/over_prediction", 100 * statistics.median(errors), "%")


def turns(
    chosen: argparse.Namespace, kind: str, sides: list[str], inner_s: float
) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {side: [] for side in sides}
    for number, side in itertools.product(range(chosen.times), sides):
        turn = one_turn(chosen, SIDES[side], inner_s)
        found[side].append(turn)
        predicted = f"{turn.predicted_s:.2f} s" if turn.predicted_s else "nothing"
        sent = " ".join(f"{each / 2**20:.1f}" for each in turn.bytes_of)
        print(
            f"{kind:<9} {side:<9} turn {number}: round {statistics.median(turn.rounds_s):.2f} s,"
            f" exchange {turn.exchange_s:.2f} s, predicted {predicted}; MiB sent by each: {sent};"
            f" load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return found


def one_turn(chosen: argparse.Namespace, outbound: int, inner_s: float) -> Turn:
    names = NAMES[: chosen.hosts]
    with site(chosen, last_hosts(chosen, outbound)) as (lab, run):
        run.form(names)
        for name in names:
            run.train(name, chosen.mib * 2**18, inner_s=WARM_INNER_S, codec="float32")
        lead = run.peers[run.coordinator]
        until(
            lambda: planned_s(run, lead.name) and last_round(lead)[1] == chosen.hosts,
            "a planned round of all",
            *run.peers.values(),
            timeout_s=LIMIT_S,
        )
        for name in names:
            run.trainers[name].kill()
            run.trainers[name].ends()
            run.train(name, chosen.mib * 2**18, inner_s=inner_s, codec="float32")
        warm = last_round(lead)[0] + 1  # the first may be of some
        until(
            lambda: last_round(lead)[0] > warm and last_round(lead)[1] == chosen.hosts,
            "a round of all",
            *run.peers.values(),
            timeout_s=LIMIT_S,
        )
        first = last_round(lead)[0]
        sent = [lab.counters(host).sent_bytes for host in range(chosen.hosts)]
        pair = between(lab, chosen.hosts)
        exchanges: list[float] = []
        for number in range(first + 1, first + 1 + chosen.rounds):
            status = until(
                lambda n=number: reached(run, lead.name, n), "a round", lead, timeout_s=LIMIT_S
            )
            exchanges.append(float(status["last_round_s"]))
        after = [lab.counters(host).sent_bytes for host in range(chosen.hosts)]
        count = chosen.rounds
        moments = committed_s(run, lead.name)[-count - 1 :]
        assert rounds_with(lead, chosen.hosts) >= set(range(first, first + count + 1)), lead.text
        return Turn(
            [late - early for early, late in itertools.pairwise(moments)],
            statistics.median(exchanges),
            planned_s(run, lead.name),
            [(late - early) / count for early, late in zip(sent, after, strict=True)],
            (between(lab, chosen.hosts) - pair) / count,
        )


def last_round(peer: Peer) -> tuple[int, int]:
    """Return its number and how many took part."""
    found = ROUND.findall(peer.text)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def rounds_with(peer: Peer, count: int) -> set[int]:
    return {int(number) for number, peers in ROUND.findall(peer.text) if int(peers) == count}


def reached(run: Fleet, name: str, number: int) -> dict[str, object] | None:
    status = run.peers[name].try_status()
    return status if status.get("digest") and status["round"] >= number else None


def committed_s(run: Fleet, name: str) -> list[float]:
    return [line["unix_s"] for line in run.trainers[name].lines if line.get("kind") == "committed"]


def planned_s(run: Fleet, name: str) -> float | None:
    found = PREDICTED.search(str(run.peers[name].try_status().get("layout", "")))
    return float(found[1]) * SECONDS[found[2]] if found else None


def between(lab: Lab, hosts: int) -> int:
    return lab.sent_bytes(hosts - 2, hosts - 1) + lab.sent_bytes(hosts - 1, hosts - 2)


def median_s(found: list[Turn]) -> float:
    return statistics.median(itertools.chain.from_iterable(turn.rounds_s for turn in found))


def most_bytes(found: list[Turn]) -> float:
    """Return what the host that sends most sends in a round."""
    return statistics.median(max(turn.bytes_of) for turn in found)


# ---------------------------------------------------------------- joining


def joining(chosen: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {"reachable": [], "one": []}
    for number, side in itertools.product(range(chosen.times), found):
        found[side].append(one_joiner(chosen, SIDES[side]))
        what = f"{chosen.join_parameters / 1e6:g} million parameters"
        print(
            f"joining   {side:<9} turn {number}: {found[side][-1]:.2f} s, {what};"
            f" load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    reachable_s, outbound_s = (statistics.median(found[side]) for side in ("reachable", "one"))
    results.say("join/reachable", reachable_s, "s")
    results.say("join/one", outbound_s, "s")
    results.say("join/over_reachable", outbound_s / reachable_s, "x")


def one_joiner(chosen: argparse.Namespace, outbound: int) -> float:
    members, joiner = NAMES[: chosen.hosts - 1], NAMES[chosen.hosts - 1]
    with site(chosen, last_hosts(chosen, outbound)) as (_, run):
        run.form(members)
        for name in members:
            run.train(name, chosen.join_parameters, inner_s=JOIN_INNER_S)
        for name in members:
            until(
                lambda n=name: reached(run, n, 2), "a round", *run.peers.values(), timeout_s=LIMIT_S
            )
        begin_s = time.monotonic()
        peer = run.join(joiner)
        until(lambda: peer.try_status().get("digest"), "the state", peer, timeout_s=LIMIT_S)
        return time.monotonic() - begin_s


if __name__ == "__main__":
    main()
