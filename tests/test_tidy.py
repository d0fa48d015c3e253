"""House rules, checked: who may import what, sizes, exports, documentation that matches the disk."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.collectives.errors import ERRORS_BY_CODE, AtollError

ROOT = Path(__file__).parents[1]
ROOMS = ("collectives", "optim", "peer")
LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def _modules() -> dict[str, Path]:
    found = {"atoll": ROOT / "src" / "atoll" / "__init__.py"}
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            found[f"atoll.{room}.{path.stem}".removesuffix(".__init__")] = path
    return found


MODULES = _modules()
FOLDERS = (*ROOMS, "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES.append(MODULES["atoll"])

# What a room may import beside the standard library and itself.
COLLECTIVES_MAY = {"numpy"}
OPTIM_PURE = {"atoll.optim.manifest", "atoll.optim.outer", "atoll.optim.spec", "atoll.optim.text"}
OPTIM_PURE_MAY = {"numpy", "atoll.collectives.codecs", "atoll.collectives.errors"} | OPTIM_PURE
OPTIM_TORCH_MAY = {"torch", "atoll.optim", "atoll.peer.session"} | OPTIM_PURE_MAY
PEER_MAY = {"cryptography", "msgpack", "numpy", "zmq", "atoll.collectives", "atoll.peer"}
PEER_MAY |= OPTIM_PURE
RICH = {"atoll.peer.demo_view"}  # only the demo may load it, so that commands start fast
ATOLL_MAY = {"atoll.collectives.errors", "atoll.peer.session"}

# Sans-I/O: state machines and pure functions. They import each other and nothing that acts.
DECISIONS = (
    OPTIM_PURE - {"atoll.optim.text"}
    | {
        f"atoll.collectives.{name}"
        for name in ("butterfly", "chunks", "errors", "plan", "schedule")
    }
    | {
        f"atoll.peer.{name}"
        for name in (
            "admission",
            "attempts",
            "beats",
            "coordinator",
            "dataframes",
            "demo_figures",
            "demo_summary",
            "election",
            "events",
            "follower",
            "gate",
            "hello",
            "invite",
            "joining",
            "membership",
            "messages",
            "phases",
            "reports",
            "roster",
            "succession",
            "timing",
            "views",
            "wire",
        )
    }
)
# Codecs are pure functions with scratch for each thread, hence their import of `threading`.
DECISIONS_MAY = DECISIONS | {"atoll.collectives.codecs"}
ACTS = {
    "asyncio",
    "concurrent",
    "ctypes",
    "fcntl",
    "mmap",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "zmq",
}

# What the working tree holds beside what is in the repository.
NOT_OURS = re.compile(r"^(__pycache__|build|dist|\..*|.*\.egg-info)$")


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
    """``module`` is one of ``allowed``, or below one that is not a module of ours."""
    parts = module.split(".")
    above = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return bool(above & allowed)


def allowed_imports(module: str) -> set[str]:
    if module == "atoll":
        return ATOLL_MAY
    if module.startswith("atoll.collectives"):
        return COLLECTIVES_MAY | {"atoll.collectives"}
    if module in OPTIM_PURE:
        return OPTIM_PURE_MAY
    if module.startswith("atoll.optim"):
        return OPTIM_TORCH_MAY
    return PEER_MAY | ({"rich"} if module in RICH else set())


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
    """In a fresh interpreter: everything of peer/, and what `import atoll` gives."""
    names = sorted(name for name in MODULES if name.startswith("atoll.peer"))
    code = (
        f"import sys, atoll, {', '.join(names)}\n"
        "heavy = {'torch', 'atoll.optim.diloco', 'atoll.optim.byte_lm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- sizes and exports


def test_files_and_functions_are_short() -> None:
    wrong = []
    for path in SOURCES:
        lines = len(path.read_text("utf-8").splitlines())
        if lines > LINES_MAX:
            wrong.append(f"{name_of(path)} has {lines} lines, at most {LINES_MAX}")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    wrong.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert not wrong, wrong


def exported(module: str) -> list[str] | None:
    for node in parsed(MODULES[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_say_what_they_export(module: str) -> None:
    names = exported(module)
    if names is None:
        only_a_docstring = len(parsed(MODULES[module]).body) == 1
        assert only_a_docstring, f"{name_of(MODULES[module])} has no __all__"
        return
    loaded = importlib.import_module(module)
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(loaded, name)]


def test_what_is_imported_is_exported() -> None:
    """Of our own modules nobody takes a name that is not in ``__all__``."""
    wrong = []
    for path in (path for path in SOURCES if path in MODULES.values()):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                names = {alias.name for alias in node.names} - set(exported(node.module) or ())
                hidden = {name for name in names if f"{node.module}.{name}" not in MODULES}
                wrong += [f"{name_of(path)}:{node.lineno}: {node.module}.{n}" for n in hidden]
    assert not wrong, wrong


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
    """Functions without a body, outside protocols and abstract methods."""
    for node in ast.walk(parsed(path)):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            protocol = isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).startswith("Protocol") for base in node.bases
            )
            abstract = any("abstract" in ast.unparse(d) for d in child.decorator_list)
            if not protocol and not abstract and all(map(is_empty, child.body)):
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
                if called.split(".")[-1] in UNSAFE_CALLS or called == "torch.load":
                    wrong.append(f"{name_of(path)}:{node.lineno} calls {called}")
    assert not wrong, wrong


# ---------------------------------------------------------------- documentation


def tree_of(document: str) -> dict[str, str]:
    """Path -> remark, of the annotated trees in a document.

    A tree is a fenced block whose first line is a folder; two spaces of indentation are one level.
    """
    found: dict[str, str] = {}
    text = (ROOT / document).read_text("utf-8")
    for block in re.findall(r"^```(?:text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not re.match(r"\S+/(\s|$)", block):
            continue
        above: list[str] = []
        for line in block.splitlines():
            entry = re.fullmatch(r"((?:  )*)(\S+)(?: +(\S.*))?", line)
            if entry is None:
                continue  # the second line of a remark
            depth = len(entry[1]) // 2
            if depth > len(above):
                continue
            above = [*above[:depth], entry[2].rstrip("/")]
            found["/".join(above)] = entry[3] or ""
    return found


def test_the_trees_in_the_documents_match_the_disk() -> None:
    trees = tree_of("README.md") | tree_of("ARCHITECTURE.md")
    assert not [path for path in trees if not (ROOT / path).exists()], "listed, but not there"
    assert not [path for path, remark in trees.items() if not remark], "listed without a remark"
    wanted = {name_of(path) for path in MODULES.values()}
    wanted |= {name_of(path) for path in (ROOT / "examples").glob("*.py")}
    wanted |= {name_of(path) for path in (ROOT / "docs").iterdir()}
    wanted |= {name_of(path) for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    wanted = {path for path in wanted if not any(map(NOT_OURS.match, path.split("/")))}
    assert not sorted(wanted - trees.keys()), "there, but not listed"


def test_the_readme_lists_what_lies_at_the_top() -> None:
    listed = {path.split("/")[0] for path in tree_of("README.md")}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    top = {path.split("/")[0] for path in tracked.stdout.splitlines()}
    assert not sorted(top - listed - {"README.md"}), "tracked, but not in README.md's tree"


def sections(document: str) -> dict[str, str]:
    """Heading -> text below it, for headings of the second level."""
    parts = re.split(r"^## +(.+)$", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip((head.strip() for head in parts[1::2]), parts[2::2], strict=True))


def classes(root: type[AtollError]) -> Iterator[type[AtollError]]:
    yield root
    for child in root.__subclasses__():
        yield from classes(child)


def test_every_error_has_its_own_code_and_paragraph() -> None:
    kinds = [kind for kind in classes(AtollError) if kind.__module__.startswith("atoll.")]
    assert len({kind.code for kind in kinds}) == len(kinds), "two errors share a code"
    assert {kind.code: kind for kind in kinds} == ERRORS_BY_CODE
    documented = {
        head: text for head, text in sections("docs/errors.md").items() if re.match(r"E\d\d ", head)
    }
    assert sorted(documented) == sorted(f"{kind.code} {kind.__name__}" for kind in kinds)
    for head, text in documented.items():
        meaning, _, fix = text.partition("**What to do.**")
        assert len(meaning.split()) >= 10, f"{head}: what does it mean?"
        assert len(fix.split()) >= 5, f"{head}: what is to be done?"


def test_every_exit_code_is_documented() -> None:
    table = sections("docs/errors.md")["Exit codes"]
    listed = {
        int(code): set(re.findall(r"E\d\d", rest))
        for code, rest in re.findall(r"^\| (\d+) \|(.*)$", table, re.MULTILINE)
    }
    used: dict[int, set[str]] = {0: set(), 130: set()}
    for code, kind in ERRORS_BY_CODE.items():
        used.setdefault(kind.exit_code, set()).add(code)
    assert listed == used
