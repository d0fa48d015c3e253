"""Print every module of the product with the first sentence of its docstring: `make map`."""

from __future__ import annotations

import ast
from pathlib import Path

from harness.rooms import MODULES, ROOT


def summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main() -> None:
    folders: dict[Path, list[Path]] = {}
    for path in MODULES.values():
        folders.setdefault(path.parent, []).append(path)
    for folder, paths in sorted(folders.items()):
        print(f"\n{folder.relative_to(ROOT)}/  {summary(folder / '__init__.py')}")
        for path in paths:
            if path.name != "__init__.py":
                print(f"  {path.name:<24} {summary(path)}")


if __name__ == "__main__":
    main()
