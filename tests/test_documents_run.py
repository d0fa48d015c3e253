"""Every code block of the pages for users is run, or says why not.

A block is Python, a shell's lines, a transcript (`console`, or no language: lines with a prompt), a
diff, a file, or output. Python runs in a swarm of one worker, with a tiny model and what else a
page takes for granted (``stand_in``). Of shells every `atoll` line goes through the program's own
parser, and what needs no run is run. A comment before a block, which no page shows, says more:

    <!-- not run: why -->      it is read (compiled, parsed), and that is all
    <!-- before: code -->      runs before this block
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import atoll
from atoll.optim import Swarm
from atoll.peer.cli import main

ROOT = Path(__file__).parents[1]
# For those who change atoll; their blocks are the repository's own commands and drawings.
NOT_FOR_USERS = {"internals", "log", "progress", "renames"}
PAGES = [ROOT / "README.md"]
PAGES += sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem not in NOT_FOR_USERS)
FENCE = re.compile(r"((?:^<!-- .*? -->\n)*)^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (not run|before): (.*?) -->", re.DOTALL)
SHELLS, TEXTS = {"sh", "console"}, {"", "text", "toml"}
RUN = {"python", "diff"}
SITE = {"{toctree}", "{eval-rst}", "{atoll-commands}"}  # the site's; `make docs` fails if they do
PROMPT = re.compile(r"^(?:[\w-]+)?\$ ")
# Beside `atoll`: what the shell and its tools are asked for in the pages.
OTHERS = {"pip", "make", "python", "umask", "torchrun", "jq", "ssh", "until", "do", "sleep", "done"}
OTHERS |= {"sudo", "git", "grep", "tail", "export"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str
    before: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    assert text.count("\n```") % 2 == 0, f"{page.name}: a block has no end"
    for found in FENCE.finditer(text):
        said = dict(COMMENT.findall(found[1]))
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(
            page.name, line, found[2], found[3], said.get("not run", ""), said.get("before", "")
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_every_block_is_of_a_kind_that_is_known() -> None:
    known = SHELLS | TEXTS | RUN | SITE
    assert not [named(block) for block in BLOCKS if block.language not in known]
    assert not [named(b) for b in BLOCKS if "<!-- not run: -->" in b.text], "no reason"
    assert len([b for b in BLOCKS if b.language in RUN and not b.not_run]) > 10


# ---------------------------------------------------------------- Python


def source_of(block: Block) -> str:
    """Of a diff what it leads to."""
    if block.language != "diff":
        return block.text
    lines = block.text.splitlines()
    assert all(line[:1] in ("+", "-", " ") for line in lines)
    return "\n".join(line[1:] for line in lines if line[0] != "-")


def stand_in(session: Any) -> dict[str, Any]:
    """Return what pages take for granted: a model, data, a method under way."""
    import torch

    class MyModel(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self(batch).square().mean())

    def train(batch: torch.Tensor) -> None:
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def make_outer(method: str = "DiLoCo", **settings: Any) -> Any:
        return getattr(atoll, method)(model, optimizer, 2, session, **settings)

    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    names = dict(vars())
    return names | {
        "atoll": atoll,
        "torch": torch,
        "np": np,
        "os": os,
        "signal": signal,
        "threading": threading,
        "DiLoCo": atoll.DiLoCo,
        "NoLoCo": atoll.NoLoCo,
        "Replay": atoll.Replay,
        "inner": optimizer,
        "peer": session,
        "batches": [torch.ones(2, 4)] * 5,
        "batches_of_indices": [[0, 1], [2, 3]],
        "dataset": torch.ones(8, 4),
        "loss": lambda model, batch: model.loss(batch),
        "evaluate": lambda model: None,
        "gradient": torch.ones(4),
        "loader": [],
        "path": "model.pt",
        "accelerator": SimpleNamespace(prepare=lambda *given: given),
        "TrainerCallback": object,
        "warm_up": lambda step: 1.0,
        "make_task": lambda: None,
    }


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in RUN], ids=named)
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"{block.before}\n{source_of(block)}"
    compile(source, named(block), "exec")
    if block.not_run:
        return
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(source)

    def work(session: Any) -> None:
        with mock.patch.object(atoll, "connect", return_value=session):
            runpy.run_path(str(script), init_globals=stand_in(session))

    # Workers of a swarm are threads, which take no signals.
    main_thread = mock.patch("threading.main_thread", threading.current_thread)
    with mock.patch("signal.signal"), main_thread:
        Swarm(1).run(work)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=named)
def test_files_of_options_are_taken(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atoll.toml").write_text(block.text)
    assert main.main(["config", "up"]) == 0


# ---------------------------------------------------------------- shells


def lines_of(block: Block) -> list[str]:
    """Return a block's command lines: all of a shell's, and of a transcript those with a prompt."""
    text = block.text.replace("\\\n", " ")
    if block.language == "sh":
        return [line for line in text.splitlines() if line.strip()]
    return [PROMPT.sub("", line) for line in text.splitlines() if PROMPT.match(line)]


def commands_of(line: str) -> Iterator[list[str]]:
    """Split a line where the shell begins another command; what is redirected is left out."""
    words = shlex.shlex(line, posix=True, punctuation_chars="();|&<>")
    words.whitespace_split = True
    command: list[str] = []
    into = False
    for word in words:
        if word in (">", "<", ">>"):
            into = True
        elif into:
            into = False
        elif re.fullmatch(r"[();|&]+", word):
            if command:
                yield command
            command = []
        else:
            command.append(word)
    if command:
        yield command


TRANSCRIPTS = [b for b in BLOCKS if b.language in SHELLS | {""} and lines_of(b)]


@pytest.mark.parametrize("block", TRANSCRIPTS, ids=named)
def test_command_lines_are_ones_that_the_program_takes(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for line in lines_of(block):
        for words in commands_of(line):
            while words and words[0] in ("sudo", "until", "do"):
                words = words[1:]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if not words:
                continue
            if words[0] == "ssh":
                words = words[2:]
            if words == ["atoll", "--version"]:
                continue  # it ends the program
            if words[0] == "atoll":
                main.command_parser().parse_args(words[1:])
            elif words[0] == "make":
                assert words[1] in targets, f"make has no {words[1]}"
            else:
                assert words[0] in OTHERS, words[0]


LOCAL = {"secret", "example", "config", "id", "authority"}


def local_lines(block: Block) -> list[str]:
    """Return the lines of a block that need no daemon and no other machine."""
    return [
        line
        for line in lines_of(block)
        if all(words[0] == "atoll" and words[1] in LOCAL for words in commands_of(line))
    ]


HERE = [block for block in TRANSCRIPTS if not block.not_run and local_lines(block)]


@pytest.mark.parametrize("block", HERE, ids=named)
def test_commands_that_need_no_run_do_what_they_say(block: Block, tmp_path: Path) -> None:
    shell("\n".join(local_lines(block)), tmp_path)


def shell(script: str, folder: Path, wait_s: float = 60) -> str:
    """Run a script with `atoll` and `python` as its own; return what it printed."""
    commands = folder / "bin"
    commands.mkdir()
    for name, start in (("atoll", "-m atoll.peer.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": str(folder),
        "ATOLL_HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quickstart(tmp_path: Path) -> None:
    """Its lines as they stand: a founder, a joiner, two scripts, four rounds, and the end."""
    blocks = [b for b in BLOCKS if b.page == "quickstart.md" and b.language == "sh"]
    script = "\n".join(block.text for block in blocks if not block.not_run)
    try:
        printed = shell(script, tmp_path, wait_s=240)
    finally:
        for home in ("first", "second"):
            if (tmp_path / home).exists():
                main.main(["leave", "--home", str(tmp_path / home)])
    assert "round 4 " in printed
    assert len(re.findall(r"\bheld-out\b", printed)) >= 3
