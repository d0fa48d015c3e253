"""Name a model's parameters and buffers, whatever wraps it, and write settings as text.

The text is for the specification of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

# Wrappers put their name into the names of what they wrap: torch.compile, FSDP, checkpointing.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
T = TypeVar("T")


def canonical(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return all values by their canonical names, in order of name.

    DDP's ``module.`` is dropped when all names have it, other wrappers' parts wherever they are, so
    that a compiled replica under DDP and a bare one have the same names.
    """
    paths = [([part for part in name.split(".") if part not in WRAPPERS], v) for name, v in named]
    while paths and all(path[0] == "module" and len(path) > 1 for path, _ in paths):
        paths = [(path[1:], value) for path, value in paths]
    return dict(sorted((".".join(path), value) for path, value in paths))


def settings_text(wire: str, settings: Any) -> str:
    """Return ``wire(field=value, ...)`` of a dataclass.

    Peers compare it in the specification, so it must not follow the name of the class. Fields with
    ``repr=False`` are left out.
    """
    values = (
        (field.name, getattr(settings, field.name)) for field in fields(settings) if field.repr
    )
    shown = (f"{name}={value if hasattr(value, 'wire') else repr(value)}" for name, value in values)
    return f"{wire}({', '.join(shown)})"
