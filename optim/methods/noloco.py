"""Run NoLoCo: each replica steps with a partner, and nobody waits for all (2506.10911).

Every replica has parameters φ of its own, and they stay near each other because in each outer step
a few exchange what they have (gossip.py has the arithmetic). The life of an outer step here:

1. φ is published under the step's number when the step begins. That of the others of the group, and
   their Δ, is asked for at once, so that it travels as soon as they have it: their φ is there long
   before it is needed, and so is Δ of those that are faster.
2. After ``sync_every`` local steps Δ is published, and what has not come yet is waited for.
3. The outer step is made with those that came. A peer that is dead, late or somewhere else is left
   out, and one that is left alone makes a step of its own: δ <- α δ + β Δ.

Members that cannot be dialled from outside are partners of others, never of each other.

Two peers that see different members may count on different partners. As everybody publishes for
everybody, each then uses what a third one has published, and nobody waits in vain. Such a step may
count some replicas more than others, so it moves their mean a little, as an average over some of
them does; the next is right again.

A newcomer begins with the newest φ of anybody and δ = 0. A replica that finds its partner ahead
goes on from that one's number; one that is far behind begins anew like a newcomer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import ConfigError, ConnectError, StateError
from atoll.collectives.units import count
from atoll.optim.buffer_sync import SharedBuffers
from atoll.optim.footprint import memory_of_replicas
from atoll.optim.inner import Inner, inners_of
from atoll.optim.local_steps import LocalSteps
from atoll.optim.method import Method
from atoll.optim.methods.gossip import (
    GossipState,
    always_stable,
    check_stable,
    group_of,
    local_change,
)
from atoll.optim.methods.replicas import FOUNDER_BYTES, PHI, Replicas
from atoll.optim.model_io import ModelVector
from atoll.optim.options import SpeedOptions, specified, takes
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import GossipSession, VectorAsked, VectorChannel, check_alone
from atoll.optim.side_channel import OF_PARTNERS
from atoll.peer.client.console import say
from atoll.peer.client.trainer_channel import Members

METHOD = "noloco"
DELTA = "delta"
STATE_VERSION = 3
# Outer steps: whoever is further behind its partner has parameters that are too old to be mixed.
BEHIND_MAX = 10
PUBLISHED = 2 * 3  # vectors in a daemon: of two names two numbers, and one that is still being read


class NoLoCo(Method):
    """Train replicas that exchange with one partner in each outer step; nobody waits for all.

    φ are a replica's parameters after its last outer step, Δ is how far its local steps have moved
    them since; with the means of both partners an outer step is
    ``δ = α δ + β mean Δ - γ (φ - mean φ)``, ``φ = φ + δ``. When it is made, the model gets the
    newest parameters that anybody has. The paper uses Adam as ``inner``.
    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.

    ``outer_lr``, ``outer_momentum``, ``gossip``: β, α and γ. ``gossip`` is how strongly replicas
    are drawn together: ConfigError where they would drift apart. Below ``2 (1 - outer_momentum)``
    they do not, however often partners fail. ``group``: how many exchange in an outer step; 1:
    nobody does. Where it does not divide the members, the last group is smaller, perhaps somebody
    alone. ``codec`` is that of both Δ and φ. As both sides of an exchange use what it has left of
    φ, it never moves the mean of the replicas; but it keeps them as far apart as its steps are
    coarse: int8 by less than 1 % of the weights in a block, bfloat16 by 0.2 % of each.
    ``partner_wait_s``: a partner that has not come to the end of the same step by then is left out;
    each trainer's own. ``round_s``, each trainer's own too: local steps by its speed
    (``StepsBySpeed``), so that partners come at the same time; their Δ count alike, whatever steps
    are behind them.

    ``min_trainers``: there are no rounds here that could wait, so the first outer step does, until
    so many members have parameters to begin with; later those that are left go on, and
    ``rounds_alone`` says how often that was somebody alone.

    ``buffers``: those of a group are averaged with φ, and a newcomer takes over somebody's.

    Replicas differ, by about the inner learning rate: let that decay. ``consensus()`` is what to
    evaluate and to publish. Costs 12 bytes of the trainer's host memory for each parameter, and 4
    more inside it.
    """

    peer: GossipSession
    _channel: VectorChannel

    @takes(SpeedOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: GossipSession,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        gossip: float = 0.7,
        group: int = 2,
        codec: str = "bfloat16",
        partner_wait_s: float = 30.0,
        **options: Unpack[SpeedOptions],
    ) -> None:
        vector = ModelVector(model)
        spec = RunSpec(
            method=METHOD,
            sync_every=sync_every,
            outer="heavy_ball",
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            codec=codec,
            gossip=gossip,
            group=group,
            buffers=vector.buffers.outline if options["buffers"] else "",
            **specified(options),
        )
        check_stable(spec.outer_momentum, spec.gossip, spec.group)
        if not 0 <= partner_wait_s <= spec.round_deadline_s:
            raise ConfigError(
                f"partner_wait_s={partner_wait_s}", fix="0 or more, up to round_deadline_s"
            )
        check_alone("NoLoCo", peer, vector.ranks)
        super().__init__(vector, peer, inners_of(inner, vector.parameters))
        self.spec, channel = spec, self._channel
        self._partner_wait_s = partner_wait_s
        elements = self.manifest.elements
        self._state = GossipState(
            elements, momentum=spec.outer_momentum, lr=spec.outer_lr, gossip=spec.gossip
        )
        self._replicas = Replicas(channel, spec, elements)
        self._buffers = SharedBuffers(channel, vector.buffers, waits=True) if spec.buffers else None
        self._number = 0  # of the outer step at hand
        self._said_alone = False  # that not all members find a partner in a step
        self._local = LocalSteps(sync_every, options["round_s"], options["clock"])
        self._outer_steps = self._solo = self._present = 0
        self._waited_s = self._spread = 0.0
        self._group: tuple[str, ...] = ()
        self._deltas: dict[str, VectorAsked] = {}  # of partners, on their way meanwhile
        self._phis: dict[str, VectorAsked] = {}
        self._failing: dict[str, str] = {}  # partner -> the code of its last error
        self._connection = channel.connection  # the daemon that has what was published
        self._has_published_delta = False  # of this outer step; it is in the scratch then
        self._introduce()
        outline = self.manifest.outline(METHOD, FOUNDER_BYTES)
        with self._watching():
            self._attach(spec, outline, self._replicas.write_founder, options["frozen"])
            self._join()
            self._replicas.wait_for_others()

    # ------------------------------------------------------------ for everybody

    @property
    def trainer_bytes(self) -> float:
        return 12.0  # φ, momentum, scratch

    @property
    def global_step(self) -> int:
        return (self._number - 1) * self.spec.sync_every + self._local.taken

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put this replica's φ into the model, and the local parameters back at the end."""
        with self._showing("outer_parameters()"):
            self._vector.read(self._state.phi)
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the mean φ and buffers of all replicas into the model; its own come back at the end.

        It is for evaluation or saving. Evaluate this one.

        Members that are more than two outer steps behind, or cannot be reached, are left out. It
        may be called by one trainer alone, at any time; the others go on meanwhile.
        """
        total, names = np.zeros(self.manifest.elements, np.float32), []
        for name, phi in self._replicas.each(self._number, self._state.phi):
            total += phi
            names.append(name)
        total /= np.float32(len(names))
        with self._showing("consensus()"):
            self._vector.read(total)
            if self._buffers is not None:
                self._buffers.show(names, self._buffers.own())
            yield

    def replica_losses(self, loss: Callable[[], float]) -> dict[str, float]:
        """Return ``loss()`` of each replica, by name of its peer.

        Its φ and buffers are in the model then. The mean of the losses is what the paper reports;
        where every trainer evaluates its own, in ``outer_parameters()``, the mean over trainers is
        the same, and cheaper.
        """
        found: dict[str, float] = {}
        with self._showing("replica_losses()"):
            own = self._buffers.own() if self._buffers is not None else None
            for name, phi in self._replicas.each(self._number, self._state.phi):
                self._vector.read(phi)
                if self._buffers is not None and own is not None:
                    self._buffers.show([name], own)
                found[name] = float(loss())
        return found

    def metrics(self) -> dict[str, float]:
        """Return numbers for any logger.

        ``replica_std``: the standard deviation between replicas, as the last group has shown it;
        ``solo``, and ``rounds_alone`` as for other methods: outer steps without a partner;
        ``peers``: how many were in the last one.
        """
        return {
            "steps": self._steps,
            "outer_step": self._number,
            "outer_steps": self._outer_steps,
            "solo": self._solo,
            "waited_s": self._waited_s,
            "replica_std": self._spread,
            "peers": self._present,
            "rounds_alone": self._solo,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this replica.

        Save it beside the model's and the inner optimizers' state.
        """
        self._check_own()
        state = self._state
        return {
            "version": STATE_VERSION,
            "steps": self._steps,
            "outer_step": self._number,
            "local_steps": self._local.position,
            "speeds": self._local.speeds,
            "model": self._vector.digest(),
            "phi": torch.from_numpy(state.phi.copy()),
            "momentum": torch.from_numpy(state.momentum.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, each trainer its own; raise ConfigError for anything else.

        It is for whoever begins a run anew from files, or comes back. Where the model's and the
        inner optimizers' states were loaded before, after this object was made, it goes on with the
        same bits; else where that outer step began. In a run that is further this replica soon
        takes another one's φ.
        """
        sizes = [len(state.get(name, ())) for name in ("phi", "momentum")]
        if state.get("version") != STATE_VERSION or sizes != 2 * [self.manifest.elements]:
            raise ConfigError(
                f"not the state of version {STATE_VERSION} of such a NoLoCo",
                fix="load what NoLoCo.state_dict() gave, with the same model",
            )
        self._schedules.loaded()
        self._steps, number = int(state["steps"]), int(state["outer_step"])
        np.copyto(self._state.phi, state["phi"].numpy())
        np.copyto(self._state.momentum, state["momentum"].numpy())
        in_step = self._vector.digest() == state.get("model")
        self._local.restore_speeds(state["speeds"])
        self._begin(number, position=state["local_steps"] if in_step else None)
        self._came_back = f"its replica goes on in outer step {number}"

    # ------------------------------------------------------------ an outer step

    def _step_done(self) -> None:
        is_last = self._local.step(self._channel.check)
        self._publish_again()
        if is_last:
            self._end_round()

    def _hand_in(self) -> str:
        """Say what is lost: replicas exchange at the end of an outer step, and not before."""
        if not self._local.taken:
            return super()._hand_in()
        steps = count(self._local.taken, "local step")
        return f"{steps} in the middle of outer step {self._number} are lost: nobody else has them"

    def _publish_again(self) -> None:
        """Publish once more what a daemon has had that has ended meanwhile."""
        if self._connection == self._channel.connection:
            return
        self._connection, codec = self._channel.connection, self.spec.codec
        self._channel.publish(PHI, self._number, self._state.phi.copy(), codec)
        if self._has_published_delta:
            self._channel.publish(DELTA, self._number, self._state.scratch, codec)

    def _end_round(self) -> None:
        self._check_finite("nothing was handed to other replicas")
        state, delta = self._state, self._state.scratch
        self._vector.write(delta)
        self._local.end()
        local_change(self.manifest, state.phi, delta)
        self._outer_steps += 1
        if self._buffers is not None:
            self._buffers.publish(self._number)  # they are there before others see Δ
        if self.spec.group == 1:
            state.step([delta])
            self._present = 1
            self._begin(self._number + 1)
            return
        self._channel.publish(DELTA, self._number, delta, self.spec.codec)
        self._has_published_delta = True
        present, newest = self._gather()
        if newest > self._number + BEHIND_MAX:
            say(f"outer step {self._number}, others are at {newest}: begins anew")
            self._join()
            return
        spread = state.step(
            (self._deltas[name].read() for name in present),
            (self._phis[name].read() for name in present),
            self._phis[self._channel.peer_name].read,
        )
        if self._buffers is not None:
            self._buffers.average(self._number, present)
        self._spread = spread if len(present) > 1 else self._spread
        self._solo += len(present) == 1
        self._present = len(present)
        self._begin(max(self._number + 1, newest))

    def _gather(self) -> tuple[list[str], int]:
        """Return those of the group whose Δ and φ are here, in their order, and a number.

        That is the newest outer step of a member that is too far ahead; 0 if none is.
        """
        began_s, me = time.monotonic(), self._channel.peer_name
        present, newest = [], 0
        for name in self._group:
            if name == me:  # what it has just published itself
                self._wait_for(me, began_s + self.spec.round_deadline_s)
                present.append(me)
                continue
            try:
                self._wait_for(name, began_s + self._partner_wait_s)
            except OF_PARTNERS as error:
                if self._failing.get(name) != error.code:  # else it was said before
                    say(f"outer step {self._number} without {name}: {error.what}")
                self._failing[name] = error.code
                if isinstance(error, StateError):
                    newest = max(newest, self._replicas.newest_of(name))
            else:
                present.append(name)
                self._failing.pop(name, None)
        self._waited_s += time.monotonic() - began_s
        return present, newest

    def _wait_for(self, name: str, until_s: float) -> None:
        """Wait for Δ and φ of one of the group.

        It may have begun, or come back, since it was asked.
        """
        if name in self._deltas:
            try:
                self._wait(name, until_s)
                return
            except (ConnectError, StateError):
                self._deltas.pop(name).drop()
                self._phis.pop(name).drop()
        self._ask(name)
        self._wait(name, until_s)

    def _wait(self, name: str, until_s: float) -> None:
        for asked in (self._deltas[name], self._phis[name]):
            asked.wait(max(0.0, until_s - time.monotonic()))

    def _ask(self, name: str) -> None:
        """Ask one of the group for what belongs to the outer step at hand."""
        self._publish_again()
        elements, codec, number = self.manifest.elements, self.spec.codec, self._number
        phi = self._channel.ask_vector(name, PHI, number, elements, codec)
        self._deltas[name] = self._channel.ask_vector(name, DELTA, number, elements, codec)
        self._phis[name] = phi

    def _begin(
        self, number: int, *, founding: bool = False, position: Sequence[int] | None = None
    ) -> None:
        """Begin the local steps of an outer step, from φ.

        ``founding``: they are the first ones of the run, with what all others will begin with;
        ``position``: some have been taken already.
        """
        self._number, self._has_published_delta = number, False
        self._local.begin()
        if position is not None:
            self._local.restore_position(position)
        self._drop()
        phi, published = self._state.phi, self._state.scratch
        np.copyto(published, phi)
        self._channel.publish(PHI, number, published, self.spec.codec)
        if founding:
            np.copyto(phi, published)
        if not self._local.taken:
            self._vector.read(phi)
            self._vector.zero_gradients()
        me = self._channel.peer_name
        members = self._channel.members()
        self._say_who_mixes(members)
        self._group = group_of(me, members.names, self.spec.group, number, members.outbound)
        for name in self._group:
            if name != me:
                with suppress(*OF_PARTNERS):  # it is asked again when it is needed
                    self._ask(name)
        self._follow()

    def _say_who_mixes(self, members: Members) -> None:
        """Say once if so many members cannot be dialled that some have no partner in most steps."""
        outbound, count = len(members.outbound), len(members.names)
        if self._said_alone or self.spec.group < 2 or 2 * outbound <= count:
            return
        self._said_alone = True
        say(
            f"{outbound} of {count} members cannot be dialled from outside, and no two of these can"
            f" exchange anything: at most {count - outbound} of them have a partner in one outer"
            " step. An open port (--advertise HOST:PORT) on some of them mends it"
        )

    def _join(self) -> None:
        """Begin with the newest parameters that anybody has."""
        self._drop()
        self._state.momentum.fill(0.0)
        number = self._replicas.first(self._state.phi)
        if not number:
            self._vector.write(self._state.phi)
        elif self._buffers is not None:
            self._buffers.take(number)
        self._begin(max(1, number), founding=not number)

    def _drop(self) -> None:
        """Drop what was asked for and is not needed any more."""
        for asked in (self._phis, self._deltas):
            for one in asked.values():
                one.drop()
            asked.clear()

    def _introduce(self) -> None:
        spec, elements = self.spec, self.manifest.elements
        encoded = get_codec(spec.codec).encoded_bytes(elements)
        daemon = 4 * elements + (PUBLISHED + 2 * spec.group) * encoded
        say(memory_of_replicas(elements, daemon, self.trainer_bytes))
        if spec.group > 1 and not always_stable(spec.outer_momentum, spec.gossip):
            bound = 2 * (1 - spec.outer_momentum)
            say(
                f"gossip={spec.gossip:g} is safe as long as partners seldom fail; below {bound:.3g}"
                " it is in any case"
            )
