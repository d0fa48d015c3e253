"""Make several processes of one machine one trainer: the ranks of DDP or FSDP2 share a daemon.

    outer = DiLoCo(model, inner, 500, peer=atoll.attach())

Rank 0 talks to the daemon. What the others have to say and to hear passes through memory that all
of them map: each writes the rows that it holds, and reads those. All make the same calls in the
same order, and get the same answers: ``state_dict()``, which each saves for itself, and
``outer_parameters()`` too. Nothing is pickled: small answers travel as float64 tensors.

For the methods with rounds. GradientAverage, DeMo, ZerothOrder, NoLoCo and Population hold what
belongs to a whole model in one process: ConfigError. Buffers of the model are those of rank 0, as
with DDP, weighed by what all ranks have trained.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist

from atoll.collectives.codecs import F32
from atoll.collectives.errors import AtollError, ConfigError, SessionError
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.run_spec import FROZEN, RunSpec
from atoll.optim.sessions import RoundChannel, TrainerSession, VectorChannel
from atoll.peer.client.console import speak
from atoll.peer.client.session import CONNECT_TIMEOUT_S, Session, connect
from atoll.peer.client.shared_memory import Region, map_floats
from atoll.peer.client.trainer_channel import RECONNECT_S, Outcome

KINDS = ("committed", "missed", "reload")
STEP_FLOATS = 2  # as long as the number of a step, at the end of what the ranks share

LET_GO_S, LET_GO_POLL_S = 1.0, 0.001  # at the end of a script; usually it is microseconds
_exchanged: deque[torch.Tensor] = deque(maxlen=4)  # see _kept: more than Gloo has threads


def attach(
    home: str | Path | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    reconnect_s: float = RECONNECT_S,
) -> Session | RankSession:
    """Return what a method takes as ``peer``: a session with the daemon of ``home``.

    In each of several processes that are one trainer, such as those of torchrun, it is a
    RankSession.

    All of them call it. ``group``: those of this machine; by default all that there are. Where
    there is no process group yet, torchrun's is made, for tensors of the CPU and of CUDA if there
    is any; a group of NCCL alone gets one of gloo beside it. Nothing else is set, no device either.

    ``reconnect_s``: as ``atoll.connect`` has it. ConfigError for ranks on several machines;
    otherwise as ``atoll.connect``, on all ranks.
    """
    if not dist.is_initialized():
        # One process of torchrun gets a group like several, as scripts for those go on with it.
        is_single = os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_torchelastic_launched()
        if group is None and is_single:
            return connect(home, timeout_s=timeout_s, reconnect_s=reconnect_s)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if group is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
        if local < dist.get_world_size():
            raise ConfigError(
                f"{local} of {dist.get_world_size()} ranks are on this machine: the ranks of one "
                "machine are a trainer, and other machines are other trainers",
                fix="start torchrun on each machine by itself (--nnodes 1), beside a daemon of its "
                "own; or give attach() the group of this machine's ranks, if the model is shared "
                "among those alone",
            )
        if not _has_host(group):
            group = dist.new_group(backend="gloo")
    if dist.get_world_size(group) == 1:
        return connect(home, timeout_s=timeout_s, reconnect_s=reconnect_s)
    _check_group(group)
    session: Session | None = None
    failed: AtollError | None = None
    if dist.get_rank(group) == 0:
        try:
            session = connect(home, timeout_s=timeout_s, reconnect_s=reconnect_s)
        except AtollError as error:  # the other ranks must not wait for it
            failed = error
    connected = torch.tensor([float(failed is None)])
    dist.broadcast(_kept(connected), group_src=0, group=group)
    if not connected:
        raise failed or _failed()
    return RankSession(session, group)


class RankSession:
    """Take the place of a session in each of several processes that are one trainer.

    ``session`` is rank 0's, and None on the others; ``group``: the ranks of this machine, which
    must be able to exchange tensors of the CPU (gloo).

    A submission weighs what those of all ranks weigh together. Costs 8 bytes of host memory for
    each parameter; what a method takes of it besides, each rank takes. ConfigError where rank 0 has
    no session, or another one has, and for a group that has no backend for the CPU.
    """

    def __init__(
        self, session: TrainerSession | None, group: dist.ProcessGroup | None = None
    ) -> None:
        _check_group(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        speak(self.rank == 0)
        if (session is None) == (self.rank == 0):
            raise ConfigError(
                f"rank {self.rank} has {'no' if session is None else 'a'} session",
                fix="call atoll.connect() on rank 0 alone, and give None on the others",
            )
        self._session, self._group = session, group
        self.round = self.epoch = self.operations = 0
        self._peers: tuple[str, ...] = ()  # of the last round; rank 0 alone knows them
        self._fragments: list[slice] = []
        self._out: F32 = np.empty(0, np.float32)  # what the ranks submit ...
        self._in: F32 = np.empty(0, np.float32)  # ... and the run's parameters
        self._last_step = np.zeros(1, np.int64)  # after which all leave; 0: nobody was told to

    is_stale = False  # rank 0 hears of that with its next submission, and so do all

    @property
    def keeps_rounds(self) -> bool:
        """Return whether the daemon keeps rounds on its disk, as far as this process knows."""
        leader = self._leader
        return leader is None or getattr(leader, "keeps_rounds", True)

    @property
    def channel(self) -> Self:
        """Return this, which is the ranks' own channel."""
        return self

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
    ) -> None:
        count = spec.fragments
        self._fragments = [manifest.part_of(number, count) for number in range(count)]
        both = 2 * manifest.elements
        shared = self._share(both + STEP_FLOATS)
        self._out, self._in = shared[: manifest.elements], shared[manifest.elements : both]
        self._last_step = shared[both:].view(np.int64)
        initial(self._out)
        self._meet()
        self._lead(lambda s: s.attach(spec, manifest, lambda f: np.copyto(f, self._out), frozen))

    def submit(self, write: Writer, weight: float, fragment: int = 0) -> None:
        part = self._fragments[fragment]
        write(self._out[part], part.start)
        total = self.total(weight)  # so all have filled in their rows

        def copy(out: F32, lo: int) -> None:
            np.copyto(out, self._out[lo : lo + out.size])

        self._lead(lambda s: s.submit(copy, total, fragment))

    def wait(self, fragment: int = 0) -> Outcome:
        def ask(leader: RoundChannel) -> list[float]:
            outcome = leader.wait(fragment)
            self._peers = outcome.peers
            kind = KINDS.index(outcome.kind)
            return [kind, outcome.round, outcome.waited_s, outcome.share, outcome.count]

        kind, number, waited_s, share, count = self._lead(ask, 5)
        return Outcome(KINDS[int(kind)], int(number), waited_s, share, self._peers, int(count))

    def pull(self, read: Callable[[F32], None]) -> int:
        def copy(leader: RoundChannel) -> list[float]:
            leader.pull(lambda flat: np.copyto(self._in, flat))
            return []

        self._lead(copy)
        shown = self._in.view()
        shown.flags.writeable = False
        read(shown)
        self._meet()  # nobody overwrites what another one is reading
        return self.round

    def next_fragment(self) -> int:
        return int(self._lead(lambda s: [s.next_fragment()], 1)[0])

    def replicas(self) -> int:
        return int(self._lead(lambda s: [s.replicas()], 1)[0])

    def lead(self, ask: Callable[[VectorChannel], F32], elements: int) -> F32:
        heard = torch.zeros(elements)

        def hear(leader: RoundChannel) -> list[float]:
            heard.copy_(torch.from_numpy(ask(cast(VectorChannel, leader))))
            return []

        self._lead(hear)
        if elements:
            dist.broadcast(_kept(heard), group_src=0, group=self._group)
        values: F32 = heard.numpy()
        return values

    def first_rank(self, value: float) -> float:
        return self._lead(lambda s: [value], 1)[0]

    def all_true(self, mine: bool) -> bool:
        flag = torch.tensor([float(mine)])
        dist.all_reduce(_kept(flag), dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def leaves_after(self, step: int, asked: bool) -> bool:
        """Return whether all ranks leave after this step.

        The first rank says which one that is: the next, because others may have this one behind
        them. None of them ends the next step before it has said so, as each exchanges gradients
        with it.
        """
        if asked and self.rank == 0 and not self._last_step[0]:
            self._last_step[0] = step + 1
        return 0 < int(self._last_step[0]) <= step

    def total(self, mine: float) -> float:
        total = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(_kept(total), group=self._group)
        return float(total)

    def whole(self, write: Callable[[F32], None], flat: F32, part: slice) -> None:
        write(self._out)
        self._meet()
        flat[part] = self._out[part]
        self._meet()  # nobody overwrites what another one is reading

    def check(self) -> None:
        """Raise on rank 0 if its daemon is gone; the other ranks notice at the next exchange."""
        if (leader := self._leader) is not None:
            leader.check()

    def hurry(self, wait_s: float) -> AbstractContextManager[None]:
        leader = self._leader
        return nullcontext() if leader is None else leader.hurry(wait_s)

    def end_within(self, wait_s: float) -> None:
        if (leader := self._leader) is not None:
            leader.end_within(wait_s)

    def observe(self, **figures: Any) -> None:
        """Remember figures of a local step, on rank 0 alone."""
        if (leader := self._leader) is not None:
            leader.observe(**figures)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    # ------------------------------------------------------------ inside

    @property
    def _leader(self) -> RoundChannel | None:
        """Return the channel to the daemon, on rank 0 alone."""
        return self._session.channel if self._session is not None else None

    def _lead(
        self, ask: Callable[[RoundChannel], list[float] | None], answers: int = 0
    ) -> list[float]:
        """Ask the channel of rank 0, and return its ``answers`` numbers on all ranks.

        All ranks also learn where that session is (round, epoch, operations). An error of rank 0 is
        raised on all ranks, by the others as SessionError.
        """
        said = torch.zeros(4 + answers, dtype=torch.float64)
        failed: AtollError | None = None
        if (leader := self._leader) is not None:
            try:
                found = ask(leader) or []
                where = [leader.round, leader.epoch, leader.operations]
                said[:] = torch.tensor([1.0, *where, *found], dtype=torch.float64)
            except AtollError as error:
                failed = error
        dist.broadcast(_kept(said), group_src=0, group=self._group)
        if failed is not None:
            raise failed
        if not said[0]:
            raise _failed()
        self.round, self.epoch, self.operations = map(int, said[1:4])
        return said[4:].tolist()

    def _meet(self) -> None:
        dist.barrier(group=self._group)

    def _share(self, elements: int) -> F32:
        """Return memory of rank 0 that all ranks map, float32[elements], zero at first.

        ConfigError, on the others SessionError, if there is none; ConfigError on all if one cannot
        map it.
        """
        place = torch.zeros(3, dtype=torch.int64)
        region: Region | None = None
        failed: Exception | None = None
        if self.rank == 0:
            try:
                region = Region("ranks", elements)
                place[:] = torch.tensor([os.getpid(), region.fd, os.fstat(region.fd).st_ino])
            except (ConfigError, OSError) as error:
                failed = error
        dist.broadcast(_kept(place), group_src=0, group=self._group)
        if not place[0]:
            raise failed or _failed()
        mapped = region.floats if region is not None else _mapped(place.tolist(), elements)
        everywhere = self.all_true(mapped is not None)
        if region is not None:
            region.close()
        if mapped is None or not everywhere:
            raise ConfigError(
                f"a rank cannot open the memory of rank 0 (/proc/{int(place[0])}/fd)",
                fix="run all ranks of a trainer on one machine, as one user, in one container; "
                "give RankSession the group of those",
            )
        return mapped


def _kept(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is to be exchanged, and keep it until a few others have been.

    A thread of Gloo lets go of it after the call has returned. If Python has dropped it by then,
    that thread has to ask for the interpreter; and where the script ends just then, it is ended in
    the middle of C++, and the process with it (SIGABRT).
    """
    _exchanged.append(values)
    return values


@atexit.register
def _wait_for_gloo() -> None:
    """Wait until Gloo has let go of what was exchanged last."""
    by_s = time.monotonic() + LET_GO_S
    while any(map(_is_shared, _exchanged)) and time.monotonic() < by_s:
        time.sleep(LET_GO_POLL_S)


def _is_shared(values: torch.Tensor) -> bool:
    """Return whether something in C++ holds a tensor, beside Python; torch may not tell."""
    count: Callable[[], int] = getattr(values, "_use_count", lambda: 1)
    return count() > 1


def _mapped(place: list[int], elements: int) -> F32 | None:
    """Map memory of another process (its id, descriptor, inode); None if it cannot be had."""
    pid, fd, inode = place
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if os.stat(path).st_ino != inode:
            return None  # in another container it may be anybody's
        own = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return map_floats(own, elements, writable=True)
    except (OSError, ValueError):
        return None
    finally:
        os.close(own)


def _check_group(group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError if the group cannot exchange tensors of the CPU."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group",
            fix='call torch.distributed.init_process_group("cpu:gloo,cuda:nccl") first',
        )
    if not _has_host(group):
        backends = dist.get_backend_config(group)
        raise ConfigError(
            f"a process group with the backends {backends} exchanges no tensors of the CPU",
            fix='give RankSession group=torch.distributed.new_group(backend="gloo"), made on all '
            'ranks; or begin with init_process_group("cpu:gloo,cuda:nccl")',
        )


def _has_host(group: dist.ProcessGroup | None) -> bool:
    """Return whether the group exchanges tensors of the CPU."""
    backends = dist.get_backend_config(group).split(",")
    return any(pair.startswith("cpu:") for pair in backends)


def _failed() -> SessionError:
    return SessionError("rank 0 of this trainer failed", fix="see what it has printed")
