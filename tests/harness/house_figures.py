"""Figures of the code's shape: `make map ARGS=--figures`, or `python house_figures.py FOLDER`.

Files, lines, statements and classes of each room; callbacks and arguments of constructors; import
circles; class names that are used twice. They are reported, and no aim in themselves.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOMS = ("collectives", "optim", "peer")
CALLBACKS_MAX = 2
ARGUMENTS_MAX = 10
CALLBACK = re.compile(r"\bCallable\b")


def modules_of(root: Path) -> dict[str, ast.Module]:
    """The product's modules, by the name they are imported under."""
    found = {}
    for room in (*ROOMS, "atoll/integrations"):
        for path in sorted((root / room).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removeprefix("atoll.")
            text = path.read_text("utf-8")
            found[f"atoll.{name}".removesuffix(".__init__")] = ast.parse(text, str(path))
    return found


def imported(modules: Mapping[str, ast.Module], module: str) -> set[str]:
    """Return what a module imports of the product, also under TYPE_CHECKING and in functions."""
    found = set()
    for node in ast.walk(modules[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else str(node.module))
    return found & modules.keys() - {module}


def circles(modules: Mapping[str, ast.Module]) -> list[list[str]]:
    """The strongly connected parts of more than one module (Tarjan, 1972)."""
    arrows = {name: imported(modules, name) for name in modules}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


def constructors(module: ast.Module) -> Iterator[tuple[str, list[ast.arg]]]:
    """Each class with the arguments of its ``__init__``; those of dataclasses do not count."""
    for node in ast.walk(module):
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                yield node.name, [*item.args.args[1:], *item.args.kwonlyargs]


def callbacks(arguments: list[ast.arg]) -> int:
    kinds = [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]
    return sum(bool(CALLBACK.search(kind)) for kind in kinds)


def doubled_classes(modules: Mapping[str, ast.Module]) -> list[str]:
    nodes = (node for module in modules.values() for node in ast.walk(module))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def main(root: Path) -> None:
    modules = modules_of(root)
    for folders in [*((room,) for room in ROOMS), ROOMS]:
        starts = tuple(f"atoll.{room}" for room in folders)
        trees = [tree for name, tree in modules.items() if name.startswith(starts)]
        paths = [path for room in folders for path in (root / room).rglob("*.py")]
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
        name = folders[0] if len(folders) == 1 else "together"
        print(
            f"{name:<12} {len(paths):4} files {lines:7,} lines {statements:7,} statements"
            f" {classes:4} classes"
        )
    made = [(name, each) for name, tree in modules.items() for each in constructors(tree)]
    counts = [(callbacks(arguments), f"{module}.{name}") for module, (name, arguments) in made]
    many = sorted((n, name) for n, name in counts if n > CALLBACKS_MAX)
    print(f"callbacks in constructors: {sum(n for n, _ in counts)}; with more than two: {many}")
    long = sorted((len(a), f"{module}.{name}") for module, (name, a) in made)
    print(f"constructors with over ten arguments: {[x for x in long if x[0] > ARGUMENTS_MAX]}")
    print(f"import circles, those for type checkers too: {circles(modules)}")
    print(f"class names used twice: {doubled_classes(modules)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
