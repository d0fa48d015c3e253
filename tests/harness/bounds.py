"""How much a machine holds: every container that can be reached from it, counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

__all__ = ["held_items"]

_ATOMS = (bytes, str, int, float, bool, type(None))


def held_items(root: object) -> int:
    """Items in all dicts, lists, sets, deques and tuples below ``root``, each object once."""
    seen: set[int] = set()
    stack = [root]
    count = 0
    while stack:
        thing = stack.pop()
        if isinstance(thing, _ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        inner = list(_inside(thing))
        if isinstance(thing, dict | list | set | frozenset | deque | tuple):
            count += len(inner)
        stack.extend(inner)
    return count


def _inside(thing: object) -> Iterator[object]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | set | frozenset | deque | tuple):
        yield from thing
    elif type(thing).__module__.startswith("atoll.peer"):
        yield from getattr(thing, "__dict__", {}).values()
        for kind in type(thing).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(thing, name):
                    yield getattr(thing, name)
