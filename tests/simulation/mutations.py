"""Draw mutations of the decision modules from their syntax trees, by a seed and not by hand.

Kinds: another comparison, another operator, ``and`` for ``or``, a condition or a part of one that
is dropped, a lost ``not``, two arguments of a call that change places. Words for people are left
alone: texts, notes, and the functions that only make them.

A *marked* module is not mutated. It notes where a mutation could have made a difference: a seed in
which the two never differ has the same run with the mutation as without, so it need not be run.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from simulation.altered import MODULES, source_of

__all__ = ["HITS", "Mutation", "draw", "marked", "mutated"]

_ORDERS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
# These make words and nothing else.
WORDS = frozenset(
    (
        *("describe", "plain", "shown_apart", "_shown", "_named", "_names", "_name", "_why"),
        *(
            "__str__",
            "_hold",
            "_note_lost",
            "_note_retry",
            "_note_quorum",
            "_note_links",
            "_without_quorum",
        ),
    )
)
SAID = frozenset(("Note", "listed", "duration", "count", "short"))  # calls: their arguments
TEXTS = frozenset(("text", "why", "what", "names", "how", "of", "more", "tail", "needs"))


@dataclass(frozen=True)
class Mutation:
    """Describe one change of one module: its ``place`` counts the candidates in the module."""

    module: str
    place: int
    line: int
    kind: str
    before: str
    after: str

    @property
    def words(self) -> str:
        """Return what it is, wherever in the module that stands."""
        return f"{self.module} {self.kind}: {self.before} -> {self.after}"

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.kind}: {self.before} -> {self.after}"


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class _Candidate:
    """Hold a node, what takes its place, and how a marked module tells whether that matters.

    Of an ``if`` the place is that of its condition.
    """

    node: ast.expr | ast.If
    kind: str
    before: str
    instead: ast.expr
    marked: Callable[[int], ast.expr]


def _candidates(node: ast.AST) -> Iterator[_Candidate]:
    if isinstance(node, ast.If | ast.IfExp):
        yield from _conditions(node)
    elif isinstance(node, ast.Compare):
        yield from _comparisons(node)
    elif isinstance(node, ast.BoolOp):
        yield from _parts(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
        other = copy.deepcopy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield _plain(node, "operator", other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _plain(node, "lost not", copy.deepcopy(node.operand))
    elif isinstance(node, ast.Call) and _name_of(node.func) not in ("max", "min"):
        yield from _swaps(node)


def _plain(node: ast.expr, kind: str, instead: ast.expr) -> _Candidate:
    """A mutation that matters whenever it is reached, as far as is known."""
    return _Candidate(node, kind, ast.unparse(node), instead, lambda n: _noted(n, node))


def _conditions(node: ast.If | ast.IfExp) -> Iterator[_Candidate]:
    """The whole condition is dropped: it holds always, or never."""
    for holds in (True, False):

        def mark(number: int, holds: bool = holds) -> ast.expr:
            return _called("decides", [ast.Constant(number), ast.Constant(not holds), node.test])

        before = f"if {ast.unparse(node.test)}"
        yield _Candidate(node, "dropped condition", before, ast.Constant(holds), mark)


def _comparisons(node: ast.Compare) -> Iterator[_Candidate]:
    for place, found in enumerate(node.ops):
        for kind in _ORDERS[type(found)]:
            other = copy.deepcopy(node)
            other.ops[place] = kind()

            def mark(number: int, other: ast.Compare = other) -> ast.expr:
                if len(node.ops) > 1:
                    return _noted(number, node)
                names = [type(each.ops[0]).__name__ for each in (node, other)]
                words = [ast.Constant(name) for name in names]
                sides = [node.left, node.comparators[0]]
                return _called("compared", [ast.Constant(number), *sides, *words])

            yield _Candidate(node, "comparison", ast.unparse(node), other, mark)


def _parts(node: ast.BoolOp) -> Iterator[_Candidate]:
    other = copy.deepcopy(node)
    other.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    yield _plain(node, "and/or", other)
    for place in range(len(node.values)):
        left = [copy.deepcopy(value) for n, value in enumerate(node.values) if n != place]
        instead = ast.BoolOp(node.op, left) if len(left) > 1 else left[0]

        def mark(number: int, place: int = place) -> ast.expr:
            """It decides only where it is false in an ``and``, true in an ``or``."""
            kind, values = ast.Constant(isinstance(node.op, ast.Or)), [*node.values]
            values[place] = _called("decides", [ast.Constant(number), kind, values[place]])
            return ast.BoolOp(node.op, values)

        yield _Candidate(node, "dropped part", ast.unparse(node), instead, mark)


def _swaps(node: ast.Call) -> Iterator[_Candidate]:
    for place in range(len(node.args) - 1):
        pair = node.args[place : place + 2]
        alike = ast.unparse(pair[0]) == ast.unparse(pair[1])
        if alike or any(isinstance(each, ast.Starred | ast.Lambda) for each in pair):
            continue
        other = copy.deepcopy(node)
        other.args[place : place + 2] = reversed(other.args[place : place + 2])
        yield _plain(node, "swapped arguments", other)


def _noted(number: int, node: ast.expr) -> ast.expr:
    return _called("noted", [ast.Constant(number), node])


def _called(name: str, arguments: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.Name(f"_{name}_", ast.Load()), arguments, [])


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )


# ---------------------------------------------------------------- where they are


def _found(tree: ast.Module) -> list[_Candidate]:
    """All candidates in the functions of a module, always in the same order."""
    return [candidate for node in _inside(tree) for candidate in _candidates(node)]


def _inside(node: ast.AST, *, acts: bool = False) -> Iterator[ast.AST]:
    """Nodes that do something, with those inside of them; ``acts``: in a function."""
    if isinstance(node, ast.FunctionDef):
        if node.name not in WORDS:
            for statement in node.body:
                yield from _inside(statement, acts=True)
        return
    if isinstance(node, ast.Call) and _name_of(node.func) in SAID | WORDS:
        return
    if isinstance(node, ast.Assign) and all(_name_of(each) in TEXTS for each in node.targets):
        return
    if isinstance(node, ast.JoinedStr | ast.Assert):
        return
    if acts:
        yield node
    children = [node.value] if isinstance(node, ast.AnnAssign) else ast.iter_child_nodes(node)
    for child in children:
        if child is not None:
            yield from _inside(child, acts=acts)


class _Replace(ast.NodeTransformer):
    """Put others in the place of nodes, from the innermost outwards."""

    def __init__(self, act: Mapping[int, Callable[[], ast.expr]]) -> None:
        self._act = act  # by the identity of the node

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        act = self._act.get(id(node))
        if act is None:
            return node
        if isinstance(node, ast.If | ast.IfExp):
            node.test = ast.copy_location(act(), node.test)
            return node
        return ast.copy_location(act(), node)


# ---------------------------------------------------------------- drawing and changing


def draw(seed: int, count: int) -> list[Mutation]:
    """Return mutations of any modules, each candidate as likely as any other.

    Each has a lot of its own, from its words: a change of one module leaves the others' as it is,
    and so nearly all that is drawn.
    """
    lots: list[tuple[bytes, Mutation]] = []
    again: Counter[str] = Counter()
    for module in MODULES:
        for place, x in enumerate(_found(ast.parse(source_of(module)))):
            one = Mutation(module, place, x.node.lineno, x.kind, x.before, ast.unparse(x.instead))
            again[one.words] += 1
            text = f"mutations {seed}: {one.words} {again[one.words]}"
            lots.append((sha256(text.encode()).digest(), one))
    lots.sort(key=lambda lot: lot[0])
    return [one for _, one in lots[:count]]


def mutated(mutation: Mutation) -> Callable[[str], ast.Module]:
    """Compile the module of a mutation with it."""

    def act(source: str) -> ast.Module:
        tree = ast.parse(source)
        candidate = _found(tree)[mutation.place]
        _Replace({id(candidate.node): lambda: candidate.instead}).visit(tree)
        return ast.fix_missing_locations(tree)

    return act


def marked(numbers: Mapping[int, int]) -> Callable[[str], ast.Module]:
    """Compile a module so that it notes whether mutations of it could have mattered.

    ``numbers``: of these mutations, by their places.
    """

    def act(source: str) -> ast.Module:
        tree = ast.parse(source)
        candidates = _found(tree)
        actions: dict[int, Callable[[], ast.expr]] = {}
        for place, number in numbers.items():
            one, before = candidates[place], actions.get(id(candidates[place].node))
            if before is None:
                actions[id(one.node)] = partial(one.marked, number)
            else:  # two of one node: the second matters whenever the node is reached
                actions[id(one.node)] = lambda n=number, first=before: _noted(n, first())
        _Replace(actions).visit(tree)
        names = ", ".join(f"{name} as _{name}_" for name in ("compared", "decides", "noted"))
        first = next(n for n, node in enumerate(tree.body) if not _comes_first(node))
        tree.body[first:first] = ast.parse(f"from simulation.mutations import {names}").body
        return ast.fix_missing_locations(tree)

    return act


def _comes_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


HITS = bytearray()  # by the number of a mutation: it could have made a difference


# ---------------------------------------------------------------- what a marked module calls

_COMPARE: dict[str, Callable[[object, object], object]] = {
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "In": lambda a, b: a in b,  # type: ignore[operator]
    "NotIn": lambda a, b: a not in b,  # type: ignore[operator]
    "Is": operator.is_,
    "IsNot": operator.is_not,
}


def noted(number: int, value: object) -> object:
    HITS[number] = 1
    return value


def decides(number: int, when: bool, value: object) -> object:
    if bool(value) is when:
        HITS[number] = 1
    return value


def compared(number: int, left: object, right: object, is_now: str, would_be: str) -> object:
    found = _COMPARE[is_now](left, right)
    if found is not _COMPARE[would_be](left, right):
        HITS[number] = 1
    return found
