"""Import decision modules with their source altered, for one process: faults, mutations, counters.

Each alteration takes the source of a module and returns what is compiled in its place. Nothing is
written: neither the files nor the caches of bytecode change.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["GROUP", "MODULES", "Alteration", "alter", "source_of"]

GROUP = "atoll.peer.membership"
FOLDER = Path(__file__).parents[2] / "peer" / "membership"
MODULES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))

Alteration = Callable[[str], "str | ast.Module"]


def source_of(module: str) -> str:
    """Return the source of a decision module as it is on disk."""
    return (FOLDER / f"{module}.py").read_text("utf-8")


def alter(alterations: Mapping[str, Alteration]) -> None:
    """Let this process import these decision modules altered. Before atoll.peer is imported."""
    targets = {f"{GROUP}.{module}": act for module, act in alterations.items()}
    loaded = targets.keys() & sys.modules.keys()
    assert not loaded, f"{sorted(loaded)} were imported before they were altered"
    sys.meta_path.insert(0, _Finder(targets))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, targets: Mapping[str, Alteration]) -> None:
        self._targets = targets

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        act = self._targets.get(fullname)
        if act is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(fullname, found.origin)
        loader.act = act
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    act: Alteration

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.act(Path(self.path).read_text("utf-8")), self.path, "exec")
