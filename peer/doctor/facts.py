"""Hold what is found out about a machine and a run, and what is said of it. Sans-I/O.

Probes collect facts (machine_probe.py, run_probe.py), checks turn them into lines (table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from atoll.peer.daemon.reachability import DialledBy

OK: Final = "ok"
WARN: Final = "warn"  # it trains, and something could be better
FAIL: Final = "fail"  # it keeps this machine from training
SKIPPED: Final = "skipped"  # not asked for, or something before it has failed
Status: TypeAlias = Literal["ok", "warn", "fail", "skipped"]
# What scripts get of a line: a number, a text, or a few of them by name.
Value: TypeAlias = str | int | float | bool | list[str] | Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Say what a check has come to: ``what`` was found, and what to do about it (``fix``)."""

    status: Status
    what: str
    fix: str = ""
    value: Value = None


def ok(what: str, value: Value = None) -> Diagnosis:
    return Diagnosis(OK, what, "", value)


def warn(what: str, fix: str, value: Value = None) -> Diagnosis:
    return Diagnosis(WARN, what, fix, value)


def fail(what: str, fix: str, value: Value = None) -> Diagnosis:
    return Diagnosis(FAIL, what, fix, value)


def skipped(why: str) -> Diagnosis:
    return Diagnosis(SKIPPED, f"not checked, because {why}")


# ---------------------------------------------------------------- this machine


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Hold what was found of a folder.

    ``problem`` says why nothing can be written there, and ``fix`` what to do; ``disk`` is the
    folder itself, or the nearest one above it that is there; ``taken_bytes`` what the run's
    checkpoints in it have already. ``daemon``: whether a daemon holds this folder as its home.
    """

    path: str
    disk: str
    free_bytes: int
    problem: str = ""
    fix: str = ""
    taken_bytes: int = 0
    daemon: bool = False


@dataclass(frozen=True, slots=True)
class ProxyFacts:
    """Hold what a SOCKS5 proxy has answered, after how long; ``problem``: why it is of no use."""

    name: str
    took_s: float = 0.0
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Hold what torch says of the GPUs: their names, and the memory of each.

    ``problem``: why torch could not be asked.
    """

    torch: str = ""
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Hold what was found of this machine.

    Texts are those of files in /proc and /sys, "" where there are none: ``cpuinfo``, ``meminfo``,
    ``controls`` (the congestion controls that are loaded). ``memory_limit_bytes`` and
    ``memory_used_bytes``: of the control group, 0 where nothing limits it. ``bbr_refusal``: why a
    socket may not have BBR, "" if it may. ``port_problem``: why nothing can listen at ``listen``.
    ``address``: where packets to the run, or to the internet, come from; "" without a route.
    ``proxy``: of the one of --proxy, None without.
    """

    program: str
    protocol: int
    python: str
    kernels: str
    numpy_reason: str
    home: FolderFacts
    checkpoint: FolderFacts | None
    listen: str
    port_problem: str
    port_fix: str
    files_soft: int
    files_hard: int
    meminfo: str
    memory_limit_bytes: int
    memory_used_bytes: int
    cpuinfo: str
    controls: str
    bbr_refusal: str
    has_memfd: bool
    address: str
    gpu: GpuFacts
    proxy: ProxyFacts | None = None


# ---------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True)
class Trouble:
    """Hold why the member of the invite could not be asked, and at which stage that was."""

    stage: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """Hold what the member of the invite has said.

    ``observed``: the address that it saw this machine come from. ``clock_offset_s``: how far its
    clock is ahead of this machine's, ``clock_error_s`` by how much that may be wrong. ``elements``
    and what follows are of the run's model, 0 and "" while no trainer has brought one.
    """

    program: str
    protocol: int
    observed: str
    rtt_s: float
    clock_offset_s: float
    clock_error_s: float
    elements: int = 0
    state_bytes: int = 0
    daemon_bytes: int = 0
    method: str = ""
    codec: str = ""


@dataclass(frozen=True, slots=True)
class RateFacts:
    """Hold how fast bytes went one way: so many in so many seconds, or why that is not known."""

    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Hold what was found on the way into a run, as far as it went.

    ``invite_problem`` and ``invite_fix``: why `atoll join` would refuse the invite with this home.
    ``names_peer``: whether it says which peer made it; an authority's does not. ``proxy``: through
    which it was dialled, "" if directly. ``found``: the addresses of its host. ``tag`` names the
    secret that was tried. ``dialled``: what members came to that dialled back; None if nobody did,
    and ``not_dialled`` says why.
    """

    run: str
    host: str
    address: str
    tag: str
    names_peer: bool = True
    proxy: str = ""
    invite_problem: str = ""
    invite_fix: str = ""
    found: tuple[str, ...] = ()
    resolve_s: float = 0.0
    connect_s: float = 0.0
    trouble: Trouble | None = None
    answer: MemberAnswer | None = None
    dialled: DialledBy | None = None
    not_dialled: str = ""
    up: RateFacts | None = None
    down: RateFacts | None = None


class ModelNeeds(NamedTuple):
    """Hold what a model takes: its parameters, the daemon's memory, and a checkpoint's bytes.

    ``source`` says who says so: the run, or the user.
    """

    elements: int
    daemon_bytes: int
    checkpoint_bytes: int
    source: str


class Facts(NamedTuple):
    """Hold everything that was found out; ``run`` is None where no invite was given."""

    machine: MachineFacts
    run: RunFacts | None
    needs: ModelNeeds | None


class DoctorCheck(NamedTuple):
    """Hold one line of `atoll doctor`: its stable id, the group that it stands in, the check."""

    id: str
    group: str
    decide: Callable[[Facts], Diagnosis]
