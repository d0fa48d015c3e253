"""Traces of the membership machine, as lines and as a digest that only another protocol changes.

Every effect of every process is a line, under the name that its class states in ``trace``; messages
and their parts are named as on the wire. Values stand in the order of their fields, without the
names of these: renaming classes and fields leaves a trace as it is. So do the words that people
read: a text with a blank in it is a dot here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

from atoll.peer.net.wire import registered

__all__ = ["Recorder", "trace_name", "traced"]

DIGITS = 16
ID_BYTES = 32


class Recorder:
    """The trace of one run: its digest, and with ``keep`` its lines."""

    def __init__(self, keep: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._keep = keep
        self.lines: list[str] = []

    def record(self, now_s: float, host: str, effects: Iterable[object]) -> None:
        for effect in effects:
            line = f"{now_s:.4f} {host} {traced(effect)}\n"
            self._hash.update(line.encode())
            if self._keep:
                self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:DIGITS]


@functools.cache
def trace_name(kind: type) -> str:
    """Return what traces call an effect, a message or a part of one. TypeError without a name."""
    stated = vars(kind).get("trace")
    named = stated or next((wire for wire, known in registered().items() if known is kind), None)
    if not isinstance(named, str):
        raise TypeError(f"{kind.__name__} has neither a name in traces nor one on the wire")
    return named


def traced(value: Any) -> str:
    """Return one value as traces show it."""
    kind = type(value)
    if kind is bytes:
        return _bytes(value)
    if kind is str:
        return "." if " " in value else value or '""'
    if value is None:
        return "-"
    if kind in (int, float, bool):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return _dataclass(value, kind)
    if kind in (tuple, list):
        return f"({' '.join(map(traced, value))})"
    if kind in (set, frozenset):
        return f"({' '.join(sorted(map(traced, value)))})"
    if isinstance(value, Mapping):
        return f"({' '.join(sorted(f'{traced(k)}={traced(v)}' for k, v in value.items()))})"
    if isinstance(value, Enum):
        return traced(value.value)
    raise TypeError(f"a trace cannot show a {kind.__name__}")


def _dataclass(value: object, kind: type) -> str:
    name, parts = _shape(kind)
    return f"{name}({' '.join([traced(part(value)) for part in parts])})"


@functools.cache
def _shape(kind: type) -> tuple[str, tuple[attrgetter[Any], ...]]:
    parts = tuple(attrgetter(field.name) for field in dataclasses.fields(kind))
    return trace_name(kind), parts


def _bytes(value: bytes) -> str:
    """Show ids and digests by their beginning, which tells them apart; longer ones by a hash."""
    if len(value) > ID_BYTES:
        return hashlib.sha256(value).hexdigest()[:DIGITS]
    return value.hex()[:DIGITS] if len(value) == ID_BYTES else value.hex() or '""'
