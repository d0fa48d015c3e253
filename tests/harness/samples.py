"""Samples of every registered message, with values that follow from the types of its fields alone.

``bare`` has what a message cannot do without, ``full`` everything that it can have. A new message
gets its samples by itself; one whose fields depend on each other says here how (``FITTING``).
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from atoll.peer.membership.messages import Operation
from atoll.peer.membership.view import Member
from atoll.peer.net.wire import Within, registered
from harness.rooms import MODULES

__all__ = ["PEERS", "VARIANTS", "names", "sample"]

VARIANTS: Final = ("bare", "full")
PEERS: Final = tuple(bytes([0x10 * number]) * 32 for number in range(1, 6))
SIZE: Final = 32  # bytes where anything fits
ITEMS: Final = 2


class Sampler:
    """Draws values one after the other: no two of a sample are alike where the type allows it."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self._numbers = itertools.count(1)

    @property
    def full(self) -> bool:
        return self.variant == "full"

    def message(self, wire: str) -> Any:
        kind = registered()[wire]
        given = FITTING.get(wire, lambda _: {})(self)
        hints = get_type_hints(kind, include_extras=True)
        values = {
            field.name: given[field.name]
            if field.name in given
            else self.value(hints[field.name], None)
            for field in dataclasses.fields(kind)
            if self.full or is_required(field)
        }
        return kind(**values)

    def value(self, hint: Any, bounds: Within | None) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.value(arguments[0], arguments[1])
        if origin in (Union, types.UnionType):
            return self.value(arguments[0], bounds) if self.full else None
        if origin is tuple:
            count = within(ITEMS if self.full else 0, bounds)
            return tuple(self.value(arguments[0], None) for _ in range(count))
        if origin is dict:
            count = within(ITEMS if self.full else 0, bounds)
            return {f"key{i}": self.value(arguments[1], None) for i in range(count)}
        wire = next((name for name, kind in registered().items() if kind is hint), "")
        return self.message(wire) if wire else self._plain(hint, bounds)

    def _plain(self, hint: Any, bounds: Within | None) -> Any:
        number = next(self._numbers)
        if hint is bool:
            return self.full
        if hint is int:
            return within(number, bounds)
        if hint is float:
            return number / 4
        if hint is bytes:
            return bytes([number]) * within(SIZE, bounds)
        if hint is str:
            text = f"text{number}"
            return text.ljust(within(len(text), bounds), ".")[: within(len(text), bounds)]
        raise TypeError(f"no sample of {hint}")


def within(number: int, bounds: Within | None) -> int:
    return number if bounds is None else min(bounds.high, max(bounds.low, number))


def is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def names() -> list[str]:
    """Return every message of the product, by its name on the wire."""
    for module in MODULES:
        if module.startswith("atoll.peer"):
            importlib.import_module(module)
    return sorted(w for w, kind in registered().items() if kind.__module__.startswith("atoll."))


def sample(wire: str, variant: str) -> Any:
    return Sampler(variant).message(wire)


# ---------------------------------------------------------------- fields that depend on each other

Fitting = Callable[[Sampler], Mapping[str, Any]]


def _view(sampler: Sampler) -> Mapping[str, Any]:
    full = sampler.full
    others = {
        "newcomers": (registered()["Newcomer"](PEERS[1], 7),),
        "absent": (registered()["Absent"](PEERS[2], 8),),
        "banned": (registered()["Banned"](PEERS[3], b"\x0e" * 32),),
        "outbound": (PEERS[1],),
    }
    second = Member(PEERS[1], 2, "witness", "[2001:db8::1]:29600")
    members = (Member(PEERS[0], 1), *([second] if full else []))
    return {"members": members, "coordinator": PEERS[0], **(others if full else {"outbound": ()})}


def _begin(sampler: Sampler) -> Mapping[str, Any]:
    reduce = Operation("reduce", 1000, "sum", "float32")
    kind = "reduce" if sampler.full else "step"
    return {
        "kind": kind,
        "participants": PEERS[:2],
        "weights": (1.0, 2.5),
        "operation": reduce,
        "without": PEERS[2:3],
        "aside": PEERS[2:4],
    }


def _terms(sampler: Sampler) -> Mapping[str, Any]:
    flags = {"counted": (True, False), "shares": (3, 1), "participants": PEERS[:2]}
    return {**flags, "rule": "mean", "codec": "int8", "elements": 5000, "chunk_elements": 1024}


def _layout(sampler: Sampler) -> Mapping[str, Any]:
    if sampler.full:
        return {"kind": "ring", "shares": (3, 4), "order": (1, 0), "arity": 3}
    return {"kind": "butterfly", "shares": (1,)}


FITTING: Final[Mapping[str, Fitting]] = {
    "Member": lambda _: {"role": "witness", "address": "host.example:29600"},
    "Rules": lambda _: {"policy": "any", "on_lost": "rollback", "on_fork": "halt"},
    "View": _view,
    "Operation": lambda s: (
        {"kind": "reduce", "op": "mean", "codec": "int8"} if s.full else {"kind": "gather"}
    ),
    "Layout": _layout,
    "Begin": _begin,
    "Origin": lambda _: {"participants": PEERS[:2], "weights": (1.0, 0.5)},
    "EntryHead": lambda s: {
        "kind": "init" if s.full else "step",
        "fragment": 0 if s.full else 3,
        "origin_of": b"\0\1\1" if s.full else b"",
        "origins": tuple(s.message("Origin") for _ in range(ITEMS if s.full else 1)),
    },
    "Hello": lambda _: {
        "protocol_min": 1,
        "protocol_max": 2,
        "kind": "control",
        "program": "1.2.3",
        "ciphers": ("aes-256-gcm", "none"),
    },
    "Refused": lambda _: {"protocol_min": 2, "protocol_max": 3, "program": "1.2.3"},
    "ReachAnswer": lambda _: {"outcome": "silent"},
    "DialledBack": lambda _: {"outcome": "refused"},
    "StreamPlan": lambda s: {"pace": (1000.0, 0.0) if s.full else ()},
    "AuditTerms": _terms,
}
