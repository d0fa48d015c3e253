"""The processes of `atoll demo` are the demo's alone, whatever the user has set for other runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.peer.cli.main import main
from atoll.peer.cli.settings import FILE
from atoll.peer.demo import demo
from atoll.peer.demo.demo import DemoOptions
from atoll.peer.demo.peers import Child

PRINT_KERNELS = "import os; print(os.environ['ATOLL_KERNELS'])"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the user works."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_the_file_and_the_variables_of_the_user_are_not_for_the_demo(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / FILE).write_text('checkpoint = "kept"\n')
    monkeypatch.setenv("ATOLL_CONGESTION", "reno")
    line = ["config", "--json", "up", "--home", str(tmp_path / "1")]
    child = Child("config", "atoll.peer.cli", line, tmp_path / "log")
    child.reap()
    options = json.loads("\n".join(child.tail(1000)))["options"]
    found = {name for name, option in options.items() if option["origin"] != "default"}
    assert found == {"home"}


def test_the_variable_that_chooses_the_kernels_reaches_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_KERNELS", "numpy")
    (tmp_path / "told.py").write_text(PRINT_KERNELS)
    child = Child("told", "told", [], tmp_path / "log")
    child.reap()
    assert child.tail(1) == ["numpy"]


def test_the_text_is_named_from_where_the_user_works(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers that read it work in another folder."""
    asked: list[DemoOptions] = []
    monkeypatch.setattr(demo, "run_demo", lambda options: asked.append(options) or 0)
    assert main(["demo", "--data", "text"]) == main(["demo"]) == 0
    assert [options.data for options in asked] == [str(here / "text"), None]
