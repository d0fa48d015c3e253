"""Measure that a starved machine is no dead machine: a table of each figure beside its bar.

    make bench-time ARGS="[--peers 4] [--parameters 100e6] [--rounds 20] [--burners 10]
        [--cores 0 1] [--mbit 50] [--times 3] [--only deaths starved slices link] [--keep FOLDER]"

Real daemons with numpy trainers, all on the same cores; burners, processes that do nothing but
count, are so many for each core. ``starved``: the first state and rounds, without burners and with
them (starved.py). ``slices``: rounds of a small model while two daemons get a processor for 0.15 s
in every 1.65 s. ``link``: the first state over links of a lab (first_state.py), the same.
``deaths``: from a SIGKILL until the coordinator says so, from a SIGSTOP until the others commit
without the peer, on a quiet machine; on a starved one, from a SIGKILL until the coordinator says
so, and counts it in no round that begins from then on, until the others have the next round, and
until the view is without it, which waits for the end of the round under way. Needs root, an
idle machine, and 40 bytes of memory per parameter and peer.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from harness import results
from harness.labnet import NAMES
from harness.processes import Fleet, fleet, until

from benchmarks import first_state
from benchmarks.recovery import others_commit
from benchmarks.starved import Turn, burning, one_turn

KINDS = ("deaths", "starved", "slices", "link")
SLICED_PARAMETERS, SLICED_ROUNDS = 1e5, 30
DEATH_PARAMETERS = 2e5  # on a quiet machine, where what is measured is detection alone
INNER_S = 0.1
STARVED_S = 300.0  # a round of 100M parameters takes the better part of a minute then
STEADY_ROUNDS = 4


class Figure(NamedTuple):
    """Hold one row: what was measured, what it may be at most, and what it was."""

    what: str
    name: str
    bar: float
    reached: float
    unit: str

    @property
    def is_met(self) -> bool:
        return self.reached <= self.bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--burners", type=int, default=10, help="for each core")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--times", type=int, default=3, help="deaths of each kind")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of each run")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--keep", type=Path, help="a folder for the daemons' logs")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, chosen.cores)  # and of all that is started from here
    print(f"load {os.getloadavg()[0]:.1f} before, {len(chosen.cores)} cores", flush=True)
    figures: list[Figure] = []
    measures: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
        "deaths": deaths,
        "starved": starved,
        "slices": slices,
        "link": link,
    }
    for kind in chosen.only:
        figures += measures[kind](chosen)
    print(f"\n{'figure':<72} {'bar':>8} {'reached':>8}")
    for figure in figures:
        missed = "" if figure.is_met else "  MISSED"
        print(f"{figure.what:<72} {figure.bar:8g} {figure.reached:8.2f} {figure.unit}{missed}")
        results.say(f"machine_time/{figure.name}", figure.reached, figure.unit)


# ---------------------------------------------------------------- rounds and the first state


def starved(chosen: argparse.Namespace) -> list[Figure]:
    quiet = one_turn(chosen, "quiet")
    tell("quiet", quiet)
    with burning(chosen.burners * len(chosen.cores)):
        busy = one_turn(chosen, "starved")
    tell("starved", busy)
    cpu = busy.first_cpu_s / max(quiet.first_cpu_s, 1e-9)
    what = f"{chosen.parameters / 1e6:g}M, {chosen.peers} peers, load {chosen.burners} per core"
    short = chosen.rounds - busy.rounds
    return [
        Figure(f"{what}: rounds that did not come", "starved/lacking", 0, short, "rounds"),
        Figure(f"{what}: attempts begun again", "starved/retries", 0, retries(busy), "attempts"),
        Figure(f"{what}: views after the first", "starved/views", 0, busy.views, "views"),
        Figure("... first state: begun again", "starved/first", 0, busy.first_retries, "times"),
        Figure(
            "... first state: CPU time of all daemons, beyond idle ones",
            "starved/cpu",
            1.2,
            cpu,
            "x quiet",
        ),
    ]


def slices(chosen: argparse.Namespace) -> list[Figure]:
    few = argparse.Namespace(**vars(chosen) | {"rounds": SLICED_ROUNDS})
    few.parameters = SLICED_PARAMETERS
    turn = one_turn(few, "slices")
    tell("slices", turn)
    short = few.rounds - turn.rounds
    what = "two daemons run for 0.15 s in every 1.65 s"
    return [
        Figure(f"{what}: rounds that did not come", "slices/lacking", 0, short, "rounds"),
        Figure(f"{what}: attempts begun again", "slices/retries", 0, retries(turn), "attempts"),
        Figure(f"{what}: views after the first", "slices/views", 0, turn.views, "views"),
    ]


def retries(turn: Turn) -> int:
    return turn.events["retry"] + turn.events["give-up"]


def tell(which: str, turn: Turn) -> None:
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(turn.events.items()))
    print(
        f"{which:<8} first state {turn.first_s:.1f} s, {turn.first_cpu_s:.1f} s of CPU"
        f" beside {turn.idle_cpu_s:.1f} s of idle daemons;"
        f" {turn.rounds} rounds in {turn.rounds_s:.1f} s; {turn.views} views more;"
        f" {shown or 'nothing noted'}",
        flush=True,
    )


def link(chosen: argparse.Namespace) -> list[Figure]:
    line = argparse.Namespace(
        hosts=chosen.peers, mbit=chosen.mbit, rtt_ms=20.0, parameters=chosen.parameters
    )
    quiet_s, sent = first_state.one_turn(line)
    print(f"quiet    first state over {chosen.mbit:g} Mbit/s: {quiet_s:.1f} s", flush=True)
    with burning(chosen.burners * len(chosen.cores)):
        busy_s, _ = first_state.one_turn(line)
    print(f"starved  first state over {chosen.mbit:g} Mbit/s: {busy_s:.1f} s", flush=True)
    what = f"first state over {chosen.mbit:g} Mbit/s"
    ideal_s = first_state.ideal_s(line)
    uneven = max(sent) * len(sent) / sum(sent)
    return [
        Figure(f"{what}: time when starved", "link/starved", 2.0, busy_s / quiet_s, "x quiet"),
        Figure(f"{what}: time", "link/over_ideal", 1.3, quiet_s / ideal_s, "x ideal"),
        Figure(f"{what}: sent by whoever sends most", "link/uneven", 1.3, uneven, "x mean"),
    ]


# ---------------------------------------------------------------- deaths


def deaths(chosen: argparse.Namespace) -> list[Figure]:
    with training(chosen, DEATH_PARAMETERS) as run:
        noticed_s = [kill(run, noticed) for _ in range(chosen.times)]
        left_out_s = [stop(run) for _ in range(chosen.times)]
    print(f"quiet    SIGKILL noticed {shown(noticed_s)}; SIGSTOP left out {shown(left_out_s)}")
    with training(chosen, chosen.parameters) as run, burning(chosen.burners * len(chosen.cores)):
        out_s, next_s, view_s = (list(found) for found in zip(*starved_deaths(run), strict=True))
    print(
        f"starved  SIGKILL: out of new rounds {shown(out_s)}, the next round {shown(next_s)},"
        f" out of the view {shown(view_s)}",
        flush=True,
    )
    return [
        Figure("quiet: a SIGKILL is noticed", "deaths/noticed", 0.5, max(noticed_s), "s"),
        Figure("quiet: a SIGSTOP is left out", "deaths/left_out", 3.0, max(left_out_s), "s"),
        Figure("starved: out of rounds that begin", "deaths/out", 10.0, max(out_s), "s"),
        Figure("... the next round is committed", "deaths/next", math.inf, max(next_s), "s"),
        Figure("... the view is without it", "deaths/view", 10.0, max(view_s), "s"),
    ]


def shown(times_s: list[float]) -> str:
    return ", ".join(f"{took_s:.2f}" for took_s in times_s) + " s"


@contextmanager
def training(chosen: argparse.Namespace, parameters: float) -> Iterator[Fleet]:
    """Run a fleet of so many peers, each with a trainer."""
    names = NAMES[: chosen.peers]
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        for name in names:
            run.train(name, parameters, inner_s=INNER_S)
        settle(run)
        yield run


def settle(run: Fleet) -> None:
    """Wait until all are in one view and some rounds have been committed on everybody."""
    for name in run.peers:
        run.sees(name, len(run.peers))
    number = max(peer.status()["round"] for peer in run.peers.values())
    for peer in run.peers.values():
        peer.reaches(number + STEADY_ROUNDS)


def kill(run: Fleet, measure: Callable[[Fleet, str, str], float]) -> float:
    """Kill a member and measure; then the fleet is made whole again."""
    lead = run.coordinator
    victim = next(name for name in reversed(run.peers) if name != lead)
    peer = str(run.peers[victim].status()["peer"])
    port = run.peers[victim].port
    began_s = time.time()
    run.peers[victim].kill()
    took_s = measure(run, lead, peer) - began_s
    run.peers[victim].ends()
    run.again(victim, port)
    settle(run)
    return took_s


def starved_deaths(run: Fleet) -> Iterator[tuple[float, float, float]]:
    """Kill one member after the other, as long as a quorum is left; each is dead for good."""
    lead = run.coordinator
    for victim in [name for name in reversed(run.peers) if name != lead][:2]:
        peer = str(run.peers[victim].status()["peer"])
        began_s = time.time()
        run.peers[victim].kill()
        number = run.peers[lead].status()["round"]
        out_s = noticed(run, lead, peer)
        next_s, view_s = committed_after(run, lead, number), voted_out(run, lead, peer)
        run.peers[victim].ends()
        run.trainers[victim].kill()
        run.trainers[victim].ends()
        del run.peers[victim]
        yield out_s - began_s, next_s - began_s, view_s - began_s


def noticed(run: Fleet, lead: str, victim: str) -> float:
    """Return when the coordinator has said that it is dead."""
    began_s = time.time()

    def said() -> float | None:
        events = run.peers[lead].try_status().get("events", ())
        times = (event["unix_s"] for event in events if is_death(event, victim))
        return next((at_s for at_s in times if at_s > began_s - 1.0), None)

    what = f"{lead} says that {victim} is dead"
    return until(said, what, run.peers[lead], timeout_s=STARVED_S)


def committed_after(run: Fleet, lead: str, number: int) -> float:
    """Return when the coordinator has a round after ``number``."""

    def there() -> float | None:
        return time.time() if run.peers[lead].try_status().get("round", 0) > number else None

    what = f"{lead} commits a round after {number}"
    return until(there, what, run.peers[lead], timeout_s=STARVED_S)


def is_death(event: dict[str, str], victim: str) -> bool:
    return event["kind"] == "dead" and event["text"].removeprefix("dead ").startswith(victim[:8])


def voted_out(run: Fleet, lead: str, victim: str) -> float:
    def without() -> float | None:
        members = run.peers[lead].try_status().get("members", ())
        here = [member["peer"] for member in members]
        return time.time() if here and victim not in here else None

    what = f"the view is without {victim}"
    return until(without, what, run.peers[lead], timeout_s=STARVED_S)


def stop(run: Fleet) -> float:
    """Stop a member; return the seconds until the others have committed without it."""
    lead = run.coordinator
    victim = next(name for name in reversed(run.peers) if name != lead)
    began_s = time.time()
    run.peers[victim].kill(signal.SIGSTOP)
    time.sleep(2 * INNER_S)  # a round whose result it has handed over already may still commit
    took_s = others_commit(run, victim, time.time(), [*run.peers]) - began_s
    run.peers[victim].kill(signal.SIGCONT)
    settle(run)
    return took_s


if __name__ == "__main__":
    main()
