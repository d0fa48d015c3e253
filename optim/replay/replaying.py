"""Take a segment of another trainer's local steps again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.inner import Inner, inners_of
from atoll.optim.model_io import persistent, trainable
from atoll.optim.replay.checkpoint import (
    VALUES_AT,
    Array,
    Plain,
    Tensors,
    WorkCheckpoint,
    plain,
)
from atoll.optim.replay.difference import (
    ReplayVerdict,
    Tolerance,
    compare,
    differences,
    differing_values,
)
from atoll.optim.replay.step_disclosure import Opened, Steps
from atoll.optim.saved_values import DTYPES, Stateful, array_of, tensor_of
from atoll.optim.schedules import Schedules

I64 = NDArray[np.int64]
BATCHES_MAX = 64  # of a step, unless a task says otherwise: those of accumulation, and some skipped


class ReplayTask:
    """Hold how local steps are taken, as whoever audits knows it.

    Its model and inner optimizers are made as every trainer of the run makes them; they are its own
    and not those that it trains.

    ``train(batches, step)`` is the training loop over ``batches``, each int64[n] as ``note_batch``
    got it, from the ``global_step`` that is ``step``. It takes them one by one, because random
    numbers are put back with each; where gradients are accumulated or a GradScaler skips steps,
    there are more of them than steps. ``schedulers``, given as they were made, are brought to
    ``step`` before; ``train`` steps them as usual. ``stateful``: as ``Replay`` has it.
    ``batches_max``: of a step; who claims more is not heard, or it could make others work.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        train: Callable[[Iterator[I64], int], None],
        *,
        schedulers: Sequence[LRScheduler] = (),
        stateful: Mapping[str, Stateful] | None = None,
        batches_max: int = BATCHES_MAX,
    ) -> None:
        self.state = TrainingState(model, inner, stateful or {})
        self.train, self.batches_max = train, batches_max
        self._schedules = Schedules()
        for scheduler in schedulers:
            self._schedules.add(scheduler, 0)

    def go_to(self, step: int) -> None:
        self._schedules.set_step(step)


def replay(opened: Opened, task: ReplayTask, tolerance: Tolerance | None = None) -> ReplayVerdict:
    """Take the steps of a segment again and compare with where they should end.

    If only the digests of the end are there, nothing but the same bits will do.

    Whatever goes wrong in ``task`` is a verdict too, because its start comes from the other
    trainer: so try a task on a round of your own before it judges others.
    """
    tolerance = tolerance or Tolerance()
    mine = _end(opened, task)
    if isinstance(mine, ReplayVerdict):
        return mine
    if opened.end is None:
        # At a round's end a GradScaler has not been updated yet when the checkpoint is taken.
        end = VALUES_AT if opened.is_last else None
        same = mine.digests()[:end] == opened.end_digests[:end]
        return ReplayVerdict(
            "" if same else "its end has other bits, and was not sent to be compared"
        )
    found = differences(opened.start, mine, opened.end)
    values = "" if opened.is_last else differing_values(mine, opened.end, tolerance)
    verdict = compare(found, tolerance, values=values)
    if verdict.passed or found.why or not tolerance.own:
        return verdict
    other = _end(opened, task, rounded=True)
    if isinstance(other, ReplayVerdict):
        return verdict
    return compare(found, tolerance, differences(opened.start, other, mine), values)


def _end(
    opened: Opened, task: ReplayTask, *, rounded: bool = False
) -> WorkCheckpoint | ReplayVerdict:
    """Return where its steps lead here, or why they lead nowhere.

    They are taken from its start or one that is ``rounded`` otherwise.
    """
    state, steps = task.state, opened.steps
    before = state.random_states()
    most = max(map(len, steps), default=0)
    if most > task.batches_max:
        return ReplayVerdict(
            f"{most} batches of one step; at most {task.batches_max} are taken again"
        )
    try:
        state.load(opened.start)
        if rounded:
            state.perturb()
        task.go_to(opened.extent.step_of(opened.segment))
        taken = _Taken()
        hook = state.inners[-1].register_step_post_hook(taken)
        try:
            batches = _batches(state, steps)
            task.train(batches, opened.extent.step_of(opened.segment))
        finally:
            hook.remove()
        left = sum(1 for _ in batches)
        mine = WorkCheckpoint.decode(state.capture().encode())
    except Exception as error:
        return ReplayVerdict(f"its steps cannot be taken: {type(error).__name__}: {error}"[:400])
    finally:
        state.set_random_states(before)
    if taken.count != len(steps) or left:
        return ReplayVerdict(
            f"of its batches {left} are left over after {taken.count} steps; it claims {len(steps)}"
        )
    return mine


