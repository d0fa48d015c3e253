"""Carry out ``atoll run``: a daemon and a training script as one."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Collection, Sequence
from typing import Any

from atoll.collectives.errors import ConfigError, HomeInUseError
from atoll.collectives.units import listed
from atoll.peer.cli.admission import add_admission_options, read_invite
from atoll.peer.cli.daemon import (
    KEEP,
    add_durable_option,
    add_founding_options,
    add_peer_options,
)
from atoll.peer.cli.settings import FLAG, Parser, SecretAction, settable
from atoll.peer.durable import OFF
from atoll.peer.net.identity import default_home, socket_path
from atoll.peer.net.invite import check_run_name
from atoll.peer.supervisor.machine import GRACE_S, RESTARTS_MAX
from atoll.peer.supervisor.notices import CLOUDS

GRACE_MAX_S = 3600.0  # a script that takes longer to end has been forgotten
# Options of `atoll run` itself; all others are the daemon's.
OWN = {"help", "home", "join", "invite_file", "run", "grace_s", "restarts", "on_notice"}
OWN |= {"notice_url", "line", "given_invite"}
# For the first start of a run: given again, they would begin it anew, or from an older state.
ONCE = {"resume", "force_new_lineage"}


def add_run_verb(verbs: Any, up: Parser, join: Parser) -> Parser:
    """Add ``run`` to the sub-commands; its options for the daemon are those of ``up``, ``join``."""
    run: Parser = verbs.add_parser(
        "run",
        help="daemon and training script as one: starts both, restarts them, ends them in order",
        usage="atoll run (--run NAME | --join INVITE | --invite-file FILE) [options] -- COMMAND",
        epilog="The command is a training script, such as `python train.py` or `torchrun ...`, and"
        " finds the daemon by ATOLL_HOME. SIGTERM or Ctrl+C: the script submits the local steps"
        " that it has, the daemon leaves after that round; a second one kills both.",
    )
    run.add_argument("--run", metavar="NAME", help="start or found this run, as `atoll up` does")
    run.add_argument(
        "--join", metavar="INVITE", help="join a run, as `atoll join` does; - reads it"
    )
    run.add_argument("--invite-file", metavar="FILE", help="a file that holds the invite")
    run.add_argument(
        "--invite",
        dest="given_invite",
        action=SecretAction,
        in_file="invite-file",
        metavar="INVITE",
        help="that itself, and not here: in ATOLL_INVITE or in atoll.toml",
    )
    run.add_argument(
        "--grace-s",
        type=grace,
        default=GRACE_S,
        metavar="S",
        help=f"from SIGTERM until everything has ended, or is killed (default {GRACE_S:.0f})",
    )
    run.add_argument(
        "--restarts",
        type=restart_count,
        default=RESTARTS_MAX,
        metavar="N",
        help="how often within an hour the script is started again when it has died, and so the"
        f" daemon (default {RESTARTS_MAX}, 0: never)",
    )
    run.add_argument(
        "--on-notice",
        choices=sorted(CLOUDS),
        metavar="CLOUD",
        help="ask this cloud whether it takes the machine back (aws, gcp, azure), and end in order"
        " within the time that its notice gives",
    )
    run.add_argument(
        "--notice-url", metavar="URL", help="where that is asked, if it is not the cloud's address"
    )
    add_peer_options(run)
    add_durable_option(run)
    add_founding_options(run)
    add_admission_options(run)
    run.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    of_join = {action.dest for action in join._actions}
    run.set_defaults(command=lambda parsed: _run(parsed, run, of_join))
    return run


def grace(text: str) -> float:
    """Parse seconds, up to an hour. Raises ValueError, of which argparse makes a usage error."""
    seconds = float(text)
    if not 0 < seconds <= GRACE_MAX_S:
        raise ValueError(text)
    return seconds


def restart_count(text: str) -> int:
    """Parse a number of restarts, as ``grace`` does."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _run(parsed: argparse.Namespace, parser: Parser, of_join: Collection[str]) -> int:
    from atoll.peer.client.ipc_client import answers
    from atoll.peer.daemon.ipc_server import LIFELINE
    from atoll.peer.supervisor.machine import Supervisor
    from atoll.peer.supervisor.metadata import MetadataService
    from atoll.peer.supervisor.processes import ProcessPair, RunPlan

    command = _command(parsed.line)
    home = default_home(parsed.home)
    if answers(socket_path(home, LIFELINE)):
        raise HomeInUseError(
            f"a daemon runs at {home} already, and `atoll run` brings its own",
            fix="end that one (atoll leave), or start the script beside it, or give another --home",
        )
    if parsed.notice_url and not parsed.on_notice:
        raise ConfigError(
            "--notice-url without --on-notice", fix="say which cloud: --on-notice aws"
        )
    cloud = parsed.on_notice or ""
    service = MetadataService(parsed.notice_url or CLOUDS[cloud].url) if cloud else None
    _refuse_once(parsed, parser)
    entry, stdin = _entry(parsed, parser, of_join)
    first = _words(parsed, parser, OWN)
    later = _words(parsed, parser, OWN | ONCE if parsed.durable != OFF else OWN)
    plan = RunPlan(
        home=home,
        command=command,
        first=[*entry, *first, "--home", str(home)],
        later=[*entry, *later, "--home", str(home)],
        stdin=stdin,
        keeps=parsed.durable != OFF,
        on_term_keeps=parsed.on_term == KEEP,
        grace_s=parsed.grace_s,
        cloud=cloud,
        notices_from=service,
    )
    machine = Supervisor(parsed.grace_s, parsed.restarts)

    async def run() -> int:
        return await ProcessPair(plan, machine, _say).run()

    return asyncio.run(run())


