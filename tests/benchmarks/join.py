"""A joiner gets the state of a run from three donors, one of them over a slow link.

    python tests/benchmarks/join.py [--mib 1024] [--mbit 200] [--slow 20] [--inner 60] [--engine]

Network namespaces with shaped links; needs root. Three real daemons with numpy trainers, a fourth
joins: the share of its link that it uses, and the donors' rounds with and without it. ``--engine``:
the transfer alone, without a run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Process, fleet, until

SITE = Path(__file__).parents[1] / "harness" / "transfer_site.py"
DONORS, SLOW, JOINER = "abc", "c", "d"
DONOR_MBIT = 2.0  # times the joiner's link: it is the joiner's that limits
BYTES_PER_PARAMETER = 8  # parameters and momentum, float32
LIMIT_S = 900.0
BEGUN_BYTES = 2 << 20  # so much received: the transfer has begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=1024.0, help="of state")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the joiner's link")
    parser.add_argument(
        "--slow", type=float, default=20.0, help="Mbit/s of one donor to the joiner"
    )
    parser.add_argument("--inner", type=float, default=60.0, help="seconds between two rounds")
    parser.add_argument("--rounds", type=int, default=4, help="to measure without a joiner")
    parser.add_argument("--engine", action="store_true", help="the transfer alone")
    arguments = parser.parse_args()
    elements = arguments.mib * 2**20 / BYTES_PER_PARAMETER
    rates = dict.fromkeys(DONORS, DONOR_MBIT * arguments.mbit * 1e6)
    rates[JOINER] = arguments.mbit * 1e6
    with tempfile.TemporaryDirectory() as folder, Net(DONORS + JOINER, rate_bps=rates) as net:
        slow_towards(net, SLOW, JOINER, arguments.slow * 1e6, rates[SLOW])
        if arguments.engine:
            engine(net, Path(folder), elements, arguments.mbit)
        else:
            with fleet(Path(folder), net) as run:
                daemons(run, net, elements, arguments)


def slow_towards(net: Net, host: str, target: str, slow_bps: float, rate_bps: float) -> None:
    """Only what ``host`` sends to ``target`` is slow: rounds among the donors are not."""
    device = net.command(host, ["tc"])

    def tc(*words: str) -> None:
        subprocess.run([*device, *words], check=True)

    tc("qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10")
    for name, bps in (("1:10", rate_bps), ("1:20", slow_bps)):
        shape = f"class add dev eth0 parent 1: classid {name} htb rate {int(bps)}bit burst 256k"
        tc(*shape.split())
    rule = (
        f"filter add dev eth0 parent 1: prio 1 protocol ip u32 match ip dst {net.address(target)}"
    )
    tc(*rule.split(), "flowid", "1:20")


def engine(net: Net, folder: Path, elements: float, mbit: float) -> None:
    processes: list[Process] = []

    def start(role: str, name: str, *others: str) -> Process:
        command = [sys.executable, str(SITE), role, str(folder / name)]
        command += [f"{net.address(name)}:{NET_PORT}", str(elements), *others]
        processes.append(Process(net.command(name, command), folder / f"{name}.log"))
        return processes[-1]

    try:
        donors = {name: start("donor", name) for name in DONORS}
        peers = [
            f"{until(lambda d=d: d.lines, 'a donor is ready', d, timeout_s=LIMIT_S)[0]['peer']}"
            f"@{net.address(name)}:{NET_PORT}"
            for name, d in donors.items()
        ]
        began_bytes = net.moved_bytes(JOINER)[1]
        learner = start("learner", JOINER, *peers)
        learner.ends(LIMIT_S)
        last = learner.lines[-1]
        moved = net.moved_bytes(JOINER)[1] - began_bytes
        state_bytes = elements * BYTES_PER_PARAMETER
        ideal_s = state_bytes * 8 / (mbit * 1e6)
        print(
            f"{state_bytes / 2**20:.0f} MiB of state in {last['took_s']:.1f} s, right:"
            f" {last['right']}; the joiner's link alone takes {ideal_s:.1f} s:"
            f" {100 * ideal_s / last['took_s']:.1f} % of it used for state,"
            f" {100 * moved * 8 / (mbit * 1e6) / last['took_s']:.1f} % in all;"
            f" peak memory of the joiner {last['peak'] / 2**20:.0f} MiB"
        )
        for name, donor in donors.items():
            said = [line for line in donor.lines if "sent_bytes" in line][-1]
            print(
                f"donor {name}: sent {said['sent_bytes'] / 2**20:.0f} MiB, its memory grew by"
                f" {said['grown_bytes'] / 2**20:.1f} MiB"
            )
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.popen.wait(10)


def daemons(run: Fleet, net: Net, elements: float, arguments: argparse.Namespace) -> None:
    run.form(DONORS)
    for name in DONORS:
        run.train(name, elements, inner_s=arguments.inner)
    lead = run.trainers[DONORS[0]]
    until(lambda: len(times(lead)) > arguments.rounds + 1, "rounds alone", lead, timeout_s=LIMIT_S)
    alone = intervals(times(lead))[1:]
    before = len(times(lead))
    began_bytes = net.moved_bytes(JOINER)[1]
    joiner = run.join(JOINER)
    until(
        lambda: net.moved_bytes(JOINER)[1] > began_bytes + BEGUN_BYTES,
        "the joiner receives",
        joiner,
        timeout_s=LIMIT_S,
    )
    start_s, start_bytes = time.monotonic(), net.moved_bytes(JOINER)[1]
    until(lambda: joiner.try_status().get("digest"), "the state", joiner, timeout_s=LIMIT_S)
    took_s, moved = time.monotonic() - start_s, net.moved_bytes(JOINER)[1] - start_bytes
    # Each byte of the state counts once: what came twice, headers and replayed rounds do not. All
    # that had come before the clock began may have been state.
    useful = elements * BYTES_PER_PARAMETER - (start_bytes - began_bytes)
    link_bytes = arguments.mbit * 1e6 / 8 * took_s
    print(
        f"{arguments.mib:.0f} MiB of state in {took_s:.1f} s: {100 * useful / link_bytes:.1f} % of"
        f" the joiner's {arguments.mbit:.0f} Mbit/s used for state,"
        f" {100 * moved / link_bytes:.1f} % in all, {moved / 2**20:.0f} MiB received"
    )
    until(lambda: len(times(lead)) > before + 1, "a round meanwhile", lead, timeout_s=LIMIT_S)
    with_joiner = intervals(times(lead)[before - 1 :])
    ratio = max(with_joiner) / statistics.median(alone)
    print(
        f"donors' rounds alone: median {statistics.median(alone):.2f} s"
        f" ({min(alone):.2f} to {max(alone):.2f}); with the joiner"
        f" {', '.join(f'{s:.2f}' for s in with_joiner)} s: at most {100 * ratio - 100:+.1f} %"
    )
    results.say("link_used", 100 * useful / link_bytes, "%")
    results.say("donors_longer", 100 * ratio - 100, "%")


def times(trainer: Process) -> list[float]:
    return [line["unix_s"] for line in trainer.lines if line.get("kind") == "committed"]


def intervals(moments: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]


if __name__ == "__main__":
    main()
