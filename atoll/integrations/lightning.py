"""Train with Lightning as a peer of a run.

    trainer = lightning.Trainer(..., callbacks=[AtollCallback(sync_every=100)])

That is all that a script changes, with automatic and with manual optimization. The callback makes
the method when training starts. Then

* a learning rate that is stepped after each optimizer step is that of the run's step, for a late
  joiner too (with manual optimization: call ``outer.follow(scheduler)``), and training ends where
  the run has ``max_steps`` steps;
* validation sees the run's model, not this replica's;
* so does a checkpoint: its ``state_dict`` is the run's, for ``load_from_checkpoint`` and whoever
  takes the best one, and beside it lies what ``fit(ckpt_path=...)`` needs to go on. One that a
  module or a callback saves while validation goes on has the run's model and no more: from it the
  trainer begins as a newcomer with these moments. One that is saved with ``save_weights_only`` has
  what the model has: outside of validation this replica's parameters, as Lightning calls nobody;
* the loggers of the trainer get the method's metrics as ``atoll/...``, `atoll status` the loss;
* at the end the steps since the last round are handed in, and the model has the run's parameters;
* so they are in `atoll run` where it tells the script to end: Lightning has a handler of its own
  for SIGTERM, and ends after the batch at hand.

Strategies that shard the model (FSDP, DeepSpeed) are not covered: write the loop by hand for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from atoll import optim
from atoll.collectives.errors import ConfigError
from atoll.integrations import missing
from atoll.integrations.methods import Kind, evaluating, figures, follow, make_method
from atoll.optim.every_step.every_step import EveryStep
from atoll.optim.method import Method
from atoll.optim.sessions import AnySession
from atoll.peer.client.console import say
from atoll.peer.client.supervised import is_supervised

try:
    from lightning import Callback
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise missing("lightning", error) from error

KEY = "atoll"  # in a checkpoint


class AtollCallback(Callback):
    """Make a Lightning trainer a peer of the run that a daemon of this machine belongs to.

    ``method``: a method's class, its name, or a function that is called with module, optimizers and
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
        self._kind = method
        self._make: Callable[[Any, Any], Method] = lambda model, optimizer: make_method(
            model, optimizer, method, peer=peer, home=home, **options
        )
        self._saved: Any = None  # of the checkpoint that training goes on from
        self._shown = ExitStack()

    # ------------------------------------------------------------ training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = type(trainer.strategy).__name__
        if any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel")):
            raise ConfigError(
                f"{strategy} shards the model, and this callback needs a whole one",
                fix='use strategy="ddp", or write the loop by hand: atoll.attach() takes FSDP2',
            )
        kind = getattr(optim, self._kind, None) if isinstance(self._kind, str) else self._kind
        is_automatic = pl_module.automatic_optimization
        if is_automatic and isinstance(kind, type) and issubclass(kind, EveryStep):
            raise ConfigError(
                f"{kind.__name__} needs gradients before step(), and Lightning's automatic "
                "optimization makes them inside of it, in a closure",
                fix="set self.automatic_optimization = False in the module and step what "
                "self.optimizers(use_pl_optimizer=False) returns, or take a method with rounds, "
                "DiLoCo say",
            )
        self._close()
        self.outer = self._make(pl_module, trainer.optimizers)
        if is_supervised():
            with suppress(ConfigError):  # of a method that has nothing to hand in
                self.outer.leave_on_signal(wait_s=math.inf, exits=False)
        if self._saved is not None:
            _go_on(self.outer, pl_module, self._saved)
            self._saved = None
        for config in trainer.lr_scheduler_configs if pl_module.automatic_optimization else ():
            if config.interval == "step" and config.frequency == 1:
                follow(self.outer, config.scheduler)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, _batch: Any, _number: int
    ) -> None:
        outer = self.outer
        if outer is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            outer.report(loss=loss)
        pl_module.log_dict(figures(outer), on_step=True, on_epoch=False)
        if outer.global_step >= trainer.max_steps > trainer.global_step:
            say(f"the run has its {trainer.max_steps} steps: training ends")
            trainer.should_stop = True
        if outer.has_left:
            trainer.should_stop = True

    def on_train_end(self, _trainer: Any, _module: Any) -> None:
        self._finish()
        self._close()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        self._shown.close()
        if is_supervised() and isinstance(exception, SIGTERMException):
            self._finish()  # the signal came between the last step and Lightning's look for it
        self._close()

    def _finish(self) -> None:
        if self.outer is not None and not self.outer.has_left:
            self.outer.finish()

    def teardown(self, _trainer: Any, _module: Any, stage: str) -> None:
        if stage == "fit":
            self._close()

    def _close(self) -> None:
        self._shown.close()
        outer, self.outer = self.outer, None
        if outer is not None:
            outer.close()

    # ------------------------------------------------------------ validation

    def on_validation_start(self, _trainer: Any, _module: Any) -> None:
        self._shown.enter_context(evaluating(self.outer))

    def on_validation_end(self, _trainer: Any, _module: Any) -> None:
        self._shown.close()

    # ------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the run's parameters in place of this trainer's, and keep those for a resume."""
        if self.outer is None:
            return
        frozen = {n for n, p in pl_module.named_parameters() if not p.requires_grad}
        if not self.outer.is_showing:  # else the model has the run's parameters, and not its own
            own = {n: t for n, t in checkpoint["state_dict"].items() if n not in frozen}
            checkpoint[KEY] = {"method": self.outer.state_dict(), "own": own}
        with evaluating(self.outer):
            there = trainer.strategy.lightning_module_state_dict()
            run = {n: t if n in frozen else t.detach().clone() for n, t in there.items()}
        checkpoint["state_dict"] = run

    def on_load_checkpoint(self, _trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY)


def _go_on(method: Method, module: Any, saved: dict[str, Any]) -> None:
    """Go on from what a checkpoint has of this trainer.

    Model and optimizers are restored by now; but the model has the run's parameters.
    """
    there = module.state_dict()
    with torch.no_grad():
        for name, tensor in saved["own"].items():
            there[name].copy_(tensor)
    method.load_state_dict(saved["method"])
    say(f"goes on from a checkpoint of Lightning, at step {method.global_step}")
