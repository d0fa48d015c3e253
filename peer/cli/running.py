"""Carry out the commands that ask a running daemon: ``atoll status``, ``leave`` and others."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from atoll.collectives.errors import ConfigError, HomeInUseError, NoQuorumError
from atoll.peer.cli.daemon import trainer_count
from atoll.peer.net.identity import Home, default_home

WATCH_S = 1.0
AGREED_S = 30.0  # as long as the daemon asks for a change of the rules (Timing.ask_s)
CLEAR = "\x1b[H\x1b[2J"  # a terminal's page, for what is shown again every second


def add_running_verbs(verbs: Any) -> tuple[argparse.ArgumentParser, ...]:
    """Add these commands to the sub-commands of ``atoll``, and return their parsers."""
    status = verbs.add_parser("status", help="show peers, state, round, bytes, last error")
    status.add_argument("--json", action="store_true", help="for scripts")
    status.add_argument("--watch", action="store_true", help="again every second")
    status.set_defaults(command=show_status)

    leave = verbs.add_parser("leave", help="leave the run; the others go on")
    leave.set_defaults(command=_leave)

    invite = verbs.add_parser("invite", help="print the join line for another machine")
    invite.set_defaults(command=_invite)

    handover = verbs.add_parser("handover", help="let another member coordinate the run")
    handover.add_argument("peer", nargs="?", default="", metavar="PEER", help="its short id")
    handover.set_defaults(command=_hand_over)

    trainers = verbs.add_parser("min-trainers", help="let rounds need so many trainers from now on")
    trainers.add_argument("count", type=trainer_count, metavar="N", help="1 or more")
    trainers.set_defaults(command=_min_trainers)

    return status, leave, invite, handover, trainers


def show_status(parsed: argparse.Namespace) -> int:
    from atoll.peer.client.ipc_client import ask
    from atoll.peer.daemon.status import render

    while True:
        status = ask(parsed.home, "status")
        text = json.dumps(status) if parsed.json else render(status)
        clear = CLEAR if parsed.watch and not parsed.json and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not parsed.watch:
            return 0
        time.sleep(WATCH_S)
        if not clear:
            print()


def _leave(parsed: argparse.Namespace) -> int:
    from atoll.peer.client.ipc_client import ask

    ask(parsed.home, "leave")
    _wait_until_gone(default_home(parsed.home))
    return 0


def _wait_until_gone(home: Path) -> None:
    """Wait until the daemon of ``home`` has ended. Raise ConfigError if it has not after 10 s.

    It goes when the others have agreed, after four seconds at the latest.
    """
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            Home.open(home).close()
        except HomeInUseError:
            time.sleep(0.05)
        else:
            _say("left the run")
            return
    what = f"the daemon at {home} was told to leave and still runs after 10 s"
    raise ConfigError(what, fix="look at its terminal; a second Ctrl+C there ends it at once")


def _invite(parsed: argparse.Namespace) -> int:
    from atoll.peer.client.ipc_client import ask

    print(f"atoll join {ask(parsed.home, 'invite')}")
    return 0


def _hand_over(parsed: argparse.Namespace) -> int:
    from atoll.peer.client.ipc_client import ask

    _say(f"handing over to {ask(parsed.home, 'handover', peer=parsed.peer)} at the next boundary")
    return 0


def _min_trainers(parsed: argparse.Namespace) -> int:
    """Ask for a new ``min_trainers``, and wait until a view of the run has it.

    Raises NoQuorumError if the members have not agreed within AGREED_S.
    """
    from atoll.peer.client.ipc_client import ask

    ask(parsed.home, "min_trainers", count=parsed.count)
    deadline_s = time.monotonic() + AGREED_S
    while time.monotonic() < deadline_s:
        status = ask(parsed.home, "status")
        if status["rules"].get("min_trainers") == parsed.count:
            trainers = "1 trainer" if parsed.count == 1 else f"{parsed.count} trainers"
            _say(
                f"min_trainers is {parsed.count} from view {status['view']} on: a round needs"
                f" {trainers}"
            )
            return 0
        time.sleep(0.05)
    raise NoQuorumError(
        f"the members have not agreed on min_trainers {parsed.count} in {AGREED_S:.0f} s:"
        f" {status['waiting']}",
        fix="ask again when `atoll status` shows a coordinator and a majority of the members",
    )


def _say(line: str) -> None:
    print(line, flush=True)
