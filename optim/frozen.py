"""Compare what is not trained of a model when a trainer attaches; watch it while it trains.

Only trainable parameters travel. Frozen ones (the base of a LoRA, say) are each trainer's own, and
what is averaged over different ones is good for none of them. So peers must agree on the names,
shapes and dtypes of frozen parameters, and on a digest of their values; of persistent buffers on
names, shapes and dtypes, since values differ between peers by right. Other buffers are tables and
caches that are made anew, in sizes that may depend on what a process has seen, so nothing is said
of them.

The digest is the first 8 bytes of the SHA-256 of a parameter's bytes, in C order. Of one with more
than 4 MiB it is that of 256 blocks of 16 KiB, evenly spaced, the first and the last ones among
them: another base differs everywhere, and 7 billion parameters are looked at in seconds. Of a
sharded parameter it is that of the whole, which all ranks bring together for a moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import FROZEN_LINES_MAX, FrozenTensor
from atoll.optim.model_io import canonical, persistent
from atoll.optim.run_spec import FROZEN

BLOCK_BYTES = 16 * 1024
BLOCKS = 256
DIGEST_BYTES = 8  # for accidents: who lies about its values lies about their digest too
NAMES_SHOWN_MAX = 5


class Frozen:
    """Remember which parameters of ``model`` were trained, and which not, when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = canonical(model.named_parameters())
        self._trains = {name: p.requires_grad for name, p in self._parameters.items()}
        # FSDP2 registers other tensors while a layer is at work.
        self._moves = any(_is_sharded(p) for p in self._parameters.values())
        self._remember()

    def fingerprint(self, frozen: str) -> tuple[FrozenTensor, ...] | None:
        """Return what peers compare, or None where it is ``frozen="ignore"``.

        All ranks of a sharded model call it. Raise ConfigError for values that cannot be read.
        """
        if frozen not in FROZEN:
            raise ConfigError(f"frozen is {frozen!r}", fix=f"use one of {', '.join(FROZEN)}")
        if frozen == FROZEN[-1]:
            return None
        found = [
            FrozenTensor(name, _outline(p), _digest(name, p))
            for name, p in self._parameters.items()
            if not self._trains[name]
        ]
        for name, (module, key) in persistent(self._model).items():
            found.append(FrozenTensor(name, f"buffer {_outline(module._buffers[key])}"))
        return _bounded(found)

    def check(self, stepping: Optimizer | None = None) -> None:
        """Raise ConfigError if a parameter was frozen, unfrozen, added, removed or replaced.

        It would not travel, and nobody would notice. Takes microseconds for each module.

        ``stepping``: one of several optimizers. While it steps, parameters of the others may be
        frozen for a moment, as Lightning's ``toggle_optimizer`` does.
        """
        if not (
            all(len(there) == count for there, count in self._sizes)
            and all(there.get(key) is value for there, key, value in self._entries)
            and all(p.requires_grad is trains for p, trains in self._flags)
        ):
            self._compare(stepping)
            self._remember()

    def _remember(self) -> None:
        """Keep what ``check`` can compare quickly."""
        modules = list(self._model.modules())
        self._flags = [(p, self._trains[name]) for name, p in self._parameters.items()]
        children: list[dict[str, Any]] = [module._modules for module in modules]
        own: list[dict[str, Any]] = [module._parameters for module in modules]
        self._sizes = [(there, len(there)) for there in (*children, *own)]
        watched = children if self._moves else (*children, *own)
        self._entries = [(there, key, there[key]) for there in watched for key in there]

    def _compare(self, stepping: Optimizer | None) -> None:
        before, now = self._parameters, canonical(self._model.named_parameters())
        both = [(name, now[name], self._trains[name]) for name in before if name in now]
        held = None if stepping is None else _held(stepping)
        changes = {
            "now trained": [name for name, p, trains in both if p.requires_grad and not trains],
            "no longer trained": [
                name
                for name, p, trains in both
                if trains and not p.requires_grad and (held is None or id(p) in held)
            ],
            "new": [name for name in now if name not in before],
            "gone": [name for name in before if name not in now],
            "replaced": [name for name, p, _ in both if p is not before[name] and not self._moves],
        }
        lines = [f"{what}: {_shown(names)}" for what, names in changes.items() if names]
        if lines:
            raise ConfigError(
                "the model's parameters are not those that its method was made for ("
                + "; ".join(lines)
                + "): only those that were trainable then are exchanged with other peers",
                fix="freeze, unfreeze and add parameters before the method is made; to train other "
                "ones later, close it and make another one, in a run of another name",
            )


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _shown(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _outline(tensor: Tensor | None) -> str:
    assert tensor is not None
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


@torch.no_grad()
def _digest(name: str, parameter: Tensor) -> str:
    text = hashlib.sha256()
    try:
        for raw in _sampled(parameter.detach()):
            text.update(raw.cpu().numpy().data)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the values of the frozen parameter {name} ({type(parameter).__name__} on "
            f"{parameter.device}) cannot be read: {str(error)[:200]}",
            fix='load it before the method is made; or give the method frozen="ignore", and see to '
            "it that all peers have the same",
        ) from error
    return text.hexdigest()[: 2 * DIGEST_BYTES]


def _sampled(tensor: Tensor) -> Iterator[Tensor]:
    """Yield uint8[n], the sampled bytes of each plain tensor that ``tensor`` is made of.

    Quantized ones have several.
    """
    if _is_sharded(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    if hasattr(tensor, "__tensor_flatten__"):
        inside, _ = tensor.__tensor_flatten__()
        for key in inside:
            yield from _sampled(getattr(tensor, key))
        return
    flat = tensor.reshape(-1).contiguous()  # one that is expanded stays a view until then
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).reshape(-1)
    last = raw.numel() - BLOCK_BYTES
    if raw.numel() <= BLOCKS * BLOCK_BYTES:
        yield raw
    else:
        starts = [number * last // (BLOCKS - 1) for number in range(BLOCKS)]
        yield torch.cat([raw[start : start + BLOCK_BYTES] for start in starts])


def _is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor.

    To ask by type would load a second's worth of modules.
    """
    return hasattr(tensor, "full_tensor")


def _bounded(found: Iterable[FrozenTensor]) -> tuple[FrozenTensor, ...]:
    """Return all in order of name; where they are too many, whole modules instead."""
    tensors = sorted(found, key=lambda tensor: tensor.name)
    groups = {tensor.name: [tensor] for tensor in tensors}
    depth = max((name.count(".") for name in groups), default=0)
    while len(groups) > FROZEN_LINES_MAX:
        groups = {}
        for tensor in tensors:
            groups.setdefault(".".join(tensor.name.split(".")[:depth]), []).append(tensor)
        depth -= 1
    lines = [_together(name, group) for name, group in groups.items()]
    return tuple(sorted(lines, key=lambda tensor: tensor.name))


def _together(name: str, group: Sequence[FrozenTensor]) -> FrozenTensor:
    if len(group) == 1:
        return group[0]
    text = hashlib.sha256("\n".join(f"{one.name}\t{one}" for one in group).encode())
    return FrozenTensor(f"{name}.*", f"{len(group)} tensors", text.hexdigest()[: 2 * DIGEST_BYTES])
