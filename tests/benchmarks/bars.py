"""All measurements that have a bar, one after another, and the table of what was met.

    python tests/benchmarks/bars.py [--only NAME ...] [--times N] [--list]

Each command runs in a process of its own, so that none disturbs another. What it prints passes
through, and its lines ``RESULT name value unit`` are the figures of the rows. ``--only``: the rows
whose command or figure has one of these in its name, as ``--list`` shows them. ``--times``: other
repetitions than each command's own, for a first look. Namespaces and labs need root.

The exit code is 1 where a figure is missing. A bar that is missed on a busy machine says little.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results

FOLDER = Path(__file__).parent
# Of one command, many times what the longest should take: one that hangs must not stop the others.
LIMIT_S = 7200.0


@dataclass(frozen=True)
class Command:
    line: str  # a script beside this one, with its options
    times: str = ""  # the option that says how often it measures, with its usual number


COMMANDS = {
    "allreduce": Command(
        "allreduce.py --mib 64 --peers 2 4 --streams plain sealed --codecs float32 int8 int4",
        "--times 7",
    ),
    "session": Command(
        "session.py --mib 64 --peers 2 4 --streams sealed --codecs float32 int8", "--times 5"
    ),
    "wan": Command(
        "wan.py --hosts 4 --mbit 100 --rtt-ms 50 --mib 16 64 --plan --congestion cubic",
        "--times 5",
    ),
    "wan-loss": Command(
        "wan.py --hosts 4 --mbit 100 --rtt-ms 50 --loss 0.5 --mib 64 --plan --share 1.5"
        " --stripes 16 --congestion cubic",
        "--times 5",
    ),
    "wan-slow": Command(
        "wan.py --hosts 4 --mbit 100 --rtt-ms 50 --slow 20 --mib 16 --plan --congestion cubic",
        "--times 5",
    ),
    "kernels": Command("kernels.py --only int8 int4", "--times 9"),
    "memory": Command("memory.py --elements 1e7 1e8 --peers 2 --codec int8", "--rounds 4"),
    "recovery-member": Command("recovery.py --mib 16 --only member", "--first-times 50"),
    "recovery": Command(
        "recovery.py --mib 16 --far-mib 0.05 --only coordinator first stop far", "--times 10"
    ),
    "resend": Command("resend.py --peers 8 --mib 64 --mbit 20", "--times 5"),
    "costs": Command(
        "costs.py --peers 16 32 --mib 4 64 --codecs float32 int8"
        " --networks equal slow sites unequal"
    ),
    "costs-real-16": Command(
        "costs.py --real --peers 16 --mbit 20 --real-mib 8 --codecs float32", "--times 5"
    ),
    "costs-real-32": Command(
        "costs.py --real --peers 32 --mbit 10 --real-mib 8 --codecs float32", "--times 5"
    ),
    "utilization": Command(
        "utilization.py --hosts 4 --mbit 50 --rtt-ms 80 --parameters 8e6 --sync-every 30"
        " --step-s 0.2",
        "--rounds 6",
    ),
    "robust": Command("robust_rounds.py --peers 16 --elements 10e6", "--times 5"),
    "audit": Command("audit.py --mbit 50 --rtt-ms 20 --rounds 6", "--times 3"),
    "audit-loopback": Command("audit.py --rounds 6", "--times 3"),
    "reachable": Command("reachable.py --hosts 4 --mbit 100 --rtt-ms 50", "--times 3"),
    "first-state": Command(
        "first_state.py --hosts 4 --mbit 50 --rtt-ms 20 --parameters 10e6", "--times 3"
    ),
    "durable": Command("durable_rounds.py", "--turns 3"),
    "join": Command("join.py --mib 1024 --mbit 200 --slow 20 --inner 60", "--rounds 5"),
}


class Row(NamedTuple):
    """A figure of a command and its bar: ``>= 1.4 x``, ``<= 64 MiB``; empty where there is none."""

    what: str
    command: str
    figure: str
    bar: str


ROWS = (
    # the table of issue 4
    Row(
        "float32, 2 processes, plain, x Gloo", "allreduce", "2/plain/float32/over_gloo", ">= 1.4 x"
    ),
    Row(
        "float32, 4 processes, plain, x Gloo", "allreduce", "4/plain/float32/over_gloo", ">= 1.2 x"
    ),
    Row(
        "float32, 2 processes, sealed, x Gloo", "allreduce", "2/sealed/float32/over_gloo", ">= 1 x"
    ),
    Row(
        "float32, 4 processes, sealed, x Gloo",
        "allreduce",
        "4/sealed/float32/over_gloo",
        ">= 0.8 x",
    ),
    Row("int8, 2 processes, plain, x float32", "allreduce", "2/plain/int8/over_float32", ">= 2 x"),
    Row("int8, 4 processes, plain, x float32", "allreduce", "4/plain/int8/over_float32", ">= 2 x"),
    Row(
        "int4, 2 processes, plain, x float32", "allreduce", "2/plain/int4/over_float32", ">= 2.5 x"
    ),
    Row(
        "int4, 4 processes, plain, x float32", "allreduce", "4/plain/int4/over_float32", ">= 2.5 x"
    ),
    Row(
        "int8, 2 processes, sealed, x float32", "allreduce", "2/sealed/int8/over_float32", ">= 2 x"
    ),
    Row(
        "int8, 4 processes, sealed, x float32", "allreduce", "4/sealed/int8/over_float32", ">= 2 x"
    ),
    Row(
        "int4, 2 processes, sealed, x float32",
        "allreduce",
        "2/sealed/int4/over_float32",
        ">= 2.5 x",
    ),
    Row(
        "int4, 4 processes, sealed, x float32",
        "allreduce",
        "4/sealed/int4/over_float32",
        ">= 2.5 x",
    ),
    Row("WAN, 16 MiB: of the rate", "wan", "4x100/sealed/float32/16/used", ">= 88 %"),
    Row("WAN, 64 MiB: of the rate", "wan", "4x100/sealed/float32/64/used", ">= 93 %"),
    Row(
        "WAN, 64 MiB, 0.5 % loss, cubic: of the rate",
        "wan-loss",
        "4x100/sealed/float32/64/used",
        ">= 85 %",
    ),
    Row(
        "one host at 20 Mbit/s: beyond the best split",
        "wan-slow",
        "4x100/sealed/float32/16/over_best",
        "<= 10 %",
    ),
    Row("int8 encode, one core", "kernels", "int8/encode", ">= 8 GB/s"),
    Row("int8 decode and add, one core", "kernels", "int8/decode_add", ">= 8 GB/s"),
    Row("int4 encode, one core", "kernels", "int4/encode", ">= 8 GB/s"),
    Row("int4 decode and add, one core", "kernels", "int4/decode_add", ">= 8 GB/s"),
    Row("daemon in a round of 10M, per parameter", "memory", "10000000/peak", "<= 12 bytes"),
    Row("daemon in a round of 100M, per parameter", "memory", "100000000/peak", "<= 12 bytes"),
    Row("SIGKILL of one of four, median", "recovery-member", "member/median", "<= 0.15 s"),
    Row("one of eight killed at half: extra time", "resend", "extra/median", "< 25 %"),
    Row("one of eight killed at half: sent again", "resend", "again/median", "< 20 %"),
    Row("... as the daemons count it", "resend", "counted/median", "< 20 %"),
    Row("cost model, 16 peers, what is chosen: worst", "costs", "16/chosen/worst", "<= 10 %"),
    Row("cost model, 32 peers, what is chosen: worst", "costs", "32/chosen/worst", "<= 10 %"),
    Row("cost model, 16 peers, every shape: worst", "costs", "16/worst", "<= 10 %"),
    Row("cost model, 32 peers, every shape: worst", "costs", "32/worst", "<= 10 %"),
    Row(
        "cost model, 16 hosts of a lab",
        "costs-real-16",
        "16x20/sealed/float32/8/model_error",
        "<= 10 %",
    ),
    Row(
        "cost model, 32 hosts of a lab",
        "costs-real-32",
        "32x10/sealed/float32/8/model_error",
        "<= 10 %",
    ),
    # that of issue 3, as far as it is measured
    Row("SIGKILL of one of four, worst", "recovery-member", "member/worst", "< 0.6 s"),
    Row("SIGKILL of the coordinator, worst", "recovery", "coordinator/worst", "< 0.8 s"),
    Row("SIGKILL of the first peer, worst", "recovery", "first/worst", "< 0.8 s"),
    Row("SIGSTOP of one of four, worst", "recovery", "stop/worst", "< 2.5 s"),
    Row("... from SIGCONT until it contributes, worst", "recovery", "back/worst", "< 5 s"),
    Row("coordinator, silent host, 300 ms, worst", "recovery", "far/coordinator/worst", "< 3 s"),
    Row("first peer, silent host, 300 ms, worst", "recovery", "far/first/worst", "< 3 s"),
    Row("1 GiB of state: of the joiner's link", "join", "link_used", ">= 90 %"),
    Row("... donors' rounds longer by", "join", "donors_longer", "<= 5 %"),
    # that of issue 5
    Row("DiLoCo, 50 Mbit/s, 80 ms: trainers compute", "utilization", "diloco/computes", "< 80 %"),
    Row("... StreamingDiLoCo", "utilization", "streaming_diloco/computes", ">= 95 %"),
    # that of issue 6
    Row(
        "trimmed(f=3), 16 peers, longer than the mean by",
        "robust",
        "int8/trimmed(f=3)/over_mean",
        "<= 50 %",
    ),
    Row(
        "meamed(f=3), 16 peers, longer than the mean by",
        "robust",
        "int8/meamed(f=3)/over_mean",
        "<= 50 %",
    ),
    Row(
        "nnm+trimmed(f=3), 16 peers, longer than the mean by",
        "robust",
        "int8/nnm+trimmed(f=3)/over_mean",
        "<= 50 %",
    ),
    Row(
        "bulyan(f=3), 16 peers, longer than the mean by",
        "robust",
        "int8/bulyan(f=3)/over_mean",
        "<= 50 %",
    ),
    Row("audits, 50 Mbit/s, 20 ms: longer by", "audit", "50/longer", "<= 10 %"),
    Row("... more bytes", "audit", "50/more_bytes", "<= 1 %"),
    Row(
        "audits, loopback, 8 peers share the cores", "audit-loopback", "loopback/longer", "<= 10 %"
    ),
    Row("... more bytes", "audit-loopback", "loopback/more_bytes", "<= 1 %"),
    # that of issue 20
    Row(
        "first state, 4 hosts: over state / downlink",
        "first-state",
        "first_state/over_ideal",
        "<= 1.3 x",
    ),
    Row("... most sent, of the mean", "first-state", "first_state/most_over_mean", "<= 1.1 x"),
    Row("durable rounds: 10M every 5 s longer by", "durable", "durable/round_cost_share", "<= 2 %"),
    Row("... barrier() longer by", "durable", "durable/barrier_cost", "<= 1 ms"),
    Row(
        "restart at 100M: received, of the rounds missed and 1 MiB",
        "durable",
        "durable/restart_over_allowed",
        "<= 1 x",
    ),
    # that of issue 19
    Row(
        "one outbound of four: rounds, of all reachable",
        "reachable",
        "exchange/one/rounds",
        ">= 95 %",
    ),
    Row("... bytes of who sends most", "reachable", "exchange/one/bytes", "<= 105 %"),
    Row("two outbound, exchange 30 %: rounds", "reachable", "mixed/two/rounds", ">= 90 %"),
    Row("... exchange all of it: rounds", "reachable", "exchange/two/rounds", ">= 72 %"),
    Row("... bytes between the two, a round", "reachable", "exchange/two/between", "<= 8 KiB"),
    Row(
        "three outbound: longer than predicted by",
        "reachable",
        "exchange/three/over_prediction",
        "<= 15 %",
    ),
    Row("joining, outbound beside reachable", "reachable", "join/over_reachable", "<= 1.2 x"),
    # without a bar
    Row("audits, processors for each peer", "audit-loopback", "loopback/cpu", ""),
    Row("session, float32, 2 trainers, x Gloo", "session", "2/sealed/float32/over_gloo", ""),
    Row("session, float32, 4 trainers, x Gloo", "session", "4/sealed/float32/over_gloo", ""),
    Row("session, int8, 2 trainers, x Gloo", "session", "2/sealed/int8/over_gloo", ""),
    Row("session, int8, 4 trainers, x Gloo", "session", "4/sealed/int8/over_gloo", ""),
)


class Figure(NamedTuple):
    value: float
    unit: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="commands or figures, or parts")
    parser.add_argument("--times", type=int, default=0, help="repetitions; default: each its own")
    parser.add_argument("--list", action="store_true", help="rows and commands, without running")
    chosen = parser.parse_args()
    rows = picked(chosen.only)
    if not rows:
        parser.error(f"no row has {' or '.join(chosen.only)} in its name")
    if chosen.list:
        for row in rows:
            print(f"{row.command:<16} {row.figure:<36} {row.bar:<10} {row.what}")
        for name in dict.fromkeys(row.command for row in rows):
            print(f"{name}: {' '.join(words(COMMANDS[name], chosen.times))}")
        return
    found = {}
    for name in dict.fromkeys(row.command for row in rows):
        found[name] = measured(name, words(COMMANDS[name], chosen.times))
    print("\n".join(table(rows, found)))
    sys.exit(any(row.figure not in found[row.command] for row in rows))


def picked(names: Iterable[str]) -> list[Row]:
    """In the order of the table; all of them without names."""
    wanted = list(names) or [""]
    return [row for row in ROWS if any(name in f"{row.command} {row.figure}" for name in wanted)]


def words(command: Command, times: int) -> list[str]:
    """The command's line, with its own number of repetitions or another."""
    repeat = command.times.split()
    if repeat and times:
        repeat[-1] = str(times)
    return [*command.line.split(), *repeat]


