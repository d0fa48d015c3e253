"""Find the kinds of all events that the source emits, from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from harness.rooms import MODULES

# Whose methods `note` count something, and write no line of the log.
OTHERS = {"lag", "_gaps", "broken", "positions"}


def kinds_emitted() -> dict[str, str]:
    """Return each kind with one place that emits it; fail where the source does not tell a kind."""
    found: dict[str, str] = {}
    for name, path in MODULES.items():
        if name.startswith("atoll.peer"):
            tree = ast.parse(path.read_text("utf-8"))
            for kind, line in _kinds(tree):
                found.setdefault(kind, f"{name}:{line}")
    return found


def _kinds(tree: ast.Module) -> Iterator[tuple[str, int]]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    constants = {
        t.id: n.value
        for n in tree.body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        kind = _kind_of(call)
        if kind is None:
            continue
        if isinstance(kind, ast.Name) and kind.id in constants:
            kind = constants[kind.id]
        if not isinstance(kind, ast.Name):
            yield from ((text, call.lineno) for text in _texts(kind))
            continue
        inside = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or f.lineno)]
        yield from _handed_on(tree, max(inside, key=lambda f: f.lineno), kind.id)


def _kind_of(call: ast.Call) -> ast.expr | None:
    """Return the expression of the kind, if the call writes a line of the log."""
    called, arguments = call.func, call.args
    if isinstance(called, ast.Name) and called.id == "partial" and len(arguments) > 1:
        called, arguments = arguments[0], arguments[1:]
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name not in ("note", "Note") or not arguments:
        return None
    owner = called.value if isinstance(called, ast.Attribute) else None
    of = getattr(owner, "attr", getattr(owner, "id", ""))
    if name == "note" and (isinstance(owner, ast.Subscript) or of in OTHERS):
        return None
    first = arguments[0]
    if isinstance(first, ast.Attribute):  # it hands on what others have noted
        return None
    if of == "self" and len(arguments) == 1 and not isinstance(first, ast.Constant):
        return None
    return first


def _texts(kind: ast.expr) -> list[str]:
    if isinstance(kind, ast.IfExp):
        return _texts(kind.body) + _texts(kind.orelse)
    assert isinstance(kind, ast.Constant), ast.unparse(kind)
    return [str(kind.value)]


def _handed_on(
    tree: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, int]]:
    """Return the kinds that a function is called with, or that its local name may have."""
    names = [argument.arg for argument in function.args.args]
    if name not in names:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and name in _targets(node):
                yield from ((text, node.lineno) for text in _value_of(node, name))
        return
    place = names.index(name) - (names[0] == "self")
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) == function.name:
            yield from ((text, call.lineno) for text in _texts(call.args[place]))
        elif any(getattr(argument, "attr", "") == function.name for argument in call.args):
            where = next(
                i for i, a in enumerate(call.args) if getattr(a, "attr", "") == function.name
            )
            handed = call.args[where + 1 + place]
            inside = next(f for f in ast.walk(tree) if _holds(f, call))
            if isinstance(handed, ast.Name):
                yield from _handed_on(tree, inside, handed.id)  # type: ignore[arg-type]
            else:
                yield from ((text, call.lineno) for text in _texts(handed))


def _holds(node: ast.AST, call: ast.Call) -> bool:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, functions) and any(n is call for n in ast.walk(node))


def _targets(node: ast.Assign) -> set[str]:
    return {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _value_of(node: ast.Assign, name: str) -> list[str]:
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        names = [getattr(part, "id", "") for part in target.elts]
        value = value.elts[names.index(name)]
    return _texts(value)
