"""Print every module of the product with the first sentence of its docstring: `make map`.

With ``--limits`` every named limit with its value and its reason: `make limits`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.rooms import MODULES, ROOT

LIMIT = re.compile(r"^([A-Z][A-Z0-9_]+)\b[^=]*= ([^#]+?)  # (.+)$")
UNITS = re.compile(r"_(MAX|MIN|S|BYTES|BYTES_PER_S|CHARS|ROUNDS|BITS|LIMIT|AT_ONCE|FREE)$")


def summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def limits(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, value and reason of the constants of a module that limit something."""
    for line in path.read_text("utf-8").splitlines():
        found = LIMIT.match(line)
        if found and UNITS.search(found[1]):
            yield found[1], found[2], found[3]


def main() -> None:
    folders: dict[Path, list[Path]] = {}
    for path in MODULES.values():
        folders.setdefault(path.parent, []).append(path)
    for folder, paths in sorted(folders.items()):
        print(f"\n{folder.relative_to(ROOT)}/  {summary(folder / '__init__.py')}")
        for path in paths:
            if "--limits" in sys.argv:
                for name, value, reason in limits(path):
                    print(f"  {name:<26} {value:<14} {path.name:<22} {reason}")
            elif path.name != "__init__.py":
                print(f"  {path.name:<24} {summary(path)}")


if __name__ == "__main__":
    main()
