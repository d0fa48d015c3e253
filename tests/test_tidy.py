"""House rules of the code, checked: who may import what, sizes, names, nothing unsafe."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.house_figures import (
    CALLBACKS_MAX,
    callbacks,
    circles,
    constructors,
    modules_of,
)
from harness.rooms import (
    ACTS,
    ATOLL_MAY,
    COLLECTIVES_MAY,
    COMPRESSORS,
    COMPRESSORS_MAY,
    DATA_MAY,
    DECISIONS,
    DECISIONS_MAY,
    DEMO_TRAINER,
    DEMO_TRAINER_MAY,
    INTEGRATIONS_MAY,
    LIBRARIES,
    MODULES,
    OPTIM_FACE_MAY,
    OPTIM_PURE,
    OPTIM_PURE_MAY,
    OPTIM_TORCH_MAY,
    PEER_MAY,
    PRIVACY,
    RICH,
    ROOT,
    SOURCES,
    UPNP,
)

FUNCTION_LINES_MAX = 70


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions and ``if TYPE_CHECKING``."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else str(node.module)


def is_within(module: str, allowed: set[str]) -> bool:
    """``module`` is one of ``allowed`` or lies below one."""
    parts = module.split(".")
    above = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return bool(above & allowed)


def allowed_imports(module: str) -> set[str]:
    if module == "atoll":
        return ATOLL_MAY
    if module == "atoll.data":
        return DATA_MAY
    if module.startswith("atoll.integrations"):
        return INTEGRATIONS_MAY | (LIBRARIES & {module.rpartition(".")[2]})
    if module.startswith("atoll.collectives"):
        return COLLECTIVES_MAY | {"atoll.collectives"}
    if module in OPTIM_PURE:
        return OPTIM_PURE_MAY
    if module in COMPRESSORS:
        return COMPRESSORS_MAY
    if module == "atoll.optim":
        return OPTIM_FACE_MAY
    if module.startswith("atoll.optim"):
        return OPTIM_TORCH_MAY | ({"opacus"} if module in PRIVACY else set())
    extra = DEMO_TRAINER_MAY if module in DEMO_TRAINER else set()
    drawn = {"rich"} if module in RICH else set()
    asked = {"miniupnpc"} if module in UPNP else set()
    return PEER_MAY | extra | drawn | asked


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize("module", sorted(MODULES))
def test_rooms_import_only_what_they_may(module: str) -> None:
    allowed = allowed_imports(module) | set(sys.stdlib_module_names)
    wrong = [
        f"{name_of(MODULES[module])}:{line} imports {imported}"
        for line, imported in imports(MODULES[module])
        if not is_within(imported, allowed)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("module", sorted(DECISIONS))
def test_decisions_do_not_act(module: str) -> None:
    wrong = [
        f"{name_of(MODULES[module])}:{line} imports {imported}"
        for line, imported in imports(MODULES[module])
        if is_within(imported, ACTS)
        or (imported.startswith("atoll") and imported not in DECISIONS_MAY)
    ]
    assert not wrong, wrong


def test_the_daemon_runs_without_torch() -> None:
    """In a fresh interpreter: everything of peer/ but the demo's trainer, and what `import atoll`
    gives."""
    peer = {name for name in MODULES if name.startswith("atoll.peer")}
    names = sorted(peer - DEMO_TRAINER)
    code = (
        f"import sys, atoll, {', '.join(names)}\n"
        "heavy = {'torch', 'atoll.optim.methods.diloco', 'atoll.peer.demo.byte_lm'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_integration_is_imported_by_the_rest() -> None:
    """Nor are the libraries that they are for."""
    wrong = [
        f"{name_of(path)}:{line} imports {imported}"
        for module, path in MODULES.items()
        if not module.startswith("atoll.integrations")
        for line, imported in imports(path)
        if is_within(imported, LIBRARIES | {"atoll.integrations"})
    ]
    assert not wrong, wrong


def test_nothing_else_imports_what_is_experimental() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {imported}"
        for module, path in MODULES.items()
        if not module.startswith("atoll.optim.experimental")
        for line, imported in imports(path)
        if is_within(imported, {"atoll.optim.experimental"})
    ]
    assert not wrong, wrong


def test_imports_make_no_circle() -> None:
    """Neither while running nor for type checkers."""
    assert not circles(modules_of(ROOT))


# ---------------------------------------------------------------- sizes and faces


def test_functions_are_short() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    wrong.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert not wrong, wrong


def test_no_constructor_takes_many_callbacks() -> None:
    """More than two are a Protocol, which is given whole."""
    wrong = [
        f"{module}.{name}"
        for module, tree in modules_of(ROOT).items()
        for name, arguments in constructors(tree)
        if callbacks(arguments) > CALLBACKS_MAX
    ]
    assert not wrong, wrong


# Modules that re-export what others define, for those who read a protocol from one place.
FACES = {"atoll.data", "atoll.peer.membership.events", "atoll.peer.membership.messages"}


def test_only_faces_say_what_they_export() -> None:
    """Elsewhere a name that does not begin with an underscore may be imported."""
    for module, path in MODULES.items():
        names = {
            ast.unparse(node.targets[0])
            for node in parsed(path).body
            if isinstance(node, ast.Assign)
        }
        face = path.name == "__init__.py" or module in FACES
        assert face or "__all__" not in names, f"{name_of(path)} is no face of its package"


# ---------------------------------------------------------------- names and docstrings

NOUNS = re.compile(r"^(Of|Who|Whom|Whose|Whether|What|Which|How|When|Where|Why)\b|^[^A-Z]")


def test_docstrings_begin_with_a_sentence() -> None:
    """That it begins with a verb in the imperative is ruff's D401."""
    wrong = []
    for path in SOURCES:
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(parsed(path)):
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text is not None and NOUNS.match(text):
                wrong.append(f"{name_of(path)}: {text.partition(chr(10))[0]}")
    assert not wrong, wrong