class _Taken:
    """Count steps as a trainer does (method.py).

    Fused optimizers call hooks when they skip one.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not found_inf.item() > 0:
            self.count += 1


def _batches(state: TrainingState, steps: Steps) -> Iterator[I64]:
    for step in steps:
        for batch in step:
            state.set_random_states(batch.rng)
            yield batch.indices


# ---------------------------------------------------------------- the state of training


SEED = 1  # for a start that is rounded otherwise; any number would do
FACTOR_MAX = 4  # elements of a tensor of an optimizer's state for each of its parameter; usual is 1


class TrainingState:
    """Capture and load what the local steps of a trainer depend on.

    Rates and other settings of optimizers are no part of it: whoever takes the steps again has its
    own, or a trainer could choose them.
    """

    def __init__(self, model: nn.Module, inner: Inner, stateful: Mapping[str, Stateful]) -> None:
        self._model, self._stateful = model, dict(stateful)
        self._parameters = trainable(model)
        if any(hasattr(p, "to_local") for p in self._parameters.values()):
            raise ConfigError(
                "the model is sharded over several processes, whose steps cannot be replayed",
                fix="leave replay out, or train in one process",
            )
        self.inners = inners_of(inner, self._parameters.values())
        self.device = next(iter(self._parameters.values())).device

    def capture(self) -> WorkCheckpoint:
        """Return the state as it is now.

        On the host its tensors are those of the model, so encode it at once. ConfigError for a
        state that is not of tensors and numbers.
        """
        inner, numbers = {}, {}
        for place, p, state in self._kept():
            for key, value in state.get(p, {}).items():
                if isinstance(value, Tensor):
                    inner[f"{place}.{key}"] = array_of(value, f"{place}.{key}")
                elif isinstance(value, int | float):
                    numbers[f"{place}.{key}"] = value
                elif value is not None:  # SGD without momentum keeps a None
                    raise ConfigError(
                        f"the inner optimizer keeps {key!r}, a {type(value).__name__}, which "
                        "cannot be kept for a replay",
                        fix="use an optimizer that keeps tensors and numbers, as those of "
                        "torch.optim do",
                    )
        others = {name: one.state_dict() for name, one in self._stateful.items()}
        return WorkCheckpoint(
            {name: array_of(p, name) for name, p in self._parameters.items()},
            {name: array_of(tensor, name) for name, tensor in self._buffers()},
            inner,
            plain({"inner": numbers, "stateful": others}),
        )

    @torch.no_grad()
    def load(self, checkpoint: WorkCheckpoint) -> None:
        """Load a checkpoint of anyone.

        RemoteProtocolError if it is not of such a model, and such optimizers.
        """
        _copy(checkpoint.parameters, self._parameters, "parameters")
        _copy(checkpoint.buffers, dict(self._buffers()), "buffers")
        numbers, others = _halves(checkpoint.values)
        if others.keys() != self._stateful.keys():
            raise RemoteProtocolError(
                f"the state of {sorted(others)}, not {sorted(self._stateful)}"
            )
        taken: set[str] = set()
        groups = [group for o in self.inners for group in o.param_groups for _ in group["params"]]
        for group, (place, p, state) in zip(groups, self._kept(), strict=True):
            fresh: dict[str, Any] = {}
            for name in _below(place, checkpoint.inner):
                fresh[name[len(place) + 1 :]] = _value(checkpoint.inner[name], p, group, name)
            for name in _below(place, numbers):
                fresh[name[len(place) + 1 :]] = numbers[name]
            taken |= {f"{place}.{key}" for key in fresh}
            state.pop(p, None)
            if fresh:
                state[p] = fresh
            p.grad = None
        if taken != checkpoint.inner.keys() | numbers.keys():
            raise RemoteProtocolError("the state of other inner optimizers")
        for name, one in self._stateful.items():
            if not _alike(plain(one.state_dict()), others[name]):
                raise RemoteProtocolError(f"the state of another {name}")
            one.load_state_dict(dict(others[name]))

    @torch.no_grad()
    def perturb(self) -> None:
        """Change each parameter by a rounding error, up or down, always the same ones."""
        random = torch.Generator().manual_seed(SEED)
        for p in self._parameters.values():
            signs = torch.randint(2, p.shape, generator=random).mul_(2).sub_(1)
            p.mul_(1 + torch.finfo(p.dtype).eps * signs.to(p))

    def random_states(self) -> tuple[bytes, bytes]:
        """Return the states of the random numbers of the host and the model's device.

        The latter is empty if the model is on the host.
        """
        device = b""
        if self.device.type != "cpu":
            device = _module_of(self.device).get_rng_state(self.device).numpy().tobytes()
        return torch.get_rng_state().numpy().tobytes(), device

    def set_random_states(self, states: tuple[bytes, bytes]) -> None:
        """Set states of random numbers of anyone; those that are not kept stay.

        RemoteProtocolError for bytes that are no state.
        """
        host, device = (torch.frombuffer(bytearray(s or b"\0"), dtype=torch.uint8) for s in states)
        try:
            if states[0]:
                torch.set_rng_state(host)
            if states[1] and self.device.type != "cpu":
                _module_of(self.device).set_rng_state(device, self.device)
        except RuntimeError as error:
            raise RemoteProtocolError(f"no state of random numbers: {error}") from error

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of now: code may put another tensor into a buffer's place."""
        for name, (module, key) in persistent(self._model).items():
            tensor = module._buffers[key]
            assert tensor is not None
            yield name, tensor

    def _kept(self) -> Iterator[tuple[str, nn.Parameter, dict[Any, Any]]]:
        """Yield name and parameter for all that optimizers hold, and the state of the optimizer."""
        for number, optimizer in enumerate(self.inners):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            for n, p in enumerate(held):
                yield f"{number}.{n}", p, optimizer.state


