"""All-reduce between hosts of a lab: how much of the links' rate it uses. Needs root.

    python tests/benchmarks/wan.py [--hosts 4] [--mbit 100] [--rtt-ms 50] [--loss 0.5]
        [--mib 16 64] [--times 5] [--streams sealed] [--codecs float32] [--slow 20]
        [--plan [--share 0.97]] [--congestion cubic]

Each peer is a process on a host of its own with atoll's engine and streams; links are warm. The
figure is what a perfect all-reduce moves, 2 (n - 1) / n of the payload for each host and direction,
divided by the time from a barrier until the slowest peer has the result, and by the rate; the
median of ``--times``. TCP's and IP's headers alone leave 96.5 %. ``--plan``: beside it stands what
the cost model says of the plan, for links as they were asked for.

``--slow``: beside it stands how far that is from the best that any split of the work allows.
However the chunks are shared out, the slow host sends its own parts of all that others own, and
results of what it owns to each of them; that is least where it owns nothing: its parts, once. So no
split is faster than these bytes with their headers at its rate. (The others send less than twice as
many then, so they do not limit at twice the rate or more.)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.mesh import PATIENCE_S, Mesh, all_reducer

from atoll.collectives import get_codec
from atoll.collectives.planning.choice import Choice, ReductionTask, choose
from atoll.collectives.planning.network_model import measured as measured_network
from atoll.collectives.planning.pacing import LINK_SHARE, carried_bytes, paces, stripe_pace
from atoll.peer.lab.lab import Lab

CLONE_NEWNET = 0x40000000
PORT = 5000
WARM = 2
CARRIED = 1448 / 1500  # TCP's payload of a full packet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=0.0, help="percent, each way")
    parser.add_argument("--slow", type=float, default=0.0, help="Mbit/s of the last host's link")
    parser.add_argument("--congestion", default="", help="cubic, bbr; default: the machine's")
    parser.add_argument("--stripes", type=int, default=1, help="streams from each to each")
    parser.add_argument("--chunk-kib", type=int, default=0, help="of float32; default: the grid's")
    parser.add_argument("--plan", action="store_true", help="choose and pace, knowing the links")
    parser.add_argument("--share", type=float, default=LINK_SHARE, help="of the links, with --plan")
    parser.add_argument("--mib", type=float, nargs="+", default=[16.0, 64.0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--codecs", nargs="+", default=["float32"])
    parser.add_argument("--streams", nargs="+", default=["sealed"])
    chosen = parser.parse_args()
    rates = {host: rate_mbit(chosen, host) for host in range(chosen.hosts)}
    with Lab(chosen.hosts, rate_mbit=rates, rtt_ms=chosen.rtt_ms, loss=chosen.loss) as lab:
        context = get_context("fork")
        barrier = context.Barrier(chosen.hosts, timeout=PATIENCE_S)  # one of them may fail
        peers = [
            context.Process(target=peer, args=(lab, host, barrier, chosen))
            for host in range(chosen.hosts)
        ]
        for process in peers:
            process.start()
        for process in peers:
            process.join()
    if any(process.exitcode for process in peers):
        sys.exit(1)


def peer(lab: Lab, me: int, barrier: Barrier, chosen: argparse.Namespace) -> None:
    enter(lab.space(me))
    for streams in chosen.streams:
        with socket.create_server((lab.address(me), PORT)) as listener:
            addresses = [(lab.address(host), PORT) for host in range(chosen.hosts)]
            barrier.wait()
            mesh = Mesh(me, addresses, listener, streams, chosen.stripes)
            barrier.wait()  # nobody dials any more
        for codec in chosen.codecs:
            for mib in chosen.mib:
                choice = planned(chosen, mesh, codec, int(mib * 2**18))
                values = np.random.default_rng(me).standard_normal(int(mib * 2**18), np.float32)
                once = all_reducer(mesh, codec, values.size, choice, chosen.chunk_kib * 256)
                took_s = measured(lambda once=once, values=values: once(values), barrier, chosen)
                if me == 0:
                    show(chosen, streams, codec, mib, took_s)
                    if choice is not None:
                        figure = figure_of(chosen, streams, codec, mib)
                        compare(choice, statistics.median(took_s), figure)
    barrier.wait()
    sys.stdout.flush()
    os._exit(0)  # readers wait for ever


def planned(chosen: argparse.Namespace, mesh: Mesh, codec: str, elements: int) -> Choice | None:
    """What a coordinator would plan that has measured the links as they are; streams keep to it."""
    if not chosen.plan:
        set_pace(mesh, chosen.congestion, {})
        return None
    hosts = range(chosen.hosts)
    rates = [125e3 * rate_mbit(chosen, host) for host in hosts]
    ways = {(i, j): chosen.rtt_ms / 2e3 for i in hosts for j in hosts if i != j}
    network = measured_network(len(hosts), up=rates, down=rates, latency_s=ways, sites=hosts)
    bits = 8 * get_codec(codec).encoded_bytes(elements) / elements
    choice = choose(network, ReductionTask(elements, bits))
    shards = tuple(size * choice.chunk_elements * bits / 8 for size in choice.shards)
    pace = paces(network, carried_bytes(choice.routes(), shards), chosen.share)
    set_pace(mesh, chosen.congestion, {other: pace[mesh.me, other] for other in mesh.out})
    if mesh.me == 0:
        print(*choice.reasons, *choice.details, sep="\n", flush=True)
    return choice


def set_pace(mesh: Mesh, congestion: str, bytes_per_s: Mapping[int, float]) -> None:
    for other, stripes in mesh.out.items():
        rate = stripe_pace(bytes_per_s.get(other, 0.0), len(stripes))
        if not all(stripe.pace(rate, congestion) for stripe in stripes):
            raise SystemExit(f"this kernel cannot pace streams, or has no {congestion}")


def rate_mbit(chosen: argparse.Namespace, host: int) -> float:
    return float(chosen.slow if chosen.slow and host == chosen.hosts - 1 else chosen.mbit)


def enter(space: str) -> None:
    """Before any thread: setns moves the calling one alone."""
    with Path("/run/netns", space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def measured(once: Callable[[], None], barrier: Barrier, chosen: argparse.Namespace) -> list[float]:
    took_s = []
    for _ in range(WARM + chosen.times):
        barrier.wait()
        begun_s = time.perf_counter()
        once()
        barrier.wait()
        took_s.append(time.perf_counter() - begun_s)
    return took_s[WARM:]


def show(
    chosen: argparse.Namespace, streams: str, codec: str, mib: float, took_s: list[float]
) -> None:
    elements = int(mib * 2**18)
    share = 2 * (chosen.hosts - 1) / chosen.hosts
    payload_bits = 8 * share * get_codec(codec).encoded_bytes(elements)
    median_s = statistics.median(took_s)
    used = payload_bits / median_s / (chosen.mbit * 1e6)
    print(
        f"{chosen.hosts} hosts, {chosen.mbit:g} Mbit/s, {chosen.rtt_ms:g} ms, {chosen.loss:g} %"
        f" loss  {streams} {codec}  {mib:g} MiB  {median_s:7.3f} s  {used:6.1%} of the rate"
        f"   (worst {max(took_s):.3f} s)",
        flush=True,
    )
    figure = figure_of(chosen, streams, codec, mib)
    results.say(f"{figure}/used", 100 * used, "%")
    if chosen.slow:
        own_bits = 8 * get_codec(codec).encoded_bytes(elements)
        best_s = own_bits / (chosen.slow * 1e6 * CARRIED)
        over = median_s / best_s - 1
        print(f"    {over:+.1%} of the {best_s:.3f} s that the slow host's own parts take alone")
        results.say(f"{figure}/over_best", 100 * over, "%")


def figure_of(chosen: argparse.Namespace, streams: str, codec: str, mib: float) -> str:
    return f"{chosen.hosts}x{chosen.mbit:g}/{streams}/{codec}/{mib:g}"


def compare(choice: Choice, median_s: float, figure: str) -> None:
    """The bar: the model is within 10 % of what was measured."""
    error = choice.predicted_s / median_s - 1
    print(
        f"    {choice.kind}: {choice.predicted_s:7.3f} s predicted,"
        f" {error:+.1%} of what was measured",
        flush=True,
    )
    results.say(f"{figure}/model_error", 100 * abs(error), "%")


if __name__ == "__main__":
    main()
