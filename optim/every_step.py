"""Methods whose peers exchange something at every step and hold equal parameters of their own.

The trainers own θ here; their daemons only carry what they exchange (``session.all_reduce`` and
``all_gather``, each a round of the run). Theory:

- A *newcomer* is a trainer that has not got the state of the others: it has just begun, or a round
  went on without it. It adds nothing to an exchange but its flag.
- When an exchange has a flag in it, all take the state of the first trainer that is no newcomer,
  bit for bit: a sum to which only this donor adds. Where all are newcomers, as at the beginning of
  a run, the first of all is the donor. Then the exchange is done again.

So whoever has been in an exchange without flags holds the same bits after it as all others in it,
as long as what it does with the result is the same. Every ``check_every`` exchanges digests are
compared, and whoever differs from most is a newcomer again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import CollectiveMissedError, IncompatibleRunError, StateError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.model_vector import ModelVector
from atoll.optim.sessions import OperationsSession
from atoll.optim.snapshot import Snapshot
from atoll.optim.spec import RunSpec

__all__ = ["CHECK_EVERY", "TRIES_MAX", "EveryStep", "Exchanged"]

TRIES_MAX = 20  # an exchange that is broken off or flagged so often in a row will always be
CHECK_EVERY = 100  # exchanges; a comparison costs a round trip, and on a device a copy to the host


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The sum of what ``count`` trainers gave, float32[n]; it may be overwritten."""

    total: F32
    count: int


class EveryStep(ABC):
    """Trains ``model`` together with the other peers of the run that ``peer`` belongs to.

    ``inner``: the optimizers whose state is part of what all have in common. The method, its
    numbers and the model's parameters must be equal on all peers: IncompatibleRunError. Use it as
    a context manager or call ``close()``; either closes ``peer`` too.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Sequence[Optimizer],
        peer: OperationsSession,
        spec: RunSpec,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.peer, self.spec = peer, spec
        self._vector = ModelVector(model)
        self.manifest = self._vector.manifest
        self._snapshot = Snapshot(self._vector, inner, self._shared())
        self._check_every = check_every
        self._is_new = True
        self.steps = 0  # of the run: a newcomer takes over the others' number
        self._missed = 0
        print(
            f"atoll: {self.manifest.elements:,} parameters, which this trainer holds; the daemon "
            f"takes {8 * self.manifest.elements / 2**20:.0f} MiB of host memory to hand them to "
            "newcomers, and for what it exchanges",
            file=sys.stderr,
        )
        # Of the state that daemons keep there is none; the specification is compared all the same.
        peer.attach(spec, Manifest.of([Parameter(spec.method, (1,))]), lambda flat: flat.fill(0.0))

    # ------------------------------------------------------------ for the methods

    def _shared(self) -> list[F32]:
        """What the method keeps that is equal on all peers; it is written in place."""
        return []

    @abstractmethod
    def _forget(self) -> None:
        """What the method keeps for itself (residuals) belongs to parameters that are gone."""

    def _exchange(self, given: F32, codec: str = "float32") -> Exchanged:
        """The sum over all trainers but those whose parts were made with parameters that have been
        replaced meanwhile, as may have happened here too before it returns.

        StateError if none comes about; IncompatibleRunError if another trainer does something else.
        """
        block = get_codec(codec).contract.block or 1  # flags have blocks of their own, so that ...
        vector = np.zeros(2 * block + given.size, np.float32)
        flags, counts = vector[:block], vector[block : 2 * block]  # ... no codec distorts them
        vector[2 * block :] = given
        counts.fill(1.0)
        for _ in range(TRIES_MAX):
            flags.fill(self._is_new)
            try:
                reduced = self.peer.all_reduce(vector, "sum", codec=codec)
                if reduced.value[0] < 0.5:
                    self._compare_now_and_then()
                    count = round(float(reduced.value[block]))
                    return Exchanged(reduced.value[2 * block :], max(1, count))
                if not self._take_state():
                    vector.fill(0.0)
            except CollectiveMissedError:
                self._missed += 1
                self._is_new = True
        raise StateError(
            f"no exchange of step {self.steps} came about in {TRIES_MAX} tries",
            fix="see `atoll status`: trainers come and go, or miss rounds, faster than they step",
        )

    # ------------------------------------------------------------ inside

    def _take_state(self) -> bool:
        """From a donor; whether it is still what it was here. CollectiveMissedError."""
        was_new = self._is_new
        mine = json.dumps([was_new, self.spec.to_wire(), self.manifest.digest().hex()])
        here = [(name, *json.loads(text)) for name, text in self.peer.all_gather(mine.encode())]
        self._check_alike(here)
        donor = next((name for name, new, *_ in here if not new), here[0][0])
        is_donor = donor == self.peer.peer_name
        described = self._snapshot.describe(self.steps) if is_donor else b""
        description = dict(self.peer.all_gather(described)).get(donor)
        if not description:
            return True  # it has gone: the flags are still up, and another one is found
        elements = self._snapshot.elements(description)
        flat: F32 = np.zeros(elements, np.float32)
        if is_donor:
            self._snapshot.write(flat)
        reduced = self.peer.all_reduce(flat, "sum")
        if donor not in reduced.peers:
            return True
        # The donor as well: in a sum there is no negative zero.
        self.steps = self._snapshot.read(description, reduced.value)
        self._is_new = False
        if is_donor or not was_new:
            return True
        self._forget()
        self._vector.zero_gradients()
        return False

    def _check_alike(self, here: list[tuple[str, bool, dict[str, object], str]]) -> None:
        for name, _, spec, digest in here:
            lines = self.spec.differences(RunSpec.from_wire(spec))
            if digest != self.manifest.digest().hex():
                lines.append("model: its parameters have other names, shapes or dtypes")
            if lines:
                raise IncompatibleRunError(
                    "\n    ".join([f"this trainer differs from that of {name}:", *lines]),
                    fix="give all trainers the same method, numbers and model",
                )

    def _compare_now_and_then(self) -> None:
        if (self.steps + 1) % self._check_every:  # of the run, so that newcomers compare with all
            return
        flat: F32 = np.empty(self.manifest.elements, np.float32)
        self._vector.write(flat)
        digest = hashlib.sha256(flat.data).digest()
        ((usual, count),) = Counter(d for _, d in self.peer.all_gather(digest)).most_common(1)
        if digest != usual:
            self._is_new = True
            print(
                f"atoll: after step {self.steps} the parameters here differ from those of {count} "
                "other trainers; taking theirs",
                file=sys.stderr,
            )

    def metrics(self) -> dict[str, float]:
        """For any logger: steps of the run, rounds that went on without this trainer."""
        return {"steps": self.steps, "missed": self._missed}

    def close(self) -> None:
        """Close the session. The model keeps its parameters."""
        self.peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
