"""Train the members of a population by themselves, and let the worst at times copy the best.

This is population based training (PBT, arXiv 1711.09846)::

    learning_rates = Population(model, inner, session, score, 500, {"lr": (1e-5, 1e-1)})

After every ``interval`` steps all members say their score and their hyper-parameters. *Exploit*:
the worst fifth each take over weights, inner optimizer state and hyper-parameters of one of the
best fifth. *Explore*: what was taken over is multiplied by 0.8 or 1.2. Nothing is ever averaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.errors import (
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    RemoteProtocolError,
)
from atoll.collectives.units import count
from atoll.optim.every_step.gather import gather_for
from atoll.optim.every_step.snapshot import Snapshot
from atoll.optim.footprint import memory_of_copies
from atoll.optim.inner import Inner, inners_of
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.method import Method
from atoll.optim.model_io import ModelVector
from atoll.optim.options import RunOptions, specified, takes
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession, check_alone
from atoll.peer.client.console import say

STATE_VERSION = 2
TURN_MAX = 2**53  # as JSON has it
VALUE_MAX = 1e30  # for a weight that is handed over: a float32 sum with zeros must be finite
SCORE, STATE = b"pq"  # purposes of gathers


class Population(Method):
    """Train one member of a population.

    ``score()`` is called every ``interval`` steps of ``inner``: lower is better, and NaN is worst.

    ``bounds``: name of each hyper-parameter -> its least and largest value. A name is that of an
    entry of ``inner``'s groups ("lr", "weight_decay", ...: each group keeps a value of its own), or
    of ``values``, numbers of yours which you read whenever you need them (dropout, loss weights). A
    learning rate scheduler would overwrite "lr": read a factor from ``values`` in it instead.

    ``start``: "own" begins with the parameters that the model has, "best" takes over those of one
    of the best members at its first turn, as a joiner may want to. Two members: the worse one
    copies. One, or all with one score: nothing happens. A member whose score or weights are not
    finite counts as worst. Members may come and go; who misses a turn trains on. ``min_trainers``:
    at a turn members wait until so many are there. ``seed``: of what is drawn, the same everywhere.

    Costs a few hundred bytes of each member per turn. Each member that is copied costs all of them
    an all-reduce of its whole state in float32 (12 bytes for each parameter with Adam), in which
    the others add zeros; that is one member at most in a turn of up to nine. It takes them 24 bytes
    of host memory for each parameter. Members wait for each other at a turn, up to half a
    minute.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.
    """

    peer: OperationsSession

    @takes(RunOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        peer: OperationsSession,
        score: Callable[[], float | torch.Tensor],
        interval: int,
        bounds: Mapping[str, Bounds],
        *,
        values: MutableMapping[str, float] | None = None,
        start: str = "own",
        seed: int = 0,
        **options: Unpack[RunOptions],
    ) -> None:
        if start not in ("own", "best"):
            raise ConfigError(f"start is {start!r}", fix='use "own" or "best"')
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed is {seed}", fix="a seed has 64 bits")
        vector = ModelVector(model)
        check_alone("Population", peer, vector.ranks)
        super().__init__(vector, peer, inners_of(inner, vector.parameters))
        self.values: MutableMapping[str, float] = values if values is not None else {}
        self._bounds, self._score, self._seed = dict(bounds), score, seed
        self._check_bounds()
        self.spec = RunSpec(
            method="population",
            sync_every=interval,
            schedule=f"seed {seed}",
            codec="float32",
            **specified(options),
        )
        self._snapshot = Snapshot(self._vector, self._inners)
        self._snapshot.describe(0)  # ConfigError for a state that cannot be handed over
        kinds = [type(optimizer).__name__ for optimizer in self._inners]
        self._model = " ".join([self.manifest.digest().hex(), *kinds])
        self.turn = 0
        self._copied = self._missed = 0
        self._peers = self._alone = 0  # members of the last turn; turns without another one
        self._last_score = math.nan
        self._is_fresh = start == "best"
        say(memory_of_copies(self._vector.manifest.elements))
        own = Manifest.of([Parameter(self.spec.method, (1,))])  # daemons keep no state of it
        with self._watching():
            self._attach(self.spec, own, lambda flat: flat.fill(0.0), options["frozen"])

    @property
    def steps(self) -> int:
        """Return the steps of this member, with those that it had when its state was saved."""
        return self._steps

    @property
    def global_step(self) -> int:
        """Return the same as ``steps``, because members train by themselves."""
        return self._steps

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory that it takes for each parameter, beside its model.

        It takes them in a turn in which somebody is copied: for the state as inner optimizers keep
        it by now, and a sum of as much.
        """
        elements = self._snapshot.elements(self._snapshot.describe(self.steps))
        return 8.0 * elements / self._vector.manifest.elements

    def hyperparameters(self) -> dict[str, list[float]]:
        """Return name -> its value in each group that has it, or the one in ``values``."""
        return {
            name: [float(place[name]) for place in self._places(name)]
            for name in sorted(self._bounds)
        }

    def metrics(self) -> dict[str, float]:
        """Return figures for any logger.

        ``copied`` counts how often this member has taken over another's state; ``peers``: members
        of its last turn; ``rounds_alone``: turns without another one.
        """
        return {
            "steps": self.steps,
            "turn": self.turn,
            "copied": self._copied,
            "missed": self._missed,
            "score": self._last_score,
            "peers": self._peers,
            "rounds_alone": self._alone,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return counters and hyper-parameters.

        Save them beside the states of the model and the inner optimizer.
        """
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "turn": self.turn,
            "is_fresh": self._is_fresh,
            "hyperparameters": self.hyperparameters(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION or state.keys() != self.state_dict().keys():
            raise ConfigError(
                f"not a Population state of version {STATE_VERSION}",
                fix="load what Population.state_dict() gave",
            )
        self._steps, self.turn = int(state["steps"]), int(state["turn"])
        self._follow()
        self._set(state["hyperparameters"])
        self._is_fresh = bool(state["is_fresh"])
        self._came_back = f"this member goes on, and turn {self.turn} was its last"

    # ------------------------------------------------------------ a turn

    def _step_done(self) -> None:
        if self.steps % self.spec.sync_every:
            return
        self._last_score = self._scored()
        try:
            self._take_turn()
        except (CollectiveLostError, CollectiveMissedError, CollectiveMismatchError):
            self._missed += 1

    def _hand_in(self) -> str:
        """Say what is lost: others copy this member at a turn, and not before."""
        since = self.steps % self.spec.sync_every
        if not since:
            return super()._hand_in()
        return f"{count(since, 'local step')} after turn {self.turn} are lost: nobody else has them"

    def _scored(self) -> float:
        score = self._score()
        score = float(score.detach()) if isinstance(score, torch.Tensor) else float(score)
        return math.nan if self._vector.not_finite() else score

    def _take_turn(self) -> None:
        self._snapshot.describe(self.steps)  # ConfigError before others ask for it
        score = self._last_score if math.isfinite(self._last_score) else None
        mine = [self.turn, score, self._is_fresh, self.hyperparameters(), self._model]
        given = gather_for(SCORE, self.peer, json.dumps(mine).encode())
        said = {name: self._read(name, data) for name, data in given}
        self._peers = len(said)
        self._alone += len(said) == 1
        self.turn = 1 + max(turn for turn, _, _ in said.values())
        members = [member for _, member, _ in said.values()]
        copies = exploited(members, self._seed, self.turn)
        for donor in (m.name for m in members if m.name in set(copies.values())):
            is_receiver = copies.get(self.peer.peer_name) == donor
            if self._hand_over(donor, is_receiver) and is_receiver:
                self._explore(donor, said[donor][2])

    def _hand_over(self, donor: str, is_receiver: bool) -> bool:
        """Hand the donor's weights and inner state to the members that copy it.

        Return whether they were there.
        """
        is_donor = donor == self.peer.peer_name
        described, flat = self._described() if is_donor else (b"", np.empty(0, np.float32))
        description = dict(gather_for(STATE, self.peer, described)).get(donor)
        if not description:
            return False  # it has gone, or cannot
        if not is_donor:
            flat = np.zeros(self._snapshot.elements(description), np.float32)
        reduced = self.peer.all_reduce(flat, "sum")
        if donor not in reduced.peers:
            return False
        if is_receiver:
            self._snapshot.read(description, reduced.value)
            self._vector.zero_gradients()
        return True

    def _described(self) -> tuple[bytes, F32]:
        description = self._snapshot.describe(self.steps)
        flat: F32 = np.empty(self._snapshot.elements(description), np.float32)
        self._snapshot.write(flat)
        if max(float(flat.max()), -float(flat.min())) <= VALUE_MAX:  # both hand on NaN
            return description, flat
        what = self._snapshot.not_finite(flat) or f"above {VALUE_MAX:g}"
        say(
            f"the state of this member ({what}) is not finite at step {self.steps}; "
            "nobody copies it"
        )
        return b"", flat

    def _explore(self, donor: str, theirs: Mapping[str, list[float]]) -> None:
        self._is_fresh = False
        self._copied += 1
        me, before = self.peer.peer_name, self.hyperparameters()
        found = {
            name: [explored(v, self._bounds[name], self._seed, self.turn, me, name) for v in values]
            for name, values in theirs.items()
        }
        self._set(found)
        say(
            f"turn {self.turn}, score {self._last_score:g}: going on from {donor}, with "
            f"{found} instead of {before}"
        )

    def _read(self, name: str, data: bytes) -> tuple[int, PopulationMember, dict[str, list[float]]]:
        """Return a member's turn, score and hyper-parameters; RemoteProtocolError if unusable."""
        try:
            turn, score, is_fresh, numbers, model = json.loads(data)
            if type(turn) is not int or not 0 <= turn <= TURN_MAX or type(is_fresh) is not bool:
                raise ValueError(f"turn {turn!r:.40}")
            if model != self._model:
                raise ValueError("its model or inner optimizer is another one")
            shapes = {key: len(values) for key, values in self.hyperparameters().items()}
            if {key: len(values) for key, values in numbers.items()} != shapes:
                raise ValueError(f"hyper-parameters {sorted(numbers)[:20]}, not {sorted(shapes)}")
            found = {key: [_number(v) for v in values] for key, values in numbers.items()}
            worth = math.nan if score is None else _number(score)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"what {name} says at turn {self.turn} cannot be used: {str(error)[:200]}",
                fix="give all members the same model, optimizer and names of hyper-parameters",
            ) from error
        return turn, PopulationMember(name, worth, is_fresh), found

    # ------------------------------------------------------------ hyper-parameters

    def _places(self, name: str) -> list[MutableMapping[str, Any]]:
        if name in self.values:
            return [self.values]
        # Looked up each time: an optimizer that loads a state has other groups afterwards.
        return [group for o in self._inners for group in o.param_groups if name in group]

    def _set(self, numbers: Mapping[str, list[float]]) -> None:
        for name, values in numbers.items():
            for place, value in zip(self._places(name), values, strict=True):
                if isinstance(place[name], torch.Tensor):  # a capturable optimizer keeps it
                    place[name].fill_(value)
                else:
                    place[name] = value

    def _check_bounds(self) -> None:
        for name, (low, high) in self._bounds.items():
            places = self._places(name)
            if not places:
                raise ConfigError(
                    f"the inner optimizer has no {name!r}, nor have `values`",
                    fix="bounds name entries of the optimizer's groups, or of `values`",
                )
            if not -math.inf < low <= high < math.inf:
                raise ConfigError(f"the bounds of {name!r} are {low} and {high}")
            for place in places:
                if not isinstance(place[name], int | float | torch.Tensor):
                    raise ConfigError(f"{name!r} is {place[name]!r}, not a number")
                if not low <= float(place[name]) <= high:
                    raise ConfigError(
                        f"{name!r} begins with {float(place[name]):g}, not within {low} and {high}"
                    )


