"""Several processes of one machine as one trainer: DDP, or FSDP2, whose ranks share a daemon.

    session = atoll.connect() if dist.get_rank() == 0 else None
    outer = DiLoCo(model, inner, 500, peer=RankSession(session))

Rank 0 talks to the daemon. What the others have to say and to hear passes through memory that all
of them map: each writes the rows that it holds, and reads those. All make the same calls in the
same order, and get the same answers. Nothing is pickled: small answers travel as float64 tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from atoll.collectives.codecs import F32
from atoll.collectives.errors import AtollError, ConfigError, SessionError
from atoll.optim.manifest import Manifest
from atoll.optim.sessions import GossipSession, TrainerSession
from atoll.optim.spec import RunSpec
from atoll.peer.session import Outcome, Region, map_floats

__all__ = ["RankSession"]

KINDS = ("committed", "missed", "reload")
T = TypeVar("T")


class RankSession:
    """``session`` is rank 0's, and None on the others; ``group``: the ranks of this machine, which
    must be able to exchange tensors of the CPU (gloo). It takes the place of a session.

    A submission weighs what those of all ranks weigh together. Costs 8 bytes of host memory for
    each parameter. ConfigError where rank 0 has no session, or another one has.
    """

    def __init__(
        self, session: TrainerSession | None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._rank = dist.get_rank(group)
        if (session is None) == (self._rank == 0):
            raise ConfigError(
                f"rank {self._rank} has {'no' if session is None else 'a'} session",
                fix="call atoll.connect() on rank 0 alone, and give None on the others",
            )
        self._session, self._group = session, group
        self.round = self.epoch = self.operations = 0
        self._peers: tuple[str, ...] = ()  # of the last round; rank 0 alone knows them
        self._fragments: list[slice] = []
        self._out: F32 = np.empty(0, np.float32)  # what the ranks submit ...
        self._in: F32 = np.empty(0, np.float32)  # ... and the run's parameters

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        ranges = [manifest.chunks_of(number, spec.fragments) for number in range(spec.fragments)]
        grid = manifest.grid
        self._fragments = [slice(grid.bounds(a)[0], grid.bounds(b - 1)[1]) for a, b in ranges]
        shared = self._share(2 * manifest.elements)
        self._out, self._in = shared[: manifest.elements], shared[manifest.elements :]
        initial(self._out)
        self._meet()
        self._lead(lambda s: s.attach(spec, manifest, lambda flat: np.copyto(flat, self._out)))

    def submit(self, fill: Callable[[F32], None], weight: float, fragment: int = 0) -> None:
        fill(self._out)
        total = torch.tensor([weight], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)  # so all have filled in their rows
        part = self._fragments[fragment]

        def copy(flat: F32) -> None:
            flat[part] = self._out[part]

        self._lead(lambda s: s.submit(copy, float(total), fragment))

    def wait(self, fragment: int = 0) -> Outcome:
        def ask(session: TrainerSession) -> list[float]:
            outcome = session.wait(fragment)
            self._peers = outcome.peers
            kind = KINDS.index(outcome.kind)
            return [kind, outcome.round, outcome.waited_s, outcome.share]

        kind, number, waited_s, share = self._lead(ask, answers=4)
        return Outcome(KINDS[int(kind)], int(number), waited_s, share, self._peers)

    def pull(self, read: Callable[[F32], None]) -> int:
        def copy(session: TrainerSession) -> list[float]:
            session.pull(lambda flat: np.copyto(self._in, flat))
            return [session.round, session.epoch, session.operations]

        self.round, self.epoch, self.operations = map(int, self._lead(copy, answers=3))
        shown = self._in.view()
        shown.flags.writeable = False
        read(shown)
        self._meet()  # nobody overwrites what another one is reading
        return self.round

    def next_fragment(self) -> int:
        return int(self._lead(lambda s: [s.next_fragment()], answers=1)[0])

    def replicas(self) -> int:
        return int(self._lead(lambda s: [s.replicas()], answers=1)[0])

    def lead(self, ask: Callable[[GossipSession], F32], elements: int) -> F32:
        heard = torch.zeros(elements)

        def hear(session: TrainerSession) -> list[float]:
            heard.copy_(torch.from_numpy(ask(cast(GossipSession, session))))
            return []

        self._lead(hear)
        if elements:
            dist.broadcast(heard, group_src=0, group=self._group)
        values: F32 = heard.numpy()
        return values

    def first_rank(self, value: float) -> float:
        return self._lead(lambda s: [value], answers=1)[0]

    def all_true(self, mine: bool) -> bool:
        flag = torch.tensor([float(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def check(self) -> None:
        """Of rank 0 alone: the others notice at the next exchange."""
        if self._session is not None:
            self._session.check()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    # ------------------------------------------------------------ inside

    def _lead(
        self, ask: Callable[[TrainerSession], list[float] | None], answers: int = 0
    ) -> list[float]:
        """What rank 0 hears; its error is raised on all ranks, by the others as SessionError."""
        said = torch.zeros(1 + answers, dtype=torch.float64)
        failed: AtollError | None = None
        if self._session is not None:
            try:
                found = ask(self._session)
                said[1:] = torch.tensor(found or [], dtype=torch.float64)
                said[0] = 1.0
            except AtollError as error:
                failed = error
        dist.broadcast(said, group_src=0, group=self._group)
        if failed is not None:
            raise failed
        if not said[0]:
            raise SessionError("rank 0 of this trainer failed", fix="see what it has printed")
        return said[1:].tolist()

    def _meet(self) -> None:
        dist.barrier(group=self._group)

    def _share(self, elements: int) -> F32:
        """Memory of rank 0 that all ranks map, float32[elements], zero at first."""
        place = torch.zeros(2, dtype=torch.int64)
        region = Region("ranks", elements) if self._rank == 0 else None
        if region is not None:
            place[:] = torch.tensor([os.getpid(), region.fd])
        dist.broadcast(place, group_src=0, group=self._group)
        if region is not None:
            self._meet()
            region.close()
            return region.floats
        fd = os.open(f"/proc/{int(place[0])}/fd/{int(place[1])}", os.O_RDWR)
        try:
            return map_floats(fd, elements, writable=True)
        finally:
            os.close(fd)
            self._meet()
