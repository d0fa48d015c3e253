"""`atoll run` as a peer of a fleet: started, looked at and told to end as a user would."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from harness.processes import DAEMON, Fleet, Peer, Process, until

LEAVING = Path(__file__).with_name("leaving_trainer.py")
SYNC_EVERY, STEP_S = 40, 0.03
_serial = itertools.count()


class Supervised(Peer):
    """Run `atoll run` with its home; ``text`` is what it, its daemon and its script have said."""

    def __init__(
        self, home: Path, options: tuple[str, ...], command: tuple[str, ...], **environment: str
    ) -> None:
        self.home, self.name = home, home.name
        line = ["run", "--home", str(home), "--listen", "127.0.0.1:0", *options, "--", *command]
        log = home.parent / f"{home.name}.run.{next(_serial)}.log"
        Process.__init__(self, [sys.executable, *DAEMON, *line], log, **environment)

    def last(self, key: str) -> Any:
        """Return the newest figure of this name that the script has printed; None before any."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    @property
    def said(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("atoll run: ")]

    def children(self) -> dict[str, int]:
        """Return the process ids of the two, as far as they are there."""
        found = {}
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except FileNotFoundError:
                continue
            found["daemon" if b"atoll.peer.cli" in words else "script"] = int(child)
        return found

    def takes_steps(self, least: int) -> None:
        until(lambda: (self.last("since") or 0) >= least, f"{least} local steps", self)

    def is_at_round(self, number: int) -> None:
        until(lambda: (self.last("round") or 0) >= number, f"round {number}", self)


def supervise(
    run: Fleet, name: str, *options: str, command: tuple[str, ...], **environment: str
) -> Supervised:
    """Start `atoll run` in place of a daemon of the fleet."""
    if name in run.peers:
        run.forget(name)
    peer = Supervised(run.folder / name, options, command, **environment)
    run.peers[name] = peer
    return peer


def joining(run: Fleet) -> tuple[str, str]:
    """Return the options that join the fleet's run."""
    path = run.folder / "invite"
    path.write_text(run.invite)
    return "--invite-file", str(path)


def trains(
    method: str = "diloco", *options: str, rounds: int = 0, step_s: float = STEP_S
) -> tuple[str, ...]:
    """Return the command of a script that trains."""
    figures = (method, str(SYNC_EVERY), str(step_s), str(rounds))
    return (sys.executable, str(LEAVING), *figures, *options)


def round_begins(trainer: Process) -> dict[int, float]:
    """Return where the parameters were when each round began in which this trainer was."""
    first = {line["attached"]: line["at"] for line in trainer.lines if "attached" in line}
    return first | {line["round"]: line["at"] for line in trainer.lines if line.get("since") == 0}
