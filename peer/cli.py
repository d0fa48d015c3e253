"""The command line: ``atoll up``, ``join``, ``status``, ``leave``, ``invite`` and ``demo``.

Exit codes: 0 done; 1 the demo's checks failed, or a defect; 2 usage, file or folder; 10 to 16
connection, admission, daemon; 20 to 26 protocol, specification, round, state; 130 second Ctrl+C.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.collectives.errors import AtollError, ConfigError
from atoll.peer.identity import Home, RunRecord, default_home
from atoll.peer.invite import Invite, check_run_name, format_address, parse_address
from atoll.peer.views import short

__all__ = ["DEFAULT_PORT", "main"]

DEFAULT_PORT = 29600
INTERRUPTED = 130
WATCH_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
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

    up = verbs.add_parser("up", help="start this machine's peer; the first one founds the run")
    up.add_argument("--run", required=True, metavar="NAME", help="name of the run")
    up.add_argument(
        "--force-new-lineage",
        action="store_true",
        help="found the run anew although nobody of it answers: its state is lost",
    )
    up.set_defaults(command=_up)

    join = verbs.add_parser("join", help="start this machine's peer and join a run by address")
    join.add_argument("address", metavar="ADDRESS", help="the invite that `atoll up` printed")
    join.set_defaults(command=_join)

    for verb in (up, join):
        verb.add_argument("--listen", metavar="HOST:PORT", help=f"default 0.0.0.0:{DEFAULT_PORT}")
        verb.add_argument("--advertise", metavar="HOST[:PORT]", help="how others reach this peer")

    status = verbs.add_parser("status", help="show peers, state, round, bytes, last error")
    status.add_argument("--json", action="store_true", help="for scripts")
    status.add_argument("--watch", action="store_true", help="again every second")
    status.set_defaults(command=_status)

    leave = verbs.add_parser("leave", help="leave the run; the others go on")
    leave.set_defaults(command=_leave)

    invite = verbs.add_parser("invite", help="print the join line for another machine")
    invite.set_defaults(command=_invite)

    for verb in (up, join, status, leave, invite):
        verb.add_argument("--home", metavar="DIR", help="identity and sockets of this peer")

    demo = verbs.add_parser("demo", help="three peers on this machine train, one is killed")
    demo.add_argument("--peers", type=int, default=3, metavar="N", help="at first (default 3)")
    demo.add_argument("--rounds", type=int, default=24, metavar="N", help="default 24")
    demo.add_argument("--data", metavar="DIR", help="folder of UTF-8 text to train on")
    demo.add_argument("--no-chaos", action="store_true", help="kill nobody")
    demo.add_argument("--plain", action="store_true", help="lines instead of the live view")
    demo.set_defaults(command=_demo)
    return parser


# ---------------------------------------------------------------- daemons


def _up(parsed: argparse.Namespace) -> int:
    run = check_run_name(parsed.run)
    with Home.open(default_home(parsed.home)) as home:
        record = home.load_run()
        if record is not None and record.run != run:
            raise ConfigError(
                f"this home belongs to run {record.run}, not {run}",
                fix=f"use `atoll up --run {record.run}`, or another --home",
            )
        secret = record.secret if record else secrets.token_bytes(32)
        contacts = record.known if record and not parsed.force_new_lineage else ()
        if contacts:
            return _run_daemon(home, parsed, run, secret, contacts, None, rejoins=True)
        home.save_run(RunRecord(run, secret, ()))
        return _run_daemon(home, parsed, run, secret, (), None)


def _join(parsed: argparse.Namespace) -> int:
    invite = Invite.parse(parsed.address)
    with Home.open(default_home(parsed.home)) as home:
        record = home.load_run()
        if record is not None and (record.run, record.secret) != (invite.run, invite.secret):
            what = "another run" if record.run != invite.run else "an older run of the same name"
            raise ConfigError(
                f"this home belongs to {what}: {record.run}",
                fix="use another --home, or remove this one's run.json to move it to the new run",
            )
        contacts = (invite.address, *(record.known if record else ()))
        return _run_daemon(home, parsed, invite.run, invite.secret, contacts, invite.fingerprint)


def _run_daemon(
    home: Home,
    parsed: argparse.Namespace,
    run: str,
    secret: bytes,
    contacts: tuple[str, ...],
    fingerprint: bytes | None,
    *,
    rejoins: bool = False,
) -> int:
    from atoll.peer.daemon import DaemonOptions  # here, so that `atoll status` starts fast

    listen_host, listen_port = _listen_address(parsed.listen)
    advertise = parsed.advertise or _advertised_host(listen_host, contacts)
    options = DaemonOptions(
        run=run,
        secret=secret,
        listen_host=listen_host,
        listen_port=listen_port,
        advertise=advertise,
        found=not contacts,
        # The last known address is our own former one, by which a record says "this run exists".
        contacts=contacts[:-1] if rejoins else contacts,
        fingerprint=fingerprint,
    )
    if rejoins and not options.contacts:
        raise _lost_run(run)
    return asyncio.run(_serve(home, options, parsed.home, rejoins))


async def _serve(home: Home, options: object, home_argument: str | None, rejoins: bool) -> int:
    from atoll.collectives.errors import AdmissionError, ConnectError
    from atoll.peer.daemon import Daemon, DaemonOptions

    assert isinstance(options, DaemonOptions)
    daemon = Daemon(home, options, _log)
    interrupts = 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            os._exit(INTERRUPTED)  # asked twice: at once
        daemon.leave()

    faulthandler.register(signal.SIGUSR1)  # where do its threads stand? `kill -USR1 PID` shows it
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)

    def ready() -> None:
        where = f" --home {home_argument}" if home_argument else ""
        _log(f"peer {short(home.peer_id)} of run {options.run} at {daemon.address}")
        _log(f"  home {home.path}")
        _log("  on other machines:")
        _log(f"    atoll join {daemon.invite}")
        _log(f"  here: atoll status{where}   atoll leave{where}   or Ctrl+C to leave")

    try:
        await daemon.run(ready)
    except ConnectError as error:
        if rejoins and not isinstance(error, AdmissionError):
            raise _lost_run(options.run, error.what) from error
        raise
    _log("left the run")
    return 0


def _lost_run(run: str, why: str = "it had no other member") -> ConfigError:
    return ConfigError(
        f"this home was in run {run} and nobody of it answers: {why}",
        fix="start a member first; or found the run anew, without its state: "
        f"atoll up --run {run} --force-new-lineage",
    )


def _listen_address(text: str | None) -> tuple[str, int]:
    if text is not None:
        return parse_address(text, port_min=0)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", DEFAULT_PORT))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on port {DEFAULT_PORT}: {error}") from error
            _say(f"port {DEFAULT_PORT} is in use: a free port is taken (--listen chooses one)")
            return "0.0.0.0", 0
    return "0.0.0.0", DEFAULT_PORT


def _advertised_host(listen_host: str, contacts: tuple[str, ...]) -> str:
    """The host part of our address: where we listen, or the interface that leads to the run."""
    if listen_host not in ("0.0.0.0", "::", ""):
        return format_address(listen_host, 0).removesuffix(":0")
    target = parse_address(contacts[0])[0] if contacts else "192.0.2.1"  # RFC 5737: nowhere
    try:
        family = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
            probe.connect(family[4])  # a datagram socket only looks up the route
            host = str(probe.getsockname()[0])
    except OSError:
        host = "127.0.0.1"
        _say("no route to other machines was found: advertising 127.0.0.1 (--advertise sets it)")
    return f"[{host}]" if ":" in host else host


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
    raise ConfigError(f"the daemon at {home} was told to leave and still runs after 10 s")


def _invite(parsed: argparse.Namespace) -> int:
    from atoll.peer.session import ask

    print(f"atoll join {ask(parsed.home, 'invite')}")
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from atoll.peer.demo import DemoOptions, run_demo

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


def _log(line: str) -> None:
    """A daemon's line. Whoever read the log is gone, or its disk is full: training goes on, and
    `atoll status` still has the last events."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process


if __name__ == "__main__":
    sys.exit(main())
