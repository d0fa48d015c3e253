"""Train with HF Trainer as a peer of a run, so also with TRL's trainers and with PEFT models.

    trainer = Trainer(..., callbacks=[AtollCallback(sync_every=100)])

That is all that a script changes. The callback makes the method when training begins. Then

* the learning rate is that of the run's step, for a late joiner too, and training ends where the
  run has as many steps as it was to have;
* whatever the trainer evaluates, predicts or saves while it trains is the run's model, not this
  replica's: its own evaluations, ``trainer.evaluate()`` and ``trainer.save_model()`` by hand. So
  the best checkpoint is what was evaluated;
* ``checkpoint-N/atoll`` has what is this trainer's own, and ``resume_from_checkpoint`` loads it;
* the loggers of the trainer (TensorBoard, W&B, trackio) get the method's metrics as ``atoll/...``
  with the training loss, and ``atoll status`` gets the loss;
* at the end the steps since the last round are handed in, and the model has the run's parameters.

A Trainer tells its callbacks neither when an evaluation begins nor that training has failed, and
logs to others first. So the callback stands before four methods of its own trainer
(``_stand_before``), and before one more where it was added after the trainer was made; it replaces
none of them, and touches no class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.integrations import missing
from atoll.integrations.methods import Kind, evaluating, figures, follow, make_method
from atoll.optim.method import Method
from atoll.optim.sessions import AnySession
from atoll.peer.client.console import say

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise missing("transformers", error) from error

FOLDER = "atoll"  # in a checkpoint of the trainer
DEFAULT_SEED = TrainingArguments.__dataclass_fields__["seed"].default


class AtollCallback(TrainerCallback):
    """Make a Trainer a peer of the run that a daemon of this machine belongs to.

    ``method``: a method's class, its name, or a function that is called with model, optimizer and
    ``peer``; ``options`` are handed on to it, and ``sync_every`` is among them for most. ``peer``:
    the session; by default ``atoll.attach(home)``. ``outer`` is the method while training goes on.
    """

    def __init__(
        self,
        method: Kind = "DiLoCo",
        *,
        peer: AnySession | None = None,
        home: str | Path | None = None,
        **options: Any,
    ) -> None:
        self.outer: Method | None = None
        self._make: Callable[[Any, Any], Method] = lambda model, optimizer: make_method(
            model, optimizer, method, peer=peer, home=home, **options
        )
        self._trainer: Any = None
        self._resumed: Any = None  # as train() was told

    # ------------------------------------------------------------ events

    def on_init_end(self, *_: Any, **__: Any) -> None:
        self._stand_before(_trainer_of(self))

    def on_train_begin(self, args: Any, state: Any, _control: Any, **given: Any) -> None:
        if self._trainer is None:  # it was added later, and train() goes on already
            trainer = _trainer_of(self)
            self._stand_before(trainer)
            if (run_epoch := getattr(trainer, "_run_epoch", None)) is not None:
                trainer._run_epoch = self._closing_at_error(run_epoch)
        self.close()
        if args.data_seed is None and args.seed == DEFAULT_SEED:
            say(
                f"samples are drawn by the seed {DEFAULT_SEED}, as on every machine that sets none:"
                " give each a data_seed of its own in TrainingArguments, or data of its own"
            )
        self.outer = self._make(given["model"], given["optimizer"])
        if state.global_step:
            self.outer.load(self._checkpoint(args, state) / FOLDER)
        if (scheduler := given["lr_scheduler"]) is not None:
            follow(self.outer, scheduler)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        outer = self.outer
        if outer is None:
            return control
        if outer.global_step >= state.max_steps > state.global_step:
            say(f"the run has its {state.max_steps} steps: training ends after {state.global_step}")
            control.should_training_stop = True
        if outer.has_left:
            control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.outer is not None and not args.save_only_model:
            self.outer.save(_folder(args, state) / FOLDER)

    def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.outer is not None:
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                say("the model is that of the best checkpoint: steps since the last round are lost")
            else:
                self.outer.finish()
        self.close()

    def close(self) -> None:
        """Close the method and its session, if there are any; training ends with it by itself."""
        outer, self.outer = self.outer, None
        if outer is not None:
            outer.close()

    # ------------------------------------------------------------ methods of the trainer

    def _stand_before(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.evaluation_loop = self._with_run(trainer.evaluation_loop)
        trainer.save_model = self._with_run(trainer.save_model)
        trainer.log = self._with_figures(trainer.log)
        trainer.train = self._closing(trainer.train)

    def _with_run(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Evaluate or save what the run has."""

        @functools.wraps(call)
        def with_run(*given: Any, **named: Any) -> Any:
            with evaluating(self.outer):
                return call(*given, **named)

        return with_run

    def _with_figures(self, log: Callable[..., Any]) -> Callable[..., Any]:
        """Add the method's metrics to the logs of training steps, and report their loss."""

        @functools.wraps(log)
        def with_figures(logs: dict[str, Any], *given: Any, **named: Any) -> Any:
            if self.outer is not None and "loss" in logs:
                self.outer.report(loss=logs["loss"])
                logs.update(figures(self.outer))
            return log(logs, *given, **named)

        return with_figures

    def _closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Close the session however training ends."""

        @functools.wraps(train)
        def closing(resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
            self._resumed = resume_from_checkpoint
            try:
                return train(resume_from_checkpoint, *given, **named)
            finally:
                self.close()

        return closing

    def _closing_at_error(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Close the session where ``call`` fails, in a ``train()`` that was called before ours."""

        @functools.wraps(call)
        def closing(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except BaseException:
                self.close()
                raise

        return closing

    def _checkpoint(self, args: Any, state: Any) -> Path:
        """Return the folder of the checkpoint that was resumed."""
        if isinstance(self._resumed, str | Path):
            return Path(self._resumed)
        found = get_last_checkpoint(args.output_dir) if self._resumed else None
        return _folder(args, state) if found is None else Path(found)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _trainer_of(callback: AtollCallback) -> Any:
    """Return the Trainer that is calling this callback; ConfigError if there is none.

    A Trainer gives its callbacks a lot, but not itself: it is found among those who call.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        handler = getattr(found, "callback_handler", None) if isinstance(found, Trainer) else None
        if handler is not None and callback in handler.callbacks:
            return found
        frame = frame.f_back
    raise ConfigError(
        "no transformers.Trainer is calling this AtollCallback",
        fix="give it to one: Trainer(..., callbacks=[AtollCallback(sync_every=100)])",
    )
