"""Runs rows, each in a process of its own, some at a time, and keeps what they give at once.

A row's process ends by itself when this one has died, however it died; what it had not finished
is begun anew next time. What it prints goes into a log, which is shown if it fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.peer.demo.text import Text
from benchmarks.convergence.report import replace_file
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.texts import text_of

__all__ = ["Runner", "add_options", "one_row", "run_pending", "say_done"]

POLL_S = 0.2  # rows take minutes
WHY_CHARACTERS = 60  # of the reason why a row has no end
LOG_LINES = 15  # of a process that failed


@dataclass
class _Running:
    row: Row
    process: subprocess.Popen[str]
    log: Path


class Runner:
    """``command``: the process of a row, which prints its result. ``done`` is called after each."""

    def __init__(
        self,
        results: Results,
        logs: Path,
        jobs: int,
        command: Callable[[Row], list[str]],
        done: Callable[[Result], None],
    ) -> None:
        self._results, self._logs, self._jobs = results, logs, jobs
        self._command, self._done = command, done
        self._running: list[_Running] = []
        self._broken: set[Row] = set()

    def run(self, pending: Callable[[], list[Row]], until_s: float = float("inf")) -> list[Row]:
        """Until nothing is ``pending`` (it is asked after each row), or the monotonic clock shows
        ``until_s``: then what is running ends, and nothing is begun. The rows whose processes
        failed, which is not to say that they diverged."""
        try:
            while True:
                busy = [each.row for each in self._running]
                wanted = [row for row in pending() if row not in (*busy, *self._broken)]
                if time.monotonic() < until_s:
                    for row in wanted[: self._jobs - len(busy)]:
                        self._running.append(self._begin(row))
                if not self._running:
                    return sorted(self._broken, key=lambda row: row.name)
                self._wait_for_one()
        finally:
            for each in self._running:
                each.process.kill()
                each.process.communicate()

    def _begin(self, row: Row) -> _Running:
        log = self._logs / (row.name.replace("/", "_") + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            process = subprocess.Popen(
                self._command(row),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # one line of JSON: it never fills
                stderr=errors,
                text=True,
            )
        return _Running(row, process, log)

    def _wait_for_one(self) -> None:
        while all(each.process.poll() is None for each in self._running):
            time.sleep(POLL_S)
        for each in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(each)
            said, _ = each.process.communicate()
            if each.process.returncode:
                self._broken.add(each.row)
                tail = each.log.read_text().splitlines()[-LOG_LINES:]
                print("\n    ".join([f"{each.row.name} failed:", *tail]), flush=True)
                continue
            result = Result.from_json(said)
            self._results.add(result)
            self._done(result)


def add_options(parser: argparse.ArgumentParser, kept: Path, cache: Path) -> None:
    """Add what every benchmark of rows takes that keeps results, and tables made from them."""
    a = parser.add_argument
    a("--list", action="store_true", help="the rows that are left, without running them")
    a("--minutes", type=float, default=float("inf"), help="begin no row after this time")
    jobs = 1 if torch.cuda.is_available() else 2
    a("--jobs", type=int, default=jobs, help="rows at a time (default: %(default)s)")
    a("--out", type=Path, default=kept, help="folder of results.jsonl and of the tables")
    a("--cache", type=Path, default=cache, help="folder of warm starts and logs")
    a("--one", metavar="ROW", help=argparse.SUPPRESS)  # what the processes of rows are told


def run_pending(
    module: str,
    chosen: argparse.Namespace,
    results: Results,
    pending: Callable[[], list[Row]],
    document: Callable[[Results], str],
) -> int:
    """Run what is ``pending``, by ``module --one ROW`` each; return the exit code.

    ``chosen``: as ``add_options`` says. After each row the ``document`` is written anew.
    """
    began_s = time.monotonic()

    def write() -> None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        replace_file(chosen.out / "README.md", document(results))

    def done(result: Result) -> None:
        write()
        say_done(result, began_s, len(pending()))

    def command(row: Row) -> list[str]:
        return [sys.executable, "-m", module, "--cache", str(chosen.cache), "--one", row.name]

    runner = Runner(results, chosen.cache / "logs", chosen.jobs, command, done)
    broken = runner.run(pending, began_s + 60 * chosen.minutes)
    write()
    print("\n".join([*(f"{row.name} failed" for row in broken), f"tables: {chosen.out}"]))
    return 1 if broken else 0


def say_done(result: Result, began_s: float, left: int) -> None:
    """Print a line about a row that has ended, and how many rows are left.

    ``began_s``: when the benchmark began, on the monotonic clock.
    """
    came = f"failed: {result.failed[:WHY_CHARACTERS]}" if result.failed else f"{result.loss:.4f}"
    print(
        f"{(time.monotonic() - began_s) / 60:6.1f} min  {result.row.name}  {came}, "
        f"{result.sent_bytes:,.0f} bytes per peer, {result.cpu_s:.0f} s of CPU; {left} rows left",
        flush=True,
    )


def one_row(
    run: Callable[[Text, Path, Callable[[], None]], Result], cache: Path, text_name: str = "library"
) -> int:
    """Print what ``run`` gives of the text, in the process of a row.

    It is also given the folder of warm starts, and what it has to call often.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # another row has the other core
    torch.set_float32_matmul_precision("high")  # tensor cores, where there are any
    parent = os.getppid()

    def each_step() -> None:
        if os.getppid() != parent:
            sys.exit("the benchmark has ended")

    text = text_of(text_name, log=lambda line: print(line, file=sys.stderr))
    print(run(text, cache / "warm", each_step).to_json(), flush=True)
    return 0
