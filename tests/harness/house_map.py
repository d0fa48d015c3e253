"""Print every module of the product with the first sentence of its docstring: `make map`."""

from __future__ import annotations

import ast

from harness.rooms import MODULES, ROOT


def main() -> None:
    package = ""
    for name, path in MODULES.items():
        if name.rpartition(".")[0] != package and path.name != "__init__.py":
            package = name.rpartition(".")[0]
            print(f"\n{path.parent.relative_to(ROOT)}/")
        summary = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")[0]
        print(f"  {path.name:<24} {' '.join(summary.split())}")


if __name__ == "__main__":
    main()
