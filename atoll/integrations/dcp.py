"""Keep where a method is in checkpoints of torch.distributed.checkpoint.

    state = {"model": ..., "optim": ..., dcp.KEY: dcp.MethodState(outer)}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)       # and load, on all ranks

Make the method before the first load. ``load`` goes through the keys of a state in their order, and
a method is loaded last, because it compares the run with what is in the model by then: hence the
``~`` in ``KEY``. Each rank has an entry of its own, which no other number of ranks can load.

A method's state is safetensors, in one entry of bytes: DCP keeps what is no tensor as a pickle, and
in this one there are bytes alone. DCP unpickles what it loads, so load folders that you trust only;
``outer.save(folder)`` keeps the same without any pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from atoll.collectives.errors import CheckpointError, ConfigError, ProtocolError
from atoll.optim.method import Method
from atoll.optim.replay.checkpoint import Array, decode, encode
from atoll.optim.saved_values import apart, together

KEY = "~atoll"  # behind all letters
VALUES = "values"  # in the metadata


class MethodState:
    """Save and load a method as DCP does with what is ``Stateful``.

    With ``method`` None what is loaded is kept until ``take`` asks for it, where the method can
    only be made after the model is loaded.
    """

    def __init__(self, method: Method | None = None) -> None:
        self.method = method
        self._kept: bytes = b""

    def state_dict(self) -> dict[str, Any]:
        return {_own(): b"" if self.method is None else pack(self.method.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        data = state.get(_own())
        if not isinstance(data, bytes):
            raise ConfigError(
                f"this checkpoint has no {_own()} of atoll, but {sorted(state)[:8]}",
                fix="load it with as many ranks as have saved it",
            )
        if self.method is not None:
            self.method.load_state_dict(unpack(data))
        else:
            self._kept = data

    def take(self) -> dict[str, Any] | None:
        """Return what was loaded before there was a method, once; None if nothing was."""
        data, self._kept = self._kept, b""
        return unpack(data) if data else None


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a method's state as bytes; ConfigError for values that no file takes."""
    tensors: dict[str, Array] = {}
    values = apart(state, "method", tensors)
    return bytes(encode(tensors, {VALUES: json.dumps(values, allow_nan=False)}))


def unpack(data: bytes) -> dict[str, Any]:
    """Return what ``pack`` was given; CheckpointError for other bytes."""
    try:
        tensors, metadata = decode(data)
        state = together(json.loads(metadata[VALUES]), tensors)
    except (ValueError, KeyError, ProtocolError) as error:
        raise CheckpointError(f"a saved method cannot be read: {str(error)[:200]}") from error
    if not isinstance(state, dict):
        raise CheckpointError("a saved method has no fields")
    return state


def _own() -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0}"
