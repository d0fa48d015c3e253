"""The command line: ``atoll up``, ``join``, ``status``, ``checkpoint``, ``demo`` and a few more.

Exit codes: 0 done; 1 the demo's checks failed, or a defect; 2 usage, file or folder; 10 to 16
connection, admission, daemon; 20 to 26 protocol, specification, round, state; 130 second Ctrl+C.
"""

from __future__ import annotations

import os

# Before numpy is loaded. The small matrices of robust rules take it a hundred times as long with
# many threads on a busy machine, and cores are for trainers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.collectives.errors import AtollError, ConfigError
from atoll.peer.cli_admission import hide_invites
from atoll.peer.cli_authority import add_authority_verbs
from atoll.peer.cli_checkpoint import add_checkpoint_verbs
from atoll.peer.cli_daemon import DEFAULT_PORT, INTERRUPTED, add_daemon_verbs
from atoll.peer.cli_lab import add_lab_verb
from atoll.peer.cli_verify import add_verify_verb
from atoll.peer.identity import Home, default_home
from atoll.peer.net.invite import SECRET_BYTES

__all__ = ["DEFAULT_PORT", "main"]

WATCH_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if arguments is None:
        hide_invites()
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and command is _status:  # `atoll status | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        broken = ConfigError(f"{error.strerror or error} ({error.filename or 'no file named'})")
        print(broken, file=sys.stderr)
        return broken.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="atoll", description="Train one PyTorch model on machines joined by the internet."
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    daemons = add_daemon_verbs(verbs)

    status = verbs.add_parser("status", help="show peers, state, round, bytes, last error")
    status.add_argument("--json", action="store_true", help="for scripts")
    status.add_argument("--watch", action="store_true", help="again every second")
    status.set_defaults(command=_status)

    leave = verbs.add_parser("leave", help="leave the run; the others go on")
    leave.set_defaults(command=_leave)

    invite = verbs.add_parser("invite", help="print the join line for another machine")
    invite.set_defaults(command=_invite)

    handover = verbs.add_parser("handover", help="let another member coordinate the run")
    handover.add_argument("peer", nargs="?", default="", metavar="PEER", help="its short id")
    handover.set_defaults(command=_hand_over)

    told = add_authority_verbs(verbs)
    for verb in (*daemons, status, leave, invite, handover, *told):
        verb.add_argument("--home", metavar="DIR", help="identity and sockets of this peer")

    secret = verbs.add_parser("secret", help="make a run secret for `atoll up --secret-file`")
    secret.set_defaults(command=_secret)

    add_checkpoint_verbs(verbs)
    add_verify_verb(verbs)
    add_lab_verb(verbs)

    demo = verbs.add_parser("demo", help="three peers on this machine train, one is killed")
    demo.add_argument("--peers", type=int, default=3, metavar="N", help="at first (default 3)")
    demo.add_argument("--rounds", type=int, default=24, metavar="N", help="default 24")
    demo.add_argument("--data", metavar="DIR", help="folder of UTF-8 text to train on")
    demo.add_argument("--no-chaos", action="store_true", help="kill nobody")
    demo.add_argument("--plain", action="store_true", help="lines instead of the live view")
    demo.set_defaults(command=_demo)
    return parser


# ---------------------------------------------------------------- clients


def _status(parsed: argparse.Namespace) -> int:
    from atoll.peer.session import ask
    from atoll.peer.snapshot import render

    while True:
        status = ask(parsed.home, "status")
        print(json.dumps(status) if parsed.json else render(status), flush=True)
        if not parsed.watch:
            return 0
        time.sleep(WATCH_S)
        print()


def _leave(parsed: argparse.Namespace) -> int:
    from atoll.peer.session import ask

    ask(parsed.home, "leave")
    _wait_until_gone(default_home(parsed.home))
    return 0


def _wait_until_gone(home: Path) -> None:
    """The daemon goes when the others have agreed, after four seconds at the latest."""
    from atoll.collectives.errors import HomeInUseError

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
    from atoll.peer.session import ask

    print(f"atoll join {ask(parsed.home, 'invite')}")
    return 0


def _hand_over(parsed: argparse.Namespace) -> int:
    from atoll.peer.session import ask

    _say(f"handing over to {ask(parsed.home, 'handover', peer=parsed.peer)} at the next boundary")
    return 0


def _secret(parsed: argparse.Namespace) -> int:
    print(secrets.token_bytes(SECRET_BYTES).hex())
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from atoll.peer.demo.demo import DemoOptions, run_demo

    options = DemoOptions(
        peers=parsed.peers,
        rounds=parsed.rounds,
        data=parsed.data,
        chaos=not parsed.no_chaos,
        plain=parsed.plain or not sys.stdout.isatty(),
    )
    return run_demo(options)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
