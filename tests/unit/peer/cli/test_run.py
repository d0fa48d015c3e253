"""Test `atoll run` before it starts anything; tests/processes/test_run.py runs what it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.peer.cli import main
from atoll.peer.supervisor.processes import ProcessPair


@pytest.mark.parametrize("url", ["http://[::1", "http://x:y", "ftp://x"])
def test_an_address_of_notices_is_looked_at_before_anything_is_started(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run(pair: ProcessPair) -> int:
        raise AssertionError("it is started")

    monkeypatch.setattr(ProcessPair, "run", run)
    own = ["--run", "demo", "--home", str(tmp_path / "home")]
    line = ["run", *own, "--on-notice", "aws", "--notice-url", url, "--", "sleep", "60"]
    assert main.main(line) == 2
    assert f"{url!r} is no address of a metadata service" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
