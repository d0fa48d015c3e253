"""How a daemon comes into a run, from what it is started with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.checkpoints import RUN, SECRET, SMALL, write, writer_for
from harness.tinyrun import TinyRun

from atoll.collectives.errors import ConfigError
from atoll.peer.checkpoint.reader import LoadedCheckpoint, load_checkpoint
from atoll.peer.daemon.options import DaemonOptions, first_event
from atoll.peer.membership.events import Found
from atoll.peer.membership.messages import BootstrapConfig
from atoll.peer.membership.view import ANCESTORS_MAX, Rules
from atoll.peer.net.identity import Home

HERE = "10.0.0.1:29600"


def first(**options: Any) -> Found | BootstrapConfig | None:
    listen = {"listen_host": "0.0.0.0", "listen_port": 29600, "advertise": "10.0.0.1"}
    return first_event(DaemonOptions(run=RUN, secret=SECRET, **listen, **options), HERE)


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[LoadedCheckpoint]:
    with Home.open(tmp_path / "home") as home:
        run = TinyRun(home.peer_id, parameters=SMALL)
        found = load_checkpoint(write(writer_for(tmp_path, home), run), run=RUN, secret=SECRET)
        yield found
        found.state.close()
        run.close()


def test_a_run_that_is_founded_twice_has_two_lineages() -> None:
    rules = Rules("any", "rollback", "halt")
    one, other = first(found=True, rules=rules), first(found=True)
    assert isinstance(one, Found)
    assert isinstance(other, Found)
    assert one.lineage != other.lineage
    assert (one.rules, one.ancestors) == (rules, ())
    assert first() is None  # it joins


def test_a_resumed_run_is_a_new_lineage_that_names_the_old_one(loaded: LoadedCheckpoint) -> None:
    one, other = first(found=True, resume=loaded), first(found=True, resume=loaded)
    assert isinstance(one, Found)
    assert isinstance(other, Found)
    assert len({one.lineage, other.lineage, loaded.lineage}) == 3
    assert one.ancestors == (*loaded.ancestors, loaded.lineage)
    assert len(one.ancestors) <= ANCESTORS_MAX


def test_founders_wait_for_all_that_are_named() -> None:
    named = (HERE, "10.0.0.2:29600")
    bootstrap_view = first(founders=named)
    assert isinstance(bootstrap_view, BootstrapConfig)
    assert (bootstrap_view.founders, bootstrap_view.voters) == (named, ())
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:29600, and --peers has"):
        first(founders=named[1:])
