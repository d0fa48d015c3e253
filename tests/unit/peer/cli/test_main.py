"""`atoll --version` and `atoll example`, as a user calls them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from harness.rooms import ROOT

import atoll
from atoll.peer.cli import main
from atoll.peer.net.hello import PROTOCOL_MAX

NAMES = "by_hand fsdp2 grpo lightning lm lora sft torchtitan"
EXAMPLES = {name.replace("_", "-"): f"train_{name}.py" for name in NAMES.split()}
NO_TORCH = (
    "import sys; sys.modules['torch'] = None\n"  # to import it is an error
    "from atoll.peer.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def call(*arguments: str) -> bytes:
    return subprocess.check_output([sys.executable, "-c", NO_TORCH, *arguments])


def test_the_version_is_said_in_one_line_without_torch() -> None:
    assert call("--version").decode() == f"atoll {atoll.__version__}, protocol {PROTOCOL_MAX}\n"


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "atoll.collectives.version.VERSION"
    }
    assert metadata.version("atoll") == atoll.__version__


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_file_byte_for_byte(name: str) -> None:
    assert call("example", name) == (ROOT / "examples" / EXAMPLES[name]).read_bytes()


def test_examples_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["example"]) == 0
    *rows, todo = capsys.readouterr().out.splitlines()
    found = {row.split()[0]: row.partition(" ")[2].strip() for row in rows}
    assert found.keys() == EXAMPLES.keys()
    assert found["lm"] == (
        "Train a small byte-level language model together with the other peers of a run."
    )
    assert all(purpose.endswith(".") for purpose in found.values())
    assert "atoll example lm > train.py" in todo


def test_an_unknown_example_is_an_error_that_names_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["example", "none"]) == 2
    said = capsys.readouterr().err
    assert "ATOLL-E10 there is no example none" in said
    assert all(name in said for name in EXAMPLES)
