"""What must not stop a run: a hung trainer, a late answer in an election, threads, silence."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Peer, Process, fleet, until

from atoll.collectives.threads import NICER

FLOODER = Path(__file__).parents[1] / "harness" / "flooder.py"
HOLD_S = 8.0  # how long a flooder keeps a connection that nobody ends


def test_fast_rounds_do_not_wait_half_a_minute_for_a_hung_trainer(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, inner_s=0.3)
        for name in "abc":
            run.peers[name].reaches(6)
        lead = run.peers[run.coordinator]
        run.trainers["b"].kill(signal.SIGSTOP)
        found = until(
            lambda: re.search(r"begins without \w+: the others have waited ([\d.]+) s", lead.text),
            "a round begins without b",
            lead,
        )
        assert 3 <= float(found.group(1)) < 20  # three rounds, on however busy a machine
        number = lead.status()["round"]
        for name in "abc":  # also the daemon of the trainer that hangs
            run.peers[name].reaches(number + 3)
        run.trainers["b"].kill(signal.SIGCONT)
        committed = len(
            [line for line in run.trainers["b"].lines if line.get("kind") == "committed"]
        )
        until(
            lambda: (
                len([x for x in run.trainers["b"].lines if x.get("kind") == "committed"])
                > committed
            ),
            "b takes part again",
            run.trainers["b"],
        )


def lives(peer: Peer) -> int:
    return peer.said("excluded") + peer.text.count("joining again as a new incarnation")


def test_a_killed_coordinator_costs_nobody_its_place(tmp_path: Path) -> None:
    """e answers no candidate, since it is stopped for the moment that the election takes.

    The election keeps whoever is silent; the killed one goes later, when it has not come back.
    """
    with fleet(tmp_path) as run:
        run.form("abcde")
        lead = run.coordinator
        rest = "abcde".replace(lead, "")
        late, others = rest[-1], rest[:-1]
        before = run.peers[others[0]].status()["view"]
        run.peers[late].kill(signal.SIGSTOP)
        run.peers[lead].kill()

        def elected() -> bool:
            return all(run.peers[name].try_status().get("view", 0) > before for name in others)

        until(elected, "the others have a new view", *run.peers.values())
        run.peers[late].kill(signal.SIGCONT)
        for name in rest:
            status = run.sees(name, 4)
            assert status["view"] == before + 2
        assert not any(lives(run.peers[name]) for name in rest)


def nice_of(pid: int) -> dict[int, tuple[str, int]]:
    """The name and nice value of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue  # it has ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        found[int(task.name)] = (name, int(rest.split()[16]))
    return found


def test_threads_that_compute_come_after_the_event_loop(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            run.train(name, 1e6)
        run.peers["a"].reaches(3)
        pid = run.peers["a"].pid
        usual = os.getpriority(os.PRIO_PROCESS, pid)

        def all_lower() -> dict[int, tuple[str, int]] | None:
            """A thread begins as what has made it."""
            threads = nice_of(pid)
            assert threads.pop(pid)[1] == usual
            computing = {t: x for t, x in threads.items() if not x[0].startswith("ZMQ")}
            lower = [nice for _, nice in computing.values() if nice == min(usual + NICER, 19)]
            return computing if 2 <= len(lower) == len(computing) else None

        assert until(all_lower, "all threads beside the loop are lower", run.peers["a"])


# ---------------------------------------------------------------- silence


@contextmanager
def flood(
    net: Net, run: Fleet, sources: Iterable[str], targets: str, rate: float
) -> Iterator[Process]:
    """From host "f" to the ports of these daemons."""
    ports = ",".join(f"{net.address(name)}:{NET_PORT}" for name in targets)
    command = [sys.executable, str(FLOODER), str(rate), str(HOLD_S), ",".join(sources), ports]
    flooder = Process(net.command("f", command), run.folder / "flooder.log")
    try:
        until(lambda: len(flooder.lines) >= 5, "silence has filled what it can", flooder)
        yield flooder
    finally:
        flooder.kill()
        flooder.ends()


@pytest.mark.parametrize("prefix", ["10.77.0.", "10.78.1."], ids=["our network", "another"])
def test_silence_keeps_no_newcomer_and_no_member_out(tmp_path: Path, prefix: str) -> None:
    sources = [f"{prefix}{100 + number}" for number in range(16)]
    with Net("abcdf") as net, fleet(tmp_path, net) as run:
        net.also("f", sources)
        run.form("abc")
        for name in "ab":
            run.train(name)
        run.peers["a"].reaches(3)
        with flood(net, run, sources, "abc", 30):
            number = run.peers["a"].status()["round"]
            run.peers["c"].kill()
            run.peers["c"].ends()
            run.restart("c")
            run.join("d")
            for name in "abcd":
                run.sees(name, 4)
            for name in "abcd":
                run.peers[name].reaches(number + 3)
        assert run.agree("ab") >= 1