def _copy(tensors: Tensors, into: Mapping[str, Tensor], what: str) -> None:
    if tensors.keys() != into.keys():
        raise RemoteProtocolError(f"the {what} of another model")
    for name, tensor in into.items():
        array = tensors[name]
        if (DTYPES[array.dtype], array.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise RemoteProtocolError(f"{name} is {array.shape} {array.dtype}")
        tensor.copy_(tensor_of(array))


def _below(place: str, names: Mapping[str, object]) -> list[str]:
    return [name for name in names if name.startswith(f"{place}.")]


def _value(array: Array, p: nn.Parameter, group: dict[str, Any], name: str) -> Tensor:
    """Return a tensor where the optimizer keeps it.

    Scalars are on the host, unless it takes them to the device. RemoteProtocolError for one that is
    much larger than its parameter.
    """
    tensor = tensor_of(array)
    if tensor.numel() > FACTOR_MAX * max(1, p.numel()):
        raise RemoteProtocolError(f"{name[:80]} is much larger than its parameter")
    on_host = not array.shape and not (group.get("fused") or group.get("capturable"))
    return tensor if on_host else tensor.to(p.device)


def _halves(values: Mapping[str, Plain]) -> tuple[dict[str, float], dict[str, dict[str, Plain]]]:
    """Return the numbers that optimizers keep, and the states of others.

    RemoteProtocolError for values of other types.
    """
    numbers, others = values.get("inner"), values.get("stateful")
    if not isinstance(numbers, dict) or not isinstance(others, dict):
        raise RemoteProtocolError("a checkpoint without the values of its trainer")
    if not all(isinstance(n, int | float) for n in numbers.values()):
        raise RemoteProtocolError("the state of an inner optimizer has values that are no numbers")
    if not all(isinstance(state, dict) for state in others.values()):
        raise RemoteProtocolError("a state that has no names")
    return numbers, others


def _alike(mine: Plain, theirs: Plain) -> bool:
    """Return whether both have the same names, with values of the same types."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_alike(mine[k], theirs[k]) for k in mine)
    return type(mine) is type(theirs)


def _module_of(device: torch.device) -> Any:
    """Return the module of a device: torch.cuda and its like."""
    return torch.get_device_module(device)