def measured(name: str, line: list[str]) -> dict[str, Figure]:
    """Run it, let its output pass, and collect its figures: those that came before it failed."""
    print(f"== {name}: {' '.join(line)}", flush=True)
    found = {}
    command = [sys.executable, str(FOLDER / line[0]), *line[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # As Ctrl+C does: a script ends its daemons and namespaces on the way out.
        clock = threading.Timer(LIMIT_S, process.send_signal, (signal.SIGINT,))
        clock.start()
        for text in process.stdout:
            print(text, end="", flush=True)
            if (result := results.parsed(text)) is not None:
                found[result[0]] = Figure(*result[1:])
        process.wait()
        clock.cancel()
    if process.returncode:
        print(f"== {name} ended with exit code {process.returncode}", flush=True)
    return found


def verdict(bar: str, figure: Figure | None) -> str:
    if figure is None:
        return "no figure"
    if not bar:
        return "-"
    sign, limit, unit = bar.split()
    if unit != figure.unit:
        return f"not in {unit}"
    value, goal = figure.value, float(limit)
    met = {">=": value >= goal, "<=": value <= goal, "<": value < goal}[sign]
    return "yes" if met else "NO"


def table(rows: list[Row], found: dict[str, dict[str, Figure]]) -> list[str]:
    lines = [("what", "bar", "measured", "met?")]
    for row in rows:
        figure = found[row.command].get(row.figure)
        shown = f"{figure.value:g} {figure.unit}" if figure is not None else ""
        lines.append((row.what, row.bar or "none", shown, verdict(row.bar, figure)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


if __name__ == "__main__":
    main()
