"""A home, a small run and a folder for its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.checkpoints import SMALL
from harness.tinyrun import TinyRun

from atoll.peer.net.identity import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.open(tmp_path / "home") as home:
        yield home


@pytest.fixture(params=["float32", "dynamic8"])
def run(request: pytest.FixtureRequest, home: Home) -> Iterator[TinyRun]:
    run = TinyRun(home.peer_id, parameters=SMALL, momentum_codec=request.param)
    yield run
    run.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir(mode=0o700)
    return tmp_path / "checkpoints"
