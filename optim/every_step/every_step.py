"""Exchange something at every step between peers that hold equal parameters of their own.

The trainers own θ here; their daemons only carry what they exchange (``session.all_reduce`` and
``all_gather``, each a round of the run). Theory:

- A *newcomer* is a trainer that has not got the state of the others: it has just begun, or a round
  went on without it. It adds nothing to an exchange but its flag.
- When an exchange has a flag in it, all take the state of one trainer, bit for bit: a sum to which
  only this donor adds. It is the one with the most steps; of several such the first that is no
  newcomer. Then the step is exchanged again, from its first call on.
- Where all are newcomers, as at the beginning of a run, they look twice before one of them becomes
  the donor: a trainer with a state may have been in the middle of a step, with calls of its own.
- The first step of a run is made of what the donor gives, and of what those give whose parameters
  were bit for bit the donor's: the gradients of the others are of parameters that are gone.

So whoever has been in an exchange without flags holds the same bits after it as all others in it,
as long as what it does with the result is the same. Every ``check_every`` steps digests are
compared, and whoever differs from most is a newcomer again.

No call is taken for another one: vectors of states have an odd length, and half the length of those
of exchanges says which call of a step it is; what is gathered says what it is for
(gather.py). A trainer that has missed rounds on the other side of a network that was cut, and
does not know it, finds it by their numbers.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import (
    CodecError,
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    IncompatibleRunError,
    RemoteProtocolError,
    StateError,
)
from atoll.optim.buffer_sync import StepBuffers
from atoll.optim.every_step.exchange import Exchange, ExchangeAttempt, Exchanged, Given, check_part
from atoll.optim.every_step.gather import (
    COUNTS,
    LATER,
    MORE,
    NEW,
    GatheredPart,
    Pieces,
    gather_parts,
)
from atoll.optim.every_step.snapshot import Snapshot
from atoll.optim.footprint import memory_of_steps
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.method import Method
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession, check_alone
from atoll.peer.client.console import say

STATE_VERSION = 2
CAME_BACK = "this goes on unless others have taken more steps, whose state is taken then"
TRIES_MAX = 50  # of one step; five are usual where somebody comes, twenty in bad trouble
CHECK_EVERY = 100  # steps; a comparison costs a round trip, and on a device a copy to the host
CALLS_MAX = 8  # sums of one step whose vectors are never taken for each other; PowerSGD has four

_STEP, _PRESENCE, _STATE, _DIGEST = b"xpsd"  # what gathers are for
T = TypeVar("T")


class EveryStep(Method):
    """Train with an exchange at every step, between peers that hold equal parameters of their own.

    The method, its numbers, ``check_every`` among them, and the model's parameters must be equal on
    all peers, else IncompatibleRunError is raised. What depends on the number of a step must follow
    ``steps``; ``follow(scheduler)`` lets learning rates do it.

    ``inner``: the optimizers whose state is part of what all have in common; ``buffers``: whether
    those of the model are shared.
    """

    peer: OperationsSession
    _hands_in = False

    def __init__(
        self,
        vector: ModelVector,
        inner: tuple[Optimizer, ...],
        peer: OperationsSession,
        spec: RunSpec,
        *,
        check_every: int,
        buffers: bool,
        frozen: str,
    ) -> None:
        check_alone(type(self).__name__, peer, vector.ranks)
        super().__init__(vector, peer, inner)
        outline = vector.buffers.outline if buffers else ""
        if check_every < 1:
            raise ConfigError(f"check_every={check_every}", fix="give a number of steps, 100 say")
        self.spec = replace(spec, buffers=outline, check_every=check_every)
        self._snapshot = Snapshot(self._vector, inner, self._shared(), buffers=buffers)
        self._snapshot.describe(0)  # ConfigError for a state that cannot be handed over
        self._is_described = False  # as it is after the first step
        self._buffers = StepBuffers(self._vector.buffers) if outline else None
        self._unchecked = 0  # steps since the last comparison
        self._crowd = 1  # how many trainers the last call had
        self._is_new, self._is_back = True, False  # has no state; has one that was loaded
        self._founders: tuple[str, ...] = ()  # who was there a moment ago, newcomers all of them
        self.steps = 0  # of the run: a newcomer takes over the others' number
        self._missed = 0
        self._peers = self._alone = 0  # trainers of the last step; steps without another one
        say(memory_of_steps(self.manifest.elements, self.trainer_bytes))
        # Of the state that daemons keep there is none; the specification is compared all the same.
        own = Manifest.of([Parameter(spec.method, (1,))])
        with self._watching():
            self._attach(self.spec, own, lambda flat: flat.fill(0.0), frozen)

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory that this trainer takes for each parameter, at most.

        As ``Method.trainer_bytes``, from step to step: here a copy to compare digests.
        """
        return 4.0

    # ------------------------------------------------------------ for the methods

    def _hook(self) -> None:
        """Register no hook: a step is a call, or a method has hooks of its own."""

    def _shared(self) -> list[F32]:
        """Return what the method keeps that is equal on all peers; it is written in place."""
        return []

    @abstractmethod
    def _forget(self) -> None:
        """Drop what the method keeps for itself (residuals): its parameters are gone."""

    def _own(self) -> dict[str, Any]:
        """Return what the method keeps for itself, for a file: arrays and numbers."""
        return {}

    def _restore(self, own: Mapping[str, Any]) -> None:
        """Restore what ``_own`` gave."""
        assert not own

    def _is_whole(self) -> bool:
        """Return whether all that it keeps for itself belongs to the state that is here.

        It does if it has come back with that state, or has nothing yet.
        """
        return self._is_back or self.steps == 0

    def _exchange(self, given: F32, codec: str = "float32") -> Exchanged:
        """Carry out a step of one sum; return it, and how many trainers are in it, at least 1.

        It is the sum over all trainers but those whose parts were made with parameters that have
        been replaced meanwhile, as may have happened here too before it returns. ``_whole`` says
        what it raises.
        """
        found = self._whole(lambda exchange: exchange.total(given, codec))
        return replace(found, count=max(1, found.count))

    def _whole(self, work: Callable[[Exchange], T], counts: bool = True) -> T:
        """Return what ``work`` returns once all its calls have come about without a flag.

        It is begun again otherwise, perhaps with other parameters and another number of steps.

        ``counts``: whether this trainer has something to give. Raise StateError if nothing comes
        about, IncompatibleRunError if this trainer does something else than the others.
        """
        self._frozen.check()
        self._follow()
        if self.steps and not self._is_described:
            # Inner optimizers have a state by now. One that cannot be handed over ends this
            # trainer here, and not all of them when a newcomer asks for it.
            self._snapshot.describe(self.steps)
            self._is_described = True
        flagged, why = False, "trainers come and go, or miss rounds, faster than they step"
        tries = 0
        while tries < TRIES_MAX:
            tries += 1
            try:
                if flagged:
                    flagged = False
                    counts = self._take_state() and counts
                elif self._unchecked >= self.spec.check_every and not self._is_new:
                    self._compare()
                found = work(ExchangeAttempt(self._total, self._gathered, counts))
            except _FlaggedError:
                flagged = True
            except AgainError as error:
                why = str(error) or why
                tries -= isinstance(error, _BusyError)
            except CollectiveLostError as error:
                # The others may have taken this step, or not: then what it keeps is still right.
                self._is_back = self._is_back or not self._is_new
                self._is_new, self._founders, why = True, (), error.what
            except (CollectiveMissedError, CollectiveMismatchError) as error:
                self._missed += 1
                self._is_new, self._founders, why = True, (), error.what
            else:
                self._unchecked += 1
                self._peers = self._crowd
                self._alone += self._crowd == 1
                return found
        raise StateError(
            f"no exchange of step {self.steps} came about in {TRIES_MAX} tries: {why}",
            fix="give all trainers the same model and method; see `atoll status`",
        )

    # ------------------------------------------------------------ calls

    def _total(self, given: F32, codec: str, counts: bool, call: int) -> Exchanged:
        # Flags have blocks of their own, so that no codec distorts them. In the coarsest ones whole
        # numbers are right up to 4: where more trainers than that do not count, the mean is a
        # little larger or smaller, for all alike.
        block = get_codec(codec).contract.block or 1
        size = 2 * block + given.size
        half = -(-size // 2)
        half += (call - half) % CALLS_MAX
        vector: F32 = np.zeros(2 * half, np.float32)
        flags, absent, values = vector[:block], vector[block : 2 * block], vector[2 * block : size]
        flags.fill(self._is_new)
        absent.fill(not counts)
        if counts:
            values[:] = given
        reduced = self._call(lambda: self.peer.all_reduce(vector, "sum", codec=codec))
        self._crowd = len(reduced.peers)
        if self._is_new or reduced.value[0] > 0.5:
            raise _FlaggedError
        count = len(reduced.peers) - round(float(reduced.value[block]))
        return Exchanged(reduced.value[2 * block : size], max(0, count))

    def _gathered(self, data: bytes, counts: bool) -> list[Given]:
        check_part(len(data))
        # All see the flag of a newcomer, and exchange again: what else it gives is not needed.
        given, _ = self._gather(_STEP, b"" if self._is_new else data, counts)
        return [Given(name, text, bool(flags & COUNTS)) for name, flags, text in given]

    def _gather(
        self, purpose: int, data: bytes, counts: bool = False
    ) -> tuple[list[tuple[str, int, bytes]], bool]:
        """Return name, flags, data of all that gather for the same, and whether others are there.

        Raise ConfigError for data that are too long, RemoteProtocolError for malformed pieces.
        """
        check_part(len(data))
        pieces, others, more = Pieces(data), False, True
        while more:
            which, piece = pieces.next(self._crowd)
            flags = which | NEW * self._is_new | COUNTS * counts
            alike, some = self._gather_piece(purpose, piece, flags)
            others, more = others or some, pieces.add(alike)
        return pieces.whole(), others

    def _gather_piece(
        self, purpose: int, data: bytes, flags: int
    ) -> tuple[list[GatheredPart], bool]:
        """Return the parts that are of this call, and whether others are there.

        Raise AgainError if the step has to be exchanged again, _FlaggedError if there is a
        newcomer.
        """
        found = self._call(lambda: gather_parts(self.peer, purpose, data, flags))
        self._crowd = len(found)
        mine = purpose, flags & LATER
        alike = [part for part in found if (part.purpose, part.flags & LATER) == mine]
        others = [part for part in found if (part.purpose, part.flags & LATER) != mine]
        strange = [*others, *(part for part in alike if not part.is_of_round)]
        if not self._is_new and not all(part.flags & NEW for part in strange):
            # Somebody finds out just now that it has missed something.
            raise AgainError("trainers gather for different things, or for different rounds")
        if purpose == _STEP:
            busy = [part for part in others if part.purpose != _STEP]
            if self._is_new and busy:
                raise _BusyError if any(part.flags & MORE for part in busy) else AgainError
            if any(part.purpose == _STEP and part.flags & NEW for part in found):
                raise _FlaggedError
        return alike, bool(others)

    def _call(self, make: Callable[[], T]) -> T:
        """Make a call; raise AgainError if rounds have gone on without this trainer.

        They may have, on the other side of a network that was cut, and nobody may have told it:
        their numbers show it.
        """
        before = self.peer.round
        found = make()
        if not self._is_new and self.peer.round != before + 1:
            self._missed += 1
            self._is_new = True
            raise AgainError
        return found

    # ------------------------------------------------------------ newcomers

    def _take_state(self) -> bool:
        """Take the state of a donor; return whether it is still what it was here.

        Raise CollectiveMissedError if a round goes on without this trainer.
        """
        was_new, donor = self._is_new, self._choose_donor()
        unchanged = self._take_over(donor, was_new or donor.is_new)
        self._is_new, self._is_back, self._unchecked = False, False, 0
        self._follow()
        return unchanged

    def _take_over(self, donor: StateClaim, is_behind: bool) -> bool:
        """Take over the state of ``donor``; return whether it is what it was here.

        Raise AgainError if the donor has gone.
        """
        is_donor = donor.name == self.peer.peer_name
        mine = self._snapshot.describe(self.steps)
        given, _ = self._gather(_STATE, mine if is_donor else b"")
        description = next((data for name, _, data in given if name == donor.name), b"")
        if not description:
            raise AgainError  # it has gone: the flags are still up, and another one is found
        size = self._snapshot.elements(description)
        flat: F32 = np.zeros(size + 1 - size % 2, np.float32)
        if is_donor:
            self._snapshot.write(flat[:size])
            bad = self._snapshot.not_finite(flat[:size])
            if bad:
                raise CodecError(
                    f"NaN or Inf in {bad} at step {self.steps}: no newcomer can be given this",
                    fix="lower the learning rate or clip gradients, and start this trainer again; "
                    "buffers=False leaves buffers out",
                )
        reduced = self._call(lambda: self.peer.all_reduce(flat, "sum"))
        if donor.name not in reduced.peers:
            raise AgainError
        taken = reduced.value[:size]
        if is_behind and not is_donor and mine == description and self._is_whole():
            # Who comes back from files in the middle of nothing has it all, residuals too; and who
            # begins a run with equal parameters has gradients that count.
            own: F32 = np.empty_like(taken)
            self._snapshot.write(own)
            is_behind = not self._snapshot.equal_but_for_buffers(own, taken)
        # The donor as well: in a sum there is no negative zero.
        self.steps = self._snapshot.read(description, taken)
        if is_donor or not is_behind:
            return True
        self._forget()
        self._vector.zero_gradients()
        return False

    def _choose_donor(self) -> StateClaim:
        mine = StateClaim("", self._is_new, self.steps, self.spec, self.manifest.digest().hex())
        given, others = self._gather(_PRESENCE, mine.to_wire())
        here = [StateClaim.from_wire(name, data) for name, _, data in given]
        names = tuple(one.name for one in here)
        before, self._founders = self._founders, ()
        if all(one.is_new for one in here) and (others or names != before):
            self._founders = () if others else names
            raise AgainError
        donor = max(here, key=lambda one: (one.steps, not one.is_new))  # the first of several
        lines = self.spec.differences(donor.spec)
        if donor.digest != mine.digest:
            lines.append("model: its parameters have other names, shapes or dtypes")
        if lines:
            raise IncompatibleRunError(
                "\n    ".join([f"this trainer differs from that of {donor.name}:", *lines]),
                fix="give all trainers the same method, numbers and model",
            )
        return donor

    def _compare(self) -> None:
        self._unchecked = 0
        flat: F32 = np.empty(self.manifest.elements, np.float32)
        self._vector.write(flat)
        digest = hashlib.sha256(flat.data).digest()
        buffers = self._buffers
        given, _ = self._gather(_DIGEST, digest + (buffers.told() if buffers else b""))
        every = [data[: len(digest)] for _, _, data in given]
        ((usual, count),) = Counter(every).most_common(1)
        if digest != usual:
            self._is_new = True
            say(
                f"after step {self.steps} the parameters here differ from those of {count} "
                "other trainers; taking theirs"
            )
        if buffers is not None:
            buffers.share(
                lambda flat, counts: self._total(flat, "float32", counts, CALLS_MAX - 1),
                [data[len(digest) :] for _, _, data in given],
            )

    # ------------------------------------------------------------ for everybody

    @property
    def global_step(self) -> int:
        """Return ``steps``, those of the run: equal on all trainers after each exchange."""
        return self.steps

    def metrics(self) -> dict[str, float]:
        """Return numbers for any logger.

        ``steps``: those of the run; ``missed``: rounds that went on without this trainer;
        ``peers``: trainers of its last step; ``rounds_alone``: steps without another one.
        """
        peers, alone = self._peers, self._alone
        return {"steps": self.steps, "missed": self._missed, "peers": peers, "rounds_alone": alone}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for whoever begins a run anew from files, or comes back to one.

        Save it beside the model's and the inner optimizers' state.
        """
        shared = [torch.from_numpy(array.copy()) for array in self._shared()]
        own = {name: _to_save(value) for name, value in self._own().items()}
        return {"version": STATE_VERSION, "steps": self.steps, "shared": shared, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; raise ConfigError for anything else.

        Call it before the first step, and after the states of the model and of the inner optimizers
        were loaded. A run that has gone on has more steps, and its state wins; in one that has not,
        training goes on with the same bits.
        """
        sizes = [len(array) for array in state.get("shared", ())]
        own, mine = state.get("own", {}), self._own()
        if (
            state.get("version") != STATE_VERSION
            or sizes != [a.size for a in self._shared()]
            or own.keys() != mine.keys()
        ):
            name = type(self).__name__
            raise ConfigError(
                f"not the state of version {STATE_VERSION} of such a {name}",
                fix=f"load what {name}.state_dict() gave, with the same numbers and model",
            )
        self._schedules.loaded()
        self.steps, self._is_back = int(state["steps"]), True
        for array, saved in zip(self._shared(), state["shared"], strict=True):
            array[:] = saved.numpy()
        self._restore({n: v.numpy() if isinstance(v, Tensor) else v for n, v in own.items()})
        self._came_back = CAME_BACK
        self._follow()


def _to_save(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


class _FlaggedError(Exception):
    """Signal that there is a newcomer: take a state, then exchange again."""


class AgainError(Exception):
    """Signal that the step is exchanged again, with the flag as it is."""


class _BusyError(AgainError):
    """Signal that the others are busy with something of many calls, which ends by itself."""


class EveryStepGather(EveryStep):
    """Train with a gather of all trainers' bytes at every step.

    ``present``: the names of those who took part in the last exchange, newcomers among them, in the
    order that all see.
    """

    present: tuple[str, ...] = ()

    def _gather_step(self, data: bytes, counts: bool = True) -> list[tuple[str, bytes]]:
        """Return name and bytes of the trainers that had something to give (``counts``).

        They are in one order everywhere. Left out are the parts that were made with parameters that
        have been replaced meanwhile, as may have happened here too before it returns.

        Raise StateError if no exchange comes about, IncompatibleRunError if another trainer does
        something else, ConfigError for more than 16 MiB.
        """
        given = self._whole(
            lambda exchange: exchange.gather(data if exchange.counts else b""), counts
        )
        self.present = tuple(one.name for one in given)
        return [(one.name, one.data) for one in given if one.counts]


@dataclass(frozen=True, slots=True)
class StateClaim:
    """Hold what a trainer says of itself before a donor is chosen."""

    name: str
    is_new: bool
    steps: int
    spec: RunSpec
    digest: str  # the digest of its manifest

    def to_wire(self) -> bytes:
        return json.dumps([self.is_new, self.steps, self.spec.to_wire(), self.digest]).encode()

    @classmethod
    def from_wire(cls, name: str, data: bytes) -> StateClaim:
        """Read what the trainer ``name`` says; RemoteProtocolError if it cannot be read."""
        try:
            is_new, steps, spec, digest = json.loads(data)
            if [type(is_new), type(steps), type(digest)] != [bool, int, str] or steps < 0:
                raise ValueError("values of other types")
            return cls(name, is_new, steps, RunSpec.from_wire(spec), digest)
        except (ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"what {name} says of its state cannot be read: {str(error)[:200]}",
                fix="run the same version of atoll on all peers",
            ) from error
