"""Do what training loops of one's own begin with: wait for enough trainers, share a state.

Both are made of the three collectives, so all trainers make these calls alike, too. Sessions with
daemons (session.py) and those of a swarm (optim/swarm.py) have them from here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from atoll.collectives.errors import (
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    TooFewPeersError,
)
from atoll.collectives.units import count, duration
from atoll.peer.client.console import say
from atoll.peer.client.flat_vectors import Floats, Vector, vector_of
from atoll.peer.client.ipc_client import PROGRESS_S

GATHER_WAIT_S = 3600.0  # machines of a cluster may come that long after each other
PAUSE_MIN_S = 0.1  # between two gathers of too few: each is a round of the run ...
PAUSE_MAX_S = 2.0  # ... and who comes is in the next one
HAS, LACKS = b"has", b"lacks"  # what trainers tell each other of a state, and its elements
OUT_OF_STEP = (CollectiveMismatchError, CollectiveMissedError, CollectiveLostError)

Found = list[tuple[str, bytes]]


class _Wait:
    """Bound what takes several rounds, and say now and then that it goes on."""

    def __init__(self, call: str, limit_s: float) -> None:
        self._call, self._limit_s = call, limit_s
        self._began_s = self._said_s = time.monotonic()

    def goes_on(self, why: str, fix: str) -> None:
        """Raise TooFewPeersError, for this reason, if it has taken too long."""
        now_s = time.monotonic()
        waited_s = now_s - self._began_s
        if waited_s > self._limit_s:
            raise TooFewPeersError(
                f"{self._call} has waited {duration(waited_s)}: {why}",
                fix=fix,
                phase="barrier",
                elapsed_s=waited_s,
            )
        if now_s - self._said_s > PROGRESS_S:
            self._said_s = now_s
            say(f"{self._call} goes on after {duration(waited_s)}: {why}")


class ReducedValue(Protocol):
    """Describe what an all-reduce returns."""

    @property
    def value(self) -> Any: ...

    @property
    def peers(self) -> tuple[str, ...]: ...


class OwnLoops(ABC):
    """Add ``gather`` and ``share`` to a session with collectives.

    ``has_state``: this trainer has what the others have, since ``share`` has returned and no call
    has gone on without it.
    """

    peer_name: str
    has_state = False

    @abstractmethod
    def all_gather(self, data: bytes) -> Found: ...

    @abstractmethod
    def all_reduce(
        self, tensor: Any, op: str = "mean", *, codec: str = "float32"
    ) -> ReducedValue: ...

    def gather(
        self, data: bytes = b"", *, at_least: int = 1, wait_s: float = GATHER_WAIT_S
    ) -> Found:
        """Return what ``all_gather`` does, as soon as so many trainers are in it.

        Who comes while the others make another call waits for their next gather. All trainers give
        the same ``at_least``. Raises TooFewPeersError if there are fewer after ``wait_s``, and what
        ``all_gather`` raises, but for a call that it was out of step with.
        """
        if at_least < 1:
            raise ConfigError(f"gather(at_least={at_least})", fix="give a number of trainers")
        wait = _Wait("gather()", wait_s)
        return self._gather_until(
            lambda: data, lambda found: len(found) >= at_least, at_least, wait
        )

    def share(
        self, state: Sequence[Any], *, at_least: int = 1, wait_s: float = GATHER_WAIT_S
    ) -> bool:
        """Bring ``state`` to what the others have; return whether it was replaced here.

        Call it at the same place of each turn of the loop, before the step. Where no trainer lacks
        anything it is one small gather. Who is new, or was left out of a call since, gets the bits
        of one that was not; where nobody has a state yet all begin with that of the first of them,
        as soon as there are ``at_least``.

        ``state``: numpy arrays or torch tensors of float32, float16 or bfloat16, which are written
        in place: parameters, moments of the optimizer, the number of the step. Raises ConfigError
        for others, and where this trainer's state has another size than the one that it is to take;
        TooFewPeersError after ``wait_s``, CodecError for NaN.
        """
        vectors, wait = [vector_of(one) for one in state], _Wait("share()", wait_s)
        elements = sum(vector.elements for vector in vectors)
        while True:
            flags = self._gather_until(
                lambda: b"%s %d" % (HAS if self.has_state else LACKS, elements),
                lambda found: len(found) >= at_least or any(_has(flag) for _, flag in found),
                at_least,
                wait,
            )
            owners = [peer for peer, flag in flags if _has(flag)]
            if len(owners) == len(flags):
                return False
            donor = (owners or [peer for peer, _ in flags])[0]
            _check_size(elements, donor, dict(flags)[donor])
            had_it = self.has_state
            try:
                is_taken, why = self._take(state, vectors, donor), f"{donor} has left meanwhile"
            except OUT_OF_STEP as error:  # and it lacks the state now
                is_taken, why = False, error.what
            if is_taken:
                self.has_state = True
                return not had_it and donor != self.peer_name
            wait.goes_on(why, "let every trainer call share() at the same place of its loop")

    def _take(self, state: Sequence[Any], vectors: Sequence[Vector], donor: str) -> bool:
        """Write the donor's state into everybody's; return whether it was still there.

        The donor's own, too: a sum makes 0.0 of its -0.0.
        """
        flat: Floats = np.zeros(sum(vector.elements for vector in vectors), np.float32)
        places = np.cumsum([0, *(vector.elements for vector in vectors)])
        parts = [flat[lo:hi] for lo, hi in pairwise(places)]
        if donor == self.peer_name:
            for vector, part in zip(vectors, parts, strict=True):
                vector.write(part)
        total = self.all_reduce(flat, "sum")
        if donor not in total.peers:
            return False
        np.copyto(flat, total.value)
        for one, vector, part in zip(state, vectors, parts, strict=True):
            _write_in_place(one, vector.read(part))
        return True

    def _gather_until(
        self,
        data: Callable[[], bytes],
        is_enough: Callable[[Found], bool],
        at_least: int,
        wait: _Wait,
    ) -> Found:
        """Return the first gather that is enough.

        ``data`` is asked for at each, as what this trainer has may change meanwhile.
        """
        pause_s, here = PAUSE_MIN_S, 1
        while True:
            try:
                found = self.all_gather(data())
                if is_enough(found):
                    return found
                here, why = len(found), f"{count(len(found), 'trainer')} of {at_least} are here"
            except OUT_OF_STEP as error:
                # It has waited for a round of theirs, and theirs may be the next; or its daemon
                # was started again, and has gone on.
                why, pause_s = error.what, 0.0
            wait.goes_on(why, f"start {max(1, at_least - here)} more trainers, or lower at_least")
            time.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, 2 * pause_s))

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Note that the others may have gone on where a call inside says so."""
        try:
            yield
        except OUT_OF_STEP:
            self.has_state = False
            raise


def _has(flag: bytes) -> bool:
    return flag.split(b" ")[0] == HAS


def _check_size(elements: int, donor: str, flag: bytes) -> None:
    """Raise ConfigError if the donor's state has another number of elements than this one."""
    theirs = flag.split(b" ")[-1]
    if theirs != b"%d" % elements:
        many = f"{int(theirs[:20]):,}" if theirs[:20].isdigit() else "an unknown number"
        raise ConfigError(
            f"share() of a state of {count(elements, 'element')} here, and {many} at {donor}, "
            "whose state is to be taken",
            fix="give all trainers the same model, optimizer and list of tensors",
        )


def _write_in_place(one: Any, values: Any) -> None:
    if isinstance(one, np.ndarray):
        np.copyto(one, values)
    else:
        one.detach().copy_(values)
