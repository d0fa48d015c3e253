"""Compute the sum of all shards' gradients though some peers are late: sequential gradient coding.

Of n peers any s may be late in a round, and nobody waits for them. Peer i computes the gradients of
s + 1 of the n shards of a job, and gives one combination of them (1612.03301)::

    c_i = sum_j B_ij g_j        sum_j g_j = sum_i a_i c_i   for any n - s peers or more

and a is found by least squares from who is there. Where s + 1 divides n, groups of s + 1 peers have
the same s + 1 shards, and B is 1 there: one of each group is enough. Else peer i has the shards i,
i + 1, ... i + s (modulo n): H (s, n) is random with rows that sum to 0, and B_i, with B_ii = 1, the
only vector on these shards with H B_i = 0. So all B_i lie in the null space of H, of dimension
n - s, as (1, ... 1) does, and any n - s of them span it.

A job that has too few results when its round ends is repeated in the next one by those who gave
none, where they have left it, while the others take the next job (SR-SGC of 2211.13802 with a delay
of one round); then all wait for it. So late for a round is not late for a job, and s may be smaller
than the peers that are ever late at once.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError, StateError
from atoll.optim.compressors.orthogonal import random_matrix
from atoll.optim.sessions import OperationsSession

F64 = NDArray[np.float64]
RANDOM_MAX = 8  # peers; a random code of 16 rounds 10,000 times as much as a plain sum
DRAWS = 64  # of random codes, of which the one with the smallest numbers rounds least
EXACT = 1e-6  # the residual of a decoding that is one
# Of what a peer says in a step: settings, its next job, and how the two jobs before that stand.
_SAID: Final = struct.Struct("<8sQ2B")
_WORKS, _HAS, _LACKS = range(3)  # on the job; its result; neither, nor will it have one

# The gradient of shard ``shard`` of job ``job`` at a point, as pieces, float32[n] each, whose sum
# it is. Each sets the parameters to the point, which may have changed since the one before.
ShardGradient = Callable[[F32, int, int], Iterable[F32]]


class WholeGradient(NamedTuple):
    """Hold the gradient of a job: the sum over all shards, float32[n], the same bits everywhere."""

    job: int
    total: F32


@dataclass(slots=True, eq=False)
class _Job:
    """Hold what one peer has of a job: the sum over ``done`` shards, and the one under way."""

    number: int
    point: F32
    done: int = 0
    pieces: Iterator[F32] | None = None
    coded: F32 = field(init=False)

    def __post_init__(self) -> None:
        self.coded = np.zeros_like(self.point)


class CodedGradients:
    """Compute gradients of jobs, one begun at each step, without waiting for who is late.

    ``session``: of atoll, or of a ``Swarm``. ``peers``: the names of all, in the same order on all
    of them; there are as many shards. ``gradient``: see ``ShardGradient``; it is called for one
    shard after the other, s + 1 of them for each job, so data must be where they may be needed.
    ``late``: s, how many need not be waited for. ``deadline_s``: how long a step computes, about
    1.2 times what s + 1 shards take on a usual peer. Who is late says so after the piece that it is
    in, and for that all wait: let pieces be short. ``seed``: of the code, the same on all.
    ``clock``: what tells the time. ``begin_at``: the ``steps`` of the others, for who comes later;
    it needs their point as well.

    When it helps: where each step must have the gradient of all data, of whoever holds them, and
    peers are late now and then, by turns. It costs s + 1 times the computing, so it has to be cheap
    beside the waiting. Where data are drawn at random nothing is lost by leaving a late peer out,
    and ``DiLoCo(round_s=...)`` is faster: docs/log.md has the table. What a peer computes that is
    slow for good is never needed. It has no row on the convergence bench: its steps are those of
    data-parallel training.
    """

    def __init__(
        self,
        session: OperationsSession,
        peers: Sequence[str],
        gradient: ShardGradient,
        *,
        late: int,
        deadline_s: float,
        seed: int = 0,
        begin_at: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        size = len(peers)
        if session.peer_name not in peers or len(set(peers)) < size:
            raise ConfigError(
                f"peers {list(peers)[:5]} for {session.peer_name}",
                fix="name all peers once, this one too",
            )
        divides = late >= 0 and size % (late + 1) == 0
        if not (0 <= late < size and deadline_s > 0 and (divides or size <= RANDOM_MAX)):
            raise ConfigError(
                f"late {late} of {size}, deadline_s {deadline_s}",
                fix="let fewer be late than there are, give a positive time, and let late + 1 "
                f"divide the number of peers where there are more than {RANDOM_MAX}",
            )
        self._session, self._gradient, self._clock = session, gradient, clock
        self._peers, self._late, self._deadline_s = list(peers), late, deadline_s
        self._own = self._peers.index(session.peer_name)
        self._code = code_of(size, late, seed)
        self._shards = [int(shard) for shard in np.flatnonzero(self._code[self._own])]
        self._settings = hashlib.sha256(repr((list(peers), late, seed)).encode()).digest()[:8]
        self._jobs: list[_Job] = []  # not whole yet: the one of the last step, and the one of this
        self._size = 0  # of a point
        self.steps, self.repeated, self.waited = begin_at, 0, 0

    def step(self, point: F32 | None) -> list[WholeGradient]:
        """Begin the next job at ``point``; return those that are whole now: none, one or two.

        All give the same ``point``, float32[n]. A job that the last step began, and that was not
        whole then, is by the end of this one: so a gradient may be of the point before. None, after
        the last job, begins nothing and waits for what is left.

        Raise StateError if more than ``late`` peers are gone; RemoteProtocolError, with its name,
        if one has other settings or is at another step; CollectiveMissedError if the others went on
        without this one, which makes a new object with their point and ``begin_at`` then.
        """
        due = 0 if point is not None else 1  # of the two jobs that peers speak of
        if point is not None:
            self._jobs.append(_Job(self.steps, point.copy()))
            self.steps += 1
        self._size = self._size if point is None else point.size
        whole: list[WholeGradient] = []
        is_first = True
        while True:  # the session ends it where peers die or hang
            self._compute()
            said = self._said()
            whole += self._decoded(said)
            is_due = any(one[due] != _LACKS for one in said.values())
            self.repeated += is_first and is_due
            if not is_due or self.steps - 2 + due in [one.job for one in whole]:
                return whole
            self.waited, is_first = self.waited + 1, False

    def _compute(self) -> None:
        """Compute pieces of shards until the time is up, those of the older job first."""
        ends_s = self._clock() + self._deadline_s
        for job in self._jobs:
            while job.done <= self._late and self._clock() < ends_s:
                self._advance(job)

    def _advance(self, job: _Job) -> None:
        shard = self._shards[job.done]
        if job.pieces is None:
            job.pieces = iter(self._gradient(job.point, job.number, shard))
        piece = next(job.pieces, None)
        if piece is None:
            job.pieces, job.done = None, job.done + 1
        else:
            job.coded += np.float32(self._code[self._own, shard]) * piece

    def _said(self) -> dict[str, tuple[int, int]]:
        """Return how the last two jobs stand at each peer that is there."""
        own = {job.number: _HAS if job.done > self._late else _WORKS for job in self._jobs}
        stands = [own.get(number, _LACKS) for number in (self.steps - 2, self.steps - 1)]
        given = self._session.all_gather(_SAID.pack(self._settings, self.steps, *stands))
        return {name: self._read(name, data) for name, data in given if name in self._peers}

    def _decoded(self, said: Mapping[str, tuple[int, int]]) -> list[WholeGradient]:
        """Return the jobs of which enough have come, and forget them.

        All come to the same sums, also of jobs that they know nothing of.
        """
        whole = []
        here = [(n, said[name]) for n, name in enumerate(self._peers) if name in said]
        for place in range(2):
            came = [n for n, one in here if one[place] == _HAS]
            weights = decoding(self._code, came)
            if weights is not None:
                whole += self._sum(self.steps - 2 + place, came, weights)
            elif came and all(one[place] != _WORKS for _, one in here):
                raise StateError(
                    f"job {self.steps - 2 + place} has the results of {len(came)} of "
                    f"{len(self._peers)} peers, and nobody else is there",
                    fix=f"start the others again, or let more than {self._late} be late",
                )
        self._jobs = [job for job in self._jobs if job.number not in {one.job for one in whole}]
        return whole

    def _read(self, name: str, data: bytes) -> tuple[int, int]:
        """Return how the two jobs stand at a peer."""
        if len(data) != _SAID.size:
            raise _malformed(name, f"{len(data):,} bytes instead of {_SAID.size}")
        settings, steps, first, second = _SAID.unpack(data)
        if settings != self._settings:
            raise _malformed(name, "its peers, late or seed are others")
        if steps != self.steps or max(first, second) > _LACKS:
            raise _malformed(name, f"it is at step {steps}, and this peer at {self.steps}")
        return first, second

    def _sum(self, number: int, came: Sequence[int], weights: F64) -> list[WholeGradient]:
        """Return the decoded gradient; nothing if a peer that is in it has gone meanwhile."""
        share: F32 = np.zeros(self._size, np.float32)
        for job in self._jobs:
            if job.number == number:
                share = job.coded * np.float32(weights[self._own])
        found = self._session.all_reduce(share, "sum")
        if any(self._peers[n] not in found.peers for n in came):
            return []
        return [WholeGradient(number, np.asarray(found.value, np.float32))]


def _malformed(name: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"what {name} said of its gradients does not fit: {why}",
        fix="give all the same peers, late and seed, and let who comes later begin at their step",
    )


def code_of(peers: int, late: int, seed: int) -> F64:
    """Return B, float64[peers, peers]: what peer i gives of each shard."""
    if peers % (late + 1) == 0:
        groups: F64 = np.eye(peers // (late + 1)).repeat(late + 1, 0).repeat(late + 1, 1)
        return groups
    draws = (_random_code(peers, late, seed, draw) for draw in range(DRAWS))
    return min(draws, key=lambda code: float(np.abs(code).max()))


def _random_code(peers: int, late: int, seed: int, draw: int) -> F64:
    null = random_matrix(late, peers, b"atoll gradient code", seed, draw).astype(np.float64)
    null[:, -1] = -null[:, :-1].sum(1)
    code = np.eye(peers)
    for own in range(peers):
        others = [(own + k) % peers for k in range(1, late + 1)]
        code[own, others] = -np.linalg.solve(null[:, others], null[:, own])
    return code


def decoding(code: F64, came: Sequence[int]) -> F64 | None:
    """Return a, float64[peers], zero for who has not come; None if these are too few."""
    weights = np.zeros(len(code))
    if not came:
        return None
    found = np.linalg.lstsq(code[list(came)].T, np.ones(len(code)), rcond=None)[0]
    weights[list(came)] = found
    return weights if np.abs(weights @ code - 1).max() < EXACT else None
