"""Machines as values: copies that change apart from their original, and fingerprints."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership import view
from atoll.peer.membership.node import Node
from atoll.peer.rounds import entries

__all__ = ["clone", "machine_mark", "teach_copy"]


def clone(node: Node) -> Node:
    """A copy that changes apart from its original; what is frozen is shared."""
    return copy.deepcopy(node)


def teach_copy() -> None:
    """Frozen messages, events and views need no copies."""
    for module in (ms, ev, view, entries):
        for kind in vars(module).values():
            if isinstance(kind, type) and is_dataclass(kind):
                copy._deepcopy_dispatch[kind] = _same  # type: ignore[attr-defined]


def _same(thing: object, _memo: object) -> object:
    return thing


def machine_mark(node: Node, now_s: float) -> int:
    """Machines are shared between states, so most have been looked at before."""
    known = _MARKS.get(id(node))
    if known is None or known[0] is not node or known[1] != now_s:
        known = _MARKS[id(node)] = (node, now_s, hash(_shape(node, now_s)))
        if len(_MARKS) > MARKS_MAX:
            del _MARKS[next(iter(_MARKS))]
    return known[2]


MARKS_MAX = 20_000
_MARKS: dict[int, tuple[Node, float, int]] = {}
_SKIPPED = (FunctionType, BuiltinFunctionType, MethodType)


def _shape(root: object, now_s: float) -> object:
    seen: dict[int, int] = {}

    def of(thing: object, name: str = "") -> object:
        if isinstance(thing, float):
            return round(max(thing - now_s, -99.0), 3) if name.endswith("_s") else thing
        if isinstance(thing, bytes | str | int | type(None) | Enum):
            return thing
        if isinstance(thing, _SKIPPED):
            return None
        if isinstance(thing, tuple):
            return tuple(of(item, name) for item in thing)
        if is_dataclass(thing) and type(thing).__hash__ is not None:  # frozen
            return thing
        if id(thing) in seen:
            return seen[id(thing)]
        seen[id(thing)] = len(seen)
        if isinstance(thing, dict):
            return tuple((str(key), of(value, name)) for key, value in thing.items())
        if isinstance(thing, set | frozenset):
            return frozenset(thing)
        if isinstance(thing, list | deque):
            return tuple(of(item, name) for item in thing)
        return tuple((key, of(value, key)) for key, value in _attributes(thing))

    return of(root)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(thing):
        for item in fields(thing):
            yield item.name, getattr(thing, item.name)
    for key, value in getattr(thing, "__dict__", {}).items():
        if key not in ("now_s", "_deadline_s", "_cached", "_told", "timing"):
            yield key, value