def _number(value: object) -> float:
    """Return ``value`` as a float; ValueError unless it is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise ValueError(f"no number: {value!r:.40}")
    return float(value)  # type: ignore[arg-type]


ONE_OF = 5  # members at either end: the paper's 20 %
FACTORS = (0.8, 1.2)

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PopulationMember:
    """Describe a member for the selection.

    ``score``: lower is better, NaN worse than anything. ``is_fresh``: it has just begun, and wants
    to begin with what a good member has.
    """

    name: str
    score: float
    is_fresh: bool = False


def exploited(members: Sequence[PopulationMember], seed: int, turn: int) -> dict[str, str]:
    """Return who copies whom: name -> name of a better member.

    Each of the worst fifth copies one of the best fifth, chosen at random. A fifth is one member at
    least, where there are two or more. A member copies only one that is strictly better, so equals
    leave each other alone; they rank in the order given. A fresh member copies in any case, as long
    as somebody is not fresh, and is not copied.
    """
    ranked = sorted((m for m in members if not m.is_fresh), key=_rank)
    count = max(1, len(ranked) // ONE_OF)
    best = [m for m in ranked[:count] if not math.isnan(m.score)]
    worst = ranked[-count:] if len(ranked) > 1 else []
    chosen = {}
    for member in [*worst, *(m for m in members if m.is_fresh)]:
        better = [m for m in best if member.is_fresh or _rank(m) < _rank(member)]
        if better:
            word = derive_key(b"exploit", seed, turn, member.name.encode())
            chosen[member.name] = better[word % len(better)].name
    return chosen


def explored(value: float, bounds: Bounds, seed: int, turn: int, *what: str) -> float:
    """Return 0.8 or 1.2 times the value, at random, within the bounds.

    ``what`` names member and number. A value of zero stays what it is.
    """
    word = derive_key(b"explore", seed, turn, *(name.encode() for name in what))
    low, high = bounds
    return min(max(value * FACTORS[word & 1], low), high)


def _rank(member: PopulationMember) -> tuple[bool, float]:
    is_nan = math.isnan(member.score)
    return is_nan, 0.0 if is_nan else member.score
