"""House rules of the documents, checked: trees that match the disk, a paragraph for each error."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from atoll.collectives.errors import ERRORS_BY_CODE, AtollError
from atoll.peer.client.session import Session
from atoll.peer.daemon.reachability import REACH_TRANSITIONS, ReachState, ReachTrigger
from atoll.peer.membership.phase import TRANSITIONS, Phase, Trigger
from atoll.peer.membership.timing import Timing

ROOT = Path(__file__).parents[1]
ROOMS = ("collectives", "optim", "peer")
# What the working tree holds beside what is in the repository.
NOT_OURS = re.compile(r"^(__pycache__|build|dist|\..*|.*\.egg-info|.*\.(so|pyd))$")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(document: str) -> dict[str, str]:
    """Path -> remark, of the annotated trees in a document.

    A tree is a fenced block whose first line is a folder; two spaces of indentation are one level.
    """
    found: dict[str, str] = {}
    text = (ROOT / document).read_text("utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language or not re.match(r"\S+/(\s|$)", block):
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
            assert "/".join(above) not in found, f"{document} lists {entry[2]} twice"
            found["/".join(above)] = entry[3] or ""
    return found


def test_the_trees_in_the_documents_match_the_disk() -> None:
    trees = tree_of("README.md")
    assert not [path for path in trees if not (ROOT / path).exists()], "listed, but not there"
    assert not [path for path, remark in trees.items() if not remark], "listed without a remark"


def test_the_architecture_lists_every_package() -> None:
    listed = set(
        re.findall(r"^\| `([\w/]+)` \|", sections("ARCHITECTURE.md")["The map"], re.MULTILINE)
    )
    listed = {
        name for name in listed if name.startswith("peer/") or name in ("collectives", "optim")
    }
    packages = {
        name_of(path.parent) for room in ROOMS for path in (ROOT / room).glob("*/__init__.py")
    }
    assert listed == {p for p in packages if p.startswith("peer/")} | {"collectives", "optim"}


def test_the_readme_lists_what_lies_at_the_top() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():  # an unpacked archive
        command = ["ls"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {path.split("/")[0] for path in listing.splitlines()}
    listed = {"README.md"} | {path.split("/")[0] for path in tree_of("README.md")}
    unlisted = {path for path in top - listed if not NOT_OURS.match(path)}
    assert not sorted(unlisted), "there, but not in README.md's tree"


def test_every_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py")}
    names = ["examples", "integrations", *(name_of(folder).replace("/", ".") for folder in folders)]
    packages = {"atoll", *(f"atoll.{name}" for name in names)}
    assert set(settings["tool"]["setuptools"]["packages"]) == packages


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


# ---------------------------------------------------------------- ARCHITECTURE.md


def definitions(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """Every class, function and constant, with what it defines in turn; "" has those of files."""
    found: dict[str, set[str]] = {"": set()}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        found[""] |= names_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names_in(node))
    return found


def names_in(body: ast.Module | ast.ClassDef) -> set[str]:
    names = {node.name for node in body.body if hasattr(node, "name")}
    for node in body.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            names.add(ast.unparse(target))
    return names


def test_names_in_the_architecture_are_in_the_code() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("ARCHITECTURE.md", "docs/internals.md")]
    quoted = re.findall(r"`([^`\n]+)`", "\n".join(texts))
    known = definitions((*ROOMS, "tests"))
    methods = [name.split(".") for name in quoted if re.fullmatch(r"[A-Z]\w+\.\w+", name)]
    assert len(methods) > 50
    assert not [f"{kind}.{name}" for kind, name in methods if name not in known.get(kind, ())]
    plain = {n for n in quoted if re.fullmatch(r"[A-Z]\w+|test_\w+|[a-z]+_[a-z_]+", n)}
    everything = set().union(*known.values(), {"call_soon_threadsafe"})  # asyncio's
    assert not sorted(plain - everything - {path.stem for path in (ROOT / "peer").rglob("*.py")})


def test_each_promise_names_a_test_that_is_there() -> None:
    tests = definitions(("tests",))[""]
    table = sections("docs/guarantees.md")["Promises"]
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\| .*\|$", table, re.MULTILINE)][1:]
    assert len(rows) > 10
    for promise, _, held_by in rows:
        named = set(re.findall(r"`(test_\w+)`", held_by))
        assert named, f"nothing holds: {promise}"
        assert not sorted(named - tests), promise


def test_timers_of_the_guarantees() -> None:
    """Every duration of the protocol has its row; constants are where the row says they are."""
    table = sections("docs/guarantees.md")["Timers"]
    named = set(re.findall(r"`([a-z_]+_s)`", table)) - {"round_deadline_s"}  # the run's
    assert named == {field.name for field in fields(Timing)}
    folder = ""
    for name, where in re.findall(r"`([A-Z_]+_S)`, ([\w/.]+)", table):
        folder = folder if where == "there" else where
        assert name in names_in(ast.parse((ROOT / folder).read_text("utf-8"))), (name, where)


def test_a_session_has_what_the_guide_says() -> None:
    guide = (ROOT / "docs/guide.md").read_text("utf-8")
    (names,) = re.findall(r"A session's ((?:`\w+\(\)`[, and]*)+)", guide)
    assert len(found := re.findall(r"`(\w+)\(\)`", names)) == 4
    assert not [name for name in found if not callable(getattr(Session, name, None))]


def test_the_table_of_phases() -> None:
    text = sections("ARCHITECTURE.md")
    triggers = [trigger.name for trigger in Trigger]
    table = ["| | " + " | ".join(triggers) + " |", "|---" * (len(triggers) + 1) + "|"]
    for phase in Phase:
        cells = [TRANSITIONS.get((phase, trigger)) for trigger in Trigger]
        table.append(f"| {phase.name} |" + "".join(f" {c.name} |" if c else " |" for c in cells))
    assert "\n".join(table) in text["The phase table"], "copy this:\n" + "\n".join(table)


def test_the_table_of_reachability_in_the_document_is_that_of_the_code() -> None:
    table = ["| | " + " | ".join(state.value for state in ReachState) + " |"]
    table.append("|---" * (len(ReachState) + 1) + "|")
    for trigger in ReachTrigger:
        cells = [REACH_TRANSITIONS.get((state, trigger)) for state in ReachState]
        row = "".join(f" {cell.value} |" if cell else " |" for cell in cells)
        table.append(f"| {trigger.value} |{row}")
    text = sections("docs/internals.md")["How a peer learns whether it can be dialled"]
    assert "\n".join(table) in text, "copy this:\n" + "\n".join(table)
