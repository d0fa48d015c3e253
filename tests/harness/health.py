"""What must hold after every fault: one view, new rounds everywhere, equal bits, nothing leaked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.optim.footprint import log_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from harness.processes import WAIT_S, Fleet, until

__all__ = ["Ledger", "Usage", "assert_healthy", "usage"]

ROUNDS = 2  # that must commit on everybody after a fault
# Growth of a daemon that is none, beside the log of rounds, which fills up: what the two arenas of
# its allocator keep for the next round, links that are closing.
GROWTH_BYTES_MAX = 16 << 20
GROWTH_DESCRIPTORS_MAX = 24
GROWTH_THREADS_MAX = 16


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss_bytes: int
    descriptors: int
    threads: int
    children: int

    def exceeds(self, base: Usage, log_max_bytes: int = 0) -> str:
        """What has grown beyond what circumstances explain; "" if nothing."""
        found = []
        if self.rss_bytes > base.rss_bytes + GROWTH_BYTES_MAX + log_max_bytes:
            found.append(f"memory {base.rss_bytes >> 20} to {self.rss_bytes >> 20} MiB")
        if self.descriptors > base.descriptors + GROWTH_DESCRIPTORS_MAX:
            found.append(f"descriptors {base.descriptors} to {self.descriptors}")
        if self.threads > base.threads + GROWTH_THREADS_MAX:
            found.append(f"threads {base.threads} to {self.threads}")
        if self.children > base.children:
            found.append(f"children {base.children} to {self.children}")
        return ", ".join(found)


def usage(pid: int) -> Usage:
    """OSError if the process is gone."""
    folder = Path(f"/proc/{pid}")
    tasks = os.listdir(folder / "task")
    children = 0
    for task in tasks:
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            children += len((folder / "task" / task / "children").read_text().split())
    rss_pages = int((folder / "statm").read_text().split()[1])
    return Usage(
        rss_pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir(folder / "fd")),
        len(tasks),
        children,
    )


@dataclass
class Ledger:
    """Every state digest that any daemon has shown. Within a lineage a round has one."""

    digests: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    seen_by: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def note(self, name: str, status: dict[str, Any], after: int = -1) -> None:
        """AssertionError if this status contradicts an earlier one about a round after that."""
        if not status.get("lineage"):  # it has the state, but is not in a view yet
            return
        for number, digest in status["digests"].items():
            if int(number) <= after:
                continue
            key = (status["lineage"], int(number))
            first, told = self.digests.setdefault(key, (digest, name))
            assert first == digest, (
                f"round {number} of lineage {key[0]}: {told} had {first}, {name} has {digest}"
            )
            self.seen_by.setdefault(key, set()).add(name)

    def forget(self, before: int) -> int:
        """Drop older rounds, in runs of hours; how many of them two daemons had shown."""
        old = [key for key in self.digests if key[1] < before]
        compared = sum(len(self.seen_by[key]) > 1 for key in old)
        for key in old:
            del self.digests[key], self.seen_by[key]
        return compared

    def shared(self, names: Iterable[str], after: int = 0) -> list[int]:
        """The rounds after that one which all of these have shown (with one digest)."""
        wanted = set(names)
        return sorted(r for (_, r), by in self.seen_by.items() if r > after and wanted <= by)


def assert_healthy(run: Fleet, names: Iterable[str] = (), *, diverged: bool = False) -> int:
    """The common end of every test of a fault; the round that everybody has reached.

    All of ``names`` (default: every daemon of the fleet) are in one view, nobody else is, all hold
    the state, ROUNDS rounds commit from now on with a contribution of every trainer, their digests
    are equal, and no daemon holds more than at its best (``run.base``) plus what is explained.
    Digests of earlier rounds that anybody still shows must be equal as well, unless the fault was
    one that made them differ (``diverged``).
    """
    run.healthy = False
    names = sorted(names) or sorted(run.peers)
    ledger = Ledger()
    first = max(_rounds(run, names)) + UNEQUAL_ROUNDS if diverged else -1
    watched = [run.peers[name] for name in names]

    def look() -> dict[str, dict[str, Any]] | None:
        statuses = {name: run.peers[name].try_status() for name in names}
        for name, status in statuses.items():
            code = run.peers[name].popen.poll()
            assert code is None, f"{name} has ended with {code}"
            ledger.note(name, status, first)
        return statuses if all(statuses.values()) else None

    def together() -> int | None:
        statuses = look() or {}
        views = {(s["lineage"], s["view"], s["fork"]) for s in statuses.values()}
        whole = all(
            len(s["members"]) == len(names) and s["synced"] and s["phase"] in IN_A_VIEW
            for s in statuses.values()
        )
        if not statuses or len(views) > 1 or not whole:
            return None
        return 1 + max(s["round"] for s in statuses.values())

    began = until(together, f"{', '.join(names)} are one view", *watched) - 1
    assert not any(run.peers[name].status()["fork"] for name in names), "a fork"
    began = max(began, first)

    def commits() -> bool:
        return look() is not None and len(ledger.shared(names, began)) >= ROUNDS

    until(commits, f"{ROUNDS} rounds after {began} commit on {', '.join(names)}", *watched)
    for name in names:
        _contributes(run, name, began)
        _holds_no_more(run, name)
    run.healthy = True
    return max(ledger.shared(names, began))


IN_A_VIEW = ("coordinator", "member")
UNEQUAL_ROUNDS = 1  # after the one in which a divergence is noticed: one may be under way


def _rounds(run: Fleet, names: Iterable[str]) -> list[int]:
    return [int(run.peers[name].try_status().get("round", 0)) for name in names]


def _contributes(run: Fleet, name: str, after: int) -> None:
    trainer = run.trainers.get(name)
    if trainer is None:
        return

    def committed() -> bool:
        assert trainer.popen.poll() is None, f"{name}'s trainer has ended: {trainer.text[-500:]}"
        return any(x.get("kind") == "committed" and x["round"] > after for x in trainer.lines)

    until(committed, f"{name}'s trainer commits after round {after}", trainer, run.peers[name])


def _holds_no_more(run: Fleet, name: str) -> None:
    pid = run.peers[name].pid
    base = _largest(run.base.values()) if name in run.base else usage(pid)
    run.base.setdefault(name, base)
    log = log_of(run.peers[name].status())
    until(
        lambda: not usage(pid).exceeds(base, log),
        f"{name} holds no more than before: {usage(pid).exceeds(base, log)}",
        timeout_s=WAIT_S / 2,
    )


def log_of(status: dict[str, Any]) -> int:
    """Bytes that the log of rounds takes when it is full, for the model of this run."""
    if not status["spec"]:
        return 0
    manifest = Manifest.of([Parameter("w", (status["parameters"],))])
    return log_bytes(RunSpec(**status["spec"]), manifest)


def _largest(bases: Iterable[Usage]) -> Usage:
    """What the hungriest daemon held at first: a role or a restart is no leak."""
    known = list(bases)
    return Usage(
        max(b.rss_bytes for b in known),
        max(b.descriptors for b in known),
        max(b.threads for b in known),
        max(b.children for b in known),
    )
