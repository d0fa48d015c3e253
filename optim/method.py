"""Be the base of all methods: a beginning, an end, and steps of inner optimizers in between.

A method is a class of its own in a short file. It says what its peers must agree on (a ``RunSpec``)
and what happens when a local step is complete (``_step_done``). Local steps are seen through a hook
of the inner optimizer, so a training loop stays as it was: a GradScaler that skips a step does not
call the hook, nor do accumulation micro-steps, and closures and schedulers keep working. Methods
that exchange something at every step (every_step/) have a call or hooks of their own instead.

A method has the session that it was given (``peer``), and uses the private part of it
(``_channel``), of which sessions.py says what it needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from atoll.collectives.codecs import F32
from atoll.collectives.errors import AtollError, CodecError, ConfigError, DaemonLostError
from atoll.collectives.units import count
from atoll.optim.frozen import Frozen
from atoll.optim.inner import Strangers
from atoll.optim.leaving import LEAVE_WAIT_S, USUAL, Leaving, supervised_leaving
from atoll.optim.manifest import Manifest
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec
from atoll.optim.saved_values import Stateful
from atoll.optim.saving import Trainer, load, save, unsaveable
from atoll.optim.schedules import Schedules
from atoll.optim.sessions import AnySession, Channel, LeadingRank, every_rank
from atoll.peer.client.console import say


class Method(ABC):
    """Train a model together with the other peers of the run that ``peer`` belongs to.

    The method, its numbers and the model's trainable parameters must equal the run's; the first
    trainer of a run sets them, and IncompatibleRunError lists the differences to any later one.
    Use it as a context manager or call ``close()``; either closes ``peer`` too.

    ``inner`` may be a sequence (say Muon for matrices, AdamW for the rest) whose last member's
    step completes a local step. Steps that a GradScaler skips and accumulation micro-steps do not
    count. Other arguments that methods have in common: options.py.
    """

    peer: AnySession
    _channel: Channel
    spec: RunSpec
    _hands_in: ClassVar[bool] = True  # it has local steps that no round has yet

    def __init__(
        self, vector: ModelVector, peer: AnySession, inners: tuple[Optimizer, ...] = ()
    ) -> None:
        self._vector, self.manifest = vector, vector.manifest
        self.peer, self._channel = peer, peer.channel
        self._ranks = peer.channel if isinstance(peer.channel, LeadingRank) else None
        self._frozen = Frozen(vector.model)
        self._schedules = Schedules()
        self._inners, self._strangers = inners, Strangers(inners, vector.parameters)
        self._is_fresh = not any(inner.state for inner in inners)  # none has taken a step yet
        self._hooks: list[RemovableHandle] = []
        self._steps = 0  # of this trainer, as the hook has seen them
        self._loss: Any = None  # that the closure of the step at hand has returned first
        self._in_step = False  # of the last inner optimizer: its scheduler is a step behind
        self._shown = ""  # by which call other parameters are in the model
        self._leaving: Leaving | None = None
        self._is_leaving = False  # after the step at hand
        self.has_left = False  # it has handed in its last steps, and its loop is to end
        self._came_back = ""  # how it goes on after a state was loaded, for people

    # ------------------------------------------------------------ for everybody

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Return the steps that the run has behind it, as seen by this trainer.

        Those of this trainer since the last round are among them. It is the same for all trainers
        at a round's end, and for one that comes later.
        """

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory that this trainer takes for each parameter, at most.

        They come beside its model: what the method keeps, and what it makes for a moment. Copies of
        a parameter or a chunk at a time come on top, and what other trainers give in a gather.
        """
        return 0.0

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return numbers for any logger."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return where this trainer is, to be saved beside the model and the inner optimizers."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; raise ConfigError for anything else."""

    def save(self, folder: str | Path, **more: Stateful) -> Path:
        """Save this trainer in ``folder``, in place of what was saved there before.

        That is the model, the inner optimizers with their moments, the method, and ``more``: other
        objects by name that have ``state_dict`` and ``load_state_dict`` (a GradScaler, a loader of
        data, a scheduler that is not followed). Call it between two steps, as often as you like,
        and where a signal handler has left a note that the process is to end; of ranks, all call
        it. Each trainer needs a folder of its own. Return where it is saved.

        A save is complete, and on the disk, or the last one is still there. Rounds that are under
        way are waited for first. Frozen parameters are not saved, nor gradients, nor the state of
        random numbers. ConfigError for a state that cannot be saved, CheckpointError if the disk
        does not take it.
        """
        self._check_between_steps("save()")
        self._tell_unseen()
        return save(self._trainer(more), Path(folder))

    def load(self, folder: str | Path, **more: Stateful) -> bool:
        """Load what ``save`` has saved in ``folder``; return whether there was anything.

        Call it once the method is made and schedulers are followed, before the first step, with
        the same ``more``. If the run is where it was, training goes on with the same bits. If it
        has gone on, its parameters win; inner optimizers have the moments of the file. A line says
        which. Everything is compared before anything is changed: ConfigError, which names the
        parameter, for another model; or for another method or optimizer. CheckpointError for
        damaged files.
        """
        self._check_between_steps("load()")
        there = load(self._trainer(more), Path(folder))
        if there is None:
            say(f"nothing is saved in {folder} yet: this trainer begins with the run's parameters")
            return False
        self._is_fresh = False
        say(f"loaded {there}, and is at step {self.global_step}: {self._came_back}")
        return True

    def follow(self, scheduler: LRScheduler) -> None:
        """Keep the learning rates of ``scheduler`` those of ``global_step``.

        It does so now, whenever the run has gone on without this trainer, and when it takes the
        run's state anew.

        As usual call ``scheduler.step()`` once after each step of the (last) inner optimizer. Give
        it as it was made: its state need not be saved. ConfigError for one that needs a metric.
        """
        self._schedules.add(scheduler, self.global_step)

    @property
    def is_showing(self) -> bool:
        """Return whether the model has other parameters than this trainer's for a while."""
        return self._shown != ""

    def report(self, **figures: float | Tensor) -> None:
        """Tell this peer's daemon how training goes.

        Call ``report(loss=loss)`` after a step, as often as you like. The mean of what was reported
        since the last round (of replicas: outer step) travels to the daemon with the next, and
        ``atoll status`` shows it. ``loss`` is also in the line of each round in the daemon's log,
        and all peers see it on the status page, as well as ``heldout_loss``, which may be reported
        as seldom as it is measured. Costs nothing worth mentioning: a tensor is read when it
        travels. Where the optimizer is given a closure that returns a loss, that is reported
        without a call. Of ranks the first one's counts.
        """
        self._channel.observe(**figures)

    def leave_on_signal(
        self, *signals: int, wait_s: float = LEAVE_WAIT_S, exits: bool = True
    ) -> None:
        """Leave in order when one of these signals comes; by default SIGTERM or SIGINT.

        At the end of the local step at hand the steps since the last round are submitted (they
        weigh what they are), and their round is waited for, ``wait_s`` at most in all. Then the
        session is closed and the script ends with exit code 0; without ``exits`` it goes on with
        the run's parameters, and its loop is to end because ``has_left`` is true. Handlers that
        were there before are called too. `atoll run` does this for scripts that have no handlers.

        ConfigError in another thread than the main one, and for methods that exchange at every
        step: they have no steps to hand in.
        """
        if not self._hands_in:
            raise ConfigError(
                f"{type(self).__name__} exchanges at every step: there are no steps to hand in",
                fix="leave leave_on_signal() out; a signal may end such a trainer at any time",
            )
        if self._leaving is not None:
            self._leaving.close()
        self._leaving = Leaving(signals or USUAL, wait_s, self._end_within, exits=exits)

    def finish(self, wait_s: float = math.inf) -> None:
        """Hand in the local steps that no round has yet, and take the run's parameters.

        Call it where training ends, before the model is evaluated or saved for the last time; then
        ``close()``. The steps weigh what they are, and their round is waited for, ``wait_s`` at
        most. A line says what became of them; a daemon that has ended is no error then. Of ranks,
        all call it. Replicas (NoLoCo, Population) keep their own parameters. ConfigError inside a
        step, or where other parameters are shown.
        """
        self._check_between_steps("finish()")
        self._tell_unseen()
        try:
            with self._channel.hurry(wait_s):
                became = self._hand_in()
        except AtollError as error:
            became = f"the model has this trainer's parameters, not the run's: {error.what}"
        say(f"the end of training: {became}")

    def close(self) -> None:
        """Unhook inner optimizers and close the session; the model keeps its parameters."""
        if self._leaving is not None:
            self._leaving.close()
        self._tell_unseen()
        self._unhook()
        self.peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ for the methods

    def _trainer(self, more: Mapping[str, Stateful]) -> Trainer:
        return Trainer(self, self._vector, self._inners, self.spec, self._channel, more)

    def _tell_unseen(self) -> None:
        """Say once that the inner optimizer has been at work, if no step of it was seen.

        Some, as SAM, may be used without their own step(): then no round ever begins.
        """
        last = self._inners[-1:]
        if self._hands_in and self._is_fresh and not self._steps and any(o.state for o in last):
            self._is_fresh = False
            say(
                f"the inner {type(last[0]).__name__} has changed its state, but its step() was "
                "never seen, so this trainer has trained alone: give the method the optimizer "
                "whose step() the loop calls; with SAM call step(closure)"
            )

    def _check_own(self) -> None:
        """Raise ConfigError where a state would be saved beside parameters that are not its own."""
        if self._shown:
            raise ConfigError(
                f"state_dict() inside {self._shown}: the model has other parameters than this "
                "trainer's, and whoever saves both would train on from those",
                fix="save what training goes on from outside of the with block",
            )

    def _check_between_steps(self, what: str) -> None:
        if self._shown or self._in_step:
            raise ConfigError(
                f"{what} inside {self._shown or 'a step of the optimizer'}",
                fix="call it between two steps, when the model has this trainer's parameters",
            )

    def _attach(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None], frozen: str
    ) -> None:
        """Attach ``peer`` after what can be checked here; what is not trained goes along."""
        constants = self._vector.buffers.constants
        if constants:
            say(
                f"infinities in {count(len(constants), 'buffer')} of the model "
                f"({', '.join(constants[:5])}): taken for constants, and not shared with others"
            )
        if unsaved := unsaveable(self._vector.model):
            say(
                f"save() would fail: files do not take {count(len(unsaved), 'buffer')} of the "
                f"model, {', '.join(unsaved[:5])}; register such with persistent=False"
            )
        self._strangers.look()
        fingerprint = self._frozen.fingerprint(frozen)
        self._channel.attach(spec, replace(manifest, frozen=fingerprint), initial, frozen)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Count steps from now on, unless what is done inside fails.

        Inside it the trainer attaches, last of all, so that a script that cannot train has not
        founded a run.
        """
        self._hook()
        try:
            yield
        except BaseException:
            self._unhook()
            raise
        if self._inners and self._hands_in:
            self._leaving = supervised_leaving(self._end_within)

    def _hook(self) -> None:
        for inner in self._inners[-1:]:
            # torch.compile must not trace the hooks; torch leaves this function untyped
            after = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
            before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._hooks.append(inner.register_step_post_hook(after))
            self._hooks.append(inner.register_step_pre_hook(before))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _step_done(self) -> None:
        """Act on a local step that is complete; ``_steps`` counts it."""
        raise AssertionError(f"{type(self).__name__} follows no inner optimizer")

    def _end_within(self, wait_s: float) -> None:
        """Tell the channel, from a signal handler, how long its daemon is still waited for."""
        self._channel.end_within(wait_s)

    def _hand_in(self) -> str:
        """Submit what there is since the last round, wait for it, and say what became of it.

        With a run that has parameters these are in the model then.
        """
        return "it had nothing to hand in"

    def _follow(self) -> None:
        """Bring learning rates to ``global_step``, which may have jumped."""
        self._schedules.set_step(max(0, self.global_step - self._in_step))

    @contextmanager
    def _showing(self, what: str) -> Iterator[None]:
        """Save the model's parameters and buffers, and restore them at the end.

        Others may be read into it meanwhile. ``what``: the call that people know. Raise ConfigError
        for one inside another.
        """
        if self._shown:
            raise ConfigError(f"{what} inside {self._shown}")
        self._shown = what
        try:
            with self._vector.put_back(), self._vector.buffers.put_back():
                yield
        finally:
            self._shown = ""

    def _check_finite(self, so: str, fragment: int = 0) -> None:
        """Raise CodecError, in all ranks, if parameters of the fragment are not finite.

        ``so``: what therefore is not done.
        """
        bad = self._vector.not_finite(fragment)
        if not every_rank(self._channel, not bad):
            names = ", ".join(bad[:5]) or "rows of another rank"
            raise CodecError(
                f"NaN or Inf in {names} ({len(bad)} of {len(self._vector.parameters)} "
                f"parameters here) after step {self._steps}: {so}",
                fix="lower the inner learning rate or clip gradients, and start this trainer again",
            )

    # ------------------------------------------------------------ hooks

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # A fused optimizer skips a step by itself and then still calls its hooks; the GradScaler
        # leaves the reason on it for the time of the step.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item() > 0:
            return
        self._frozen.check(optimizer if len(self._inners) > 1 else None)
        self._strangers.look()  # groups may have been added
        if self._shown:
            raise ConfigError(
                f"optimizer.step() inside {self._shown}: the step would be thrown away",
                fix=f"only evaluate or save inside {self._shown}",
            )
        self._steps += 1
        if self._loss is not None:
            self.report(loss=self._loss)
            self._loss = None
        self._in_step, self._is_leaving = True, self._leaves_now()
        try:
            if self._is_leaving:
                self._leave()
            else:
                self._step_done()
        except DaemonLostError as error:  # while a step waited for it, the signal has come
            if self._ranks is not None or not self._leaves_now():
                raise
            self._has_left(f"its steps since the last round are lost: {error.what}")
        finally:
            self._in_step = self._is_leaving = False

    def _leaves_now(self) -> bool:
        """Return whether this step is the last, in all ranks alike."""
        if self.has_left:
            return False
        asked = self._leaving is not None and self._leaving.asked != ""
        return asked if self._ranks is None else self._ranks.leaves_after(self._steps, asked)

    def _leave(self) -> None:
        """Complete the last step, hand in what there is, and end the script or let its loop end.

        A daemon that has gone first is no error then. A loop that goes on all the same waits for
        its rounds as before.
        """
        leaving = self._leaving
        self.has_left = True
        try:
            with self._channel.hurry(leaving.wait_s if leaving is not None else math.inf):
                self._step_done()
                became = self._hand_in()
        except AtollError as error:
            became = f"its steps since the last round are lost: {error.what}"
        self._has_left(became)

    def _has_left(self, became: str) -> None:
        """Say what became of the last steps, and end the script or let its loop end."""
        leaving, self.has_left = self._leaving, True
        asked = leaving.asked if leaving is not None else ""
        exits = leaving is None or leaving.exits
        ends = "; this script ends" if exits else ""
        say(f"{asked or 'another rank was told to end'}: {became}{ends}")
        if exits:
            self.close()
            raise SystemExit(0)

    def _before_step(self, _optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Watch what a closure returns: hooks do not see it."""
        self._loss = None
        by_name = kwargs.get("closure")
        closure = by_name if by_name is not None else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None

        def seen(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            is_number = isinstance(loss, int | float)
            if is_number or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                self._loss = loss if self._loss is None else self._loss
            return loss

        if by_name is not None:
            return args, {**kwargs, "closure": seen}
        return (args[0], seen, *args[2:]), kwargs
