"""Count which way each condition of a decision module goes: ``if``, ``while``, ``and``, ``or``, ...

The syntax tree is changed so that every condition reports its truth as it is decided. What is made
of several (`a and not b`) reports each of them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["GUARDS", "HITS", "Guard", "counted", "guard"]

_NAME = "_guard_"
_IMPORT = f"from simulation.guards import guard as {_NAME}"


@dataclass(frozen=True)
class Guard:
    """Describe one condition: where it stands, and what it says."""

    module: str
    line: int
    text: str
    within: str  # the function


GUARDS: list[Guard] = []
HITS = bytearray()  # two for each guard: it was false, it was true


def guard(number: int, value: object) -> object:
    """Note the truth of a condition and return its value."""
    HITS[2 * number + (1 if value else 0)] = 1
    return value


def counted(module: str, source: str) -> ast.Module:
    """Return the syntax tree of a module whose conditions report their truth."""
    tree: ast.Module = _Counting(module).visit(ast.parse(source))
    after = next(n for n, node in enumerate(tree.body) if not _comes_first(node))
    tree.body[after:after] = ast.parse(_IMPORT).body
    return ast.fix_missing_locations(tree)


def _comes_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Counting(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module = module
        self._within: list[str] = []

    # ------------------------------------------------------------ what is a condition

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        test = self._condition(node.test)
        node.test = ast.Constant(True)  # not to be visited twice
        self.generic_visit(node)
        node.test = test
        return node

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        tests = [self._condition(test) for test in node.ifs]
        node.ifs = []
        self.generic_visit(node)
        node.ifs = tests
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """As a value: the last of ``a or b`` decides nothing, unless it is a comparison."""
        *first, last = node.values
        decides = isinstance(last, ast.Compare | ast.BoolOp) or _is_not(last)
        ended = self._condition(last) if decides else self.visit(last)
        node.values = [*(self._condition(value) for value in first), ended]
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None and (isinstance(node.value, ast.Compare) or _is_not(node.value)):
            node.value = self._condition(node.value)
            return node
        return self.generic_visit(node)

    def _condition(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self._condition(value) for value in test.values]
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._condition(test.operand)
            return test
        number, within = len(GUARDS), ".".join(self._within)
        GUARDS.append(Guard(self._module, test.lineno, ast.unparse(test), within))
        HITS.extend(b"\0\0")
        inner = self.visit(test)
        call = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(number), inner], [])
        return ast.copy_location(call, test)

    # ------------------------------------------------------------ where it stands

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    visit_ClassDef = visit_FunctionDef


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