def test_no_two_classes_share_a_name() -> None:
    """But for those of integrations, of which a script has one: each has its callback."""
    seen: dict[str, str] = {}
    for module, path in MODULES.items():
        if module.startswith("atoll.integrations."):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                assert node.name not in seen, f"{node.name}: {name_of(path)}, {seen[node.name]}"
                seen[node.name] = name_of(path)


# ---------------------------------------------------------------- nothing unfinished or unsafe

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|pragma: no cover|type: ignore(?!\[)")
UNSAFE_MODULES = {"dill", "cloudpickle", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "load_module", "recv_pyobj", "send_pyobj", "recv_object_list"}


def test_nothing_is_left_unfinished() -> None:
    wrong = []
    for path in SOURCES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
                wrong.append(f"{name_of(path)}:{token.start[0]}: {token.string}")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                wrong.append(f"{name_of(path)}:{node.lineno}: NotImplementedError")
        wrong += [f"{name_of(path)}: {stub} is a stub" for stub in stubs(path)]
    assert not wrong, wrong


def stubs(path: Path) -> Iterator[str]:
    """Functions without a body, outside protocols and abstract methods.

    One that has nothing to do, and says so in a docstring, is no stub.
    """
    for node in ast.walk(parsed(path)):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            protocol = isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).startswith("Protocol") for base in node.bases
            )
            abstract = any("abstract" in ast.unparse(d) for d in child.decorator_list)
            explained = ast.get_docstring(child) and ast.unparse(child.returns or child) == "None"
            if not (protocol or abstract or explained) and all(map(is_empty, child.body)):
                yield child.name


def is_empty(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Pass)


def test_errors_are_not_swallowed() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kind = ast.unparse(node.type) if node.type else "nothing named"
            broad = node.type is None or re.search(r"\b(Base)?Exception\b", kind)
            silent = all(is_empty(s) or isinstance(s, ast.Continue) for s in node.body)
            if node.type is None or (broad and silent):
                wrong.append(f"{name_of(path)}:{node.lineno}: except {kind}")
    assert not wrong, wrong


def test_nothing_from_outside_is_unpickled_or_run() -> None:
    wrong = []
    for path in SOURCES:
        wrong += [
            f"{name_of(path)}:{line} imports {imported}"
            for line, imported in imports(path)
            if is_within(imported, UNSAFE_MODULES)
        ]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                unsafe_load = called == "torch.load" and "weights_only=True" not in ast.unparse(
                    node
                )
                if called.split(".")[-1] in UNSAFE_CALLS or unsafe_load:
                    wrong.append(f"{name_of(path)}:{node.lineno} calls {called}")
    assert not wrong, wrong


def test_no_test_is_named_by_a_set() -> None:
    """The order in which a set is printed is not the same in every process: xdist's workers would
    collect tests of different names, and run none."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for call in ast.walk(parsed(path)):
            if isinstance(call, ast.Call) and "ids=str" in map(ast.unparse, call.keywords):
                sets = [node for node in ast.walk(call) if isinstance(node, ast.Set | ast.SetComp)]
                assert not sets, f"{name_of(path)}:{call.lineno}: a set among the parameters"
