"""`atoll top` while it is shown: a daemon that cannot be asked is said, and asked again."""

from __future__ import annotations

from typing import Any

import pytest
from harness.telemetry_samples import rows, status
from rich.console import Console

from atoll.collectives.errors import AtollError, LocalProtocolError, NoDaemonError
from atoll.peer.cli import top
from atoll.peer.telemetry.overview import RunGoal


@pytest.mark.parametrize(
    "error", [NoDaemonError("no daemon runs"), LocalProtocolError("local message of 2 bytes")]
)
def test_what_goes_wrong_while_it_is_shown_is_said(
    error: AtollError, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [error, status(), rows()]

    def ask(home: str | None, command: str, **arguments: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, AtollError):
            raise answer
        return answer

    def shown() -> str:
        console = Console(width=80)
        with console.capture() as text:
            console.print(top._drawn(None, RunGoal()))
        return text.get()

    monkeypatch.setattr(top, "ask", ask)
    assert str(error) in shown()
    assert "run demo, round 41" in shown()