def _command(line: Sequence[str]) -> Sequence[str]:
    """Return the command of the script, what stands after ``--``. ConfigError if it is none."""
    words = line[1:] if line[:1] == ["--"] else line
    if not words:
        fix = "put it after --: atoll run --run demo -- python train.py"
        raise ConfigError("no training script is given", fix=fix)
    if words[0].startswith("-"):
        raise ConfigError(f"{words[0]} is no option of `atoll run`", fix="see atoll run --help")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"there is no command {words[0]!r} here", fix="look at PATH, or its name")
    return words


def _entry(
    parsed: argparse.Namespace, parser: Parser, of_join: Collection[str]
) -> tuple[list[str], bytes]:
    """Return the first words of the daemon's command line, and what it is to read.

    An invite goes to its standard input, in each of its lives: anybody can see a command line.
    Of a flag and what the environment or a file says the flag counts.
    """
    ways = {
        name: parsed.settings.options[name] for name in ("run", "join", "invite-file", "invite")
    }
    given = {name: way for name, way in ways.items() if way.value is not None}
    flags = {name: way for name, way in given.items() if way.origin == FLAG}
    chosen = flags or given
    if len(chosen) != 1:
        what = (
            f"{listed([f'--{name}' for name in chosen])} are given" if chosen else "no run is named"
        )
        fix = "give one: --run NAME to start or found it, --join INVITE or --invite-file FILE"
        raise ConfigError(what, fix=fix)
    ((name, way),) = chosen.items()
    if name != "run":
        _refuse_founding(parsed, parser, of_join)
        return ["join", "-"], str(read_invite(way.value)).encode()
    entry = ["up", f"--run={check_run_name(way.value)}"]
    if parsed.settings.options["pass"].origin != FLAG:
        return entry, b""
    invite, parsed.invite = str(read_invite(parsed.invite)), "-"
    return entry, invite.encode()


def _words(parsed: argparse.Namespace, parser: Parser, without: Collection[str]) -> list[str]:
    """Return the options of the daemon that were given as flags: it looks for others by itself."""
    words = []
    for name, action in settable(parser).items():
        if action.dest not in without and parsed.settings.options[name].origin == FLAG:
            value = getattr(parsed, action.dest)
            words.append(f"--{name}" if action.nargs == 0 else f"--{name}={value}")
    return words


def _refuse_founding(parsed: argparse.Namespace, parser: Parser, of_join: Collection[str]) -> None:
    """Raise ConfigError for options of a run that is founded, where one is joined."""
    if founding := _words(parsed, parser, OWN | set(of_join)):
        name = founding[0].partition("=")[0]
        raise ConfigError(
            f"{name} is for --run NAME: whoever joins takes the run as it is", fix="leave it out"
        )


def _refuse_once(parsed: argparse.Namespace, parser: Parser) -> None:
    """Raise ConfigError where each start of the daemon would begin the run anew."""
    for name, action in settable(parser).items():
        setting = parsed.settings.options[name]
        if action.dest in ONCE and setting.value and setting.origin != FLAG:
            raise ConfigError(
                f"{name} stands in {setting.where}, where every restart of the daemon reads it",
                fix=f"give --{name} as a flag: then it is for the first start alone",
            )


def _say(line: str) -> None:
    """Print a line, if there is anybody to read it."""
    try:
        print(f"atoll run: {line}", flush=True)
    except OSError:
        sys.stdout = sys.stderr  # for the rest of the process; training goes on
