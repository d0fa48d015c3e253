"""The commands that start a daemon: ``atoll up``, ``join`` and ``follow``."""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.collectives.errors import AdmissionError, CheckpointError, ConfigError, ConnectError
from atoll.peer.cli_checkpoint import add_checkpoint_options
from atoll.peer.identity import Home, RunRecord, default_home
from atoll.peer.invite import (
    SECRET_BYTES,
    Invite,
    check_run_name,
    format_address,
    parse_address,
)
from atoll.peer.views import ARCHIVE, ON_FORK, ON_LOST, POLICIES, REPLICA, WITNESS, Rules, short

if TYPE_CHECKING:
    from atoll.peer.checkpoint import Loaded
    from atoll.peer.options import DaemonOptions

__all__ = ["DEFAULT_PORT", "INTERRUPTED", "add_daemon_verbs"]

DEFAULT_PORT = 29600
INTERRUPTED = 130


def add_daemon_verbs(verbs: Any) -> tuple[argparse.ArgumentParser, ...]:
    up = verbs.add_parser("up", help="start this machine's peer; the first one founds the run")
    up.add_argument("--run", required=True, metavar="NAME", help="name of the run")
    up.add_argument("--policy", choices=POLICIES, default="auto", help="who may go on (auto)")
    up.add_argument("--on-lost", choices=ON_LOST, default="halt", help="nobody has the last round")
    up.add_argument("--on-fork", choices=ON_FORK, default="auto", help="two lineages meet")
    up.add_argument("--expect", type=int, default=0, metavar="N", help="found it with N peers ...")
    up.add_argument("--peers", default="", metavar="A,B,...", help="... at these addresses ...")
    up.add_argument("--secret-file", metavar="FILE", help="... that share this secret")
    up.add_argument("--resume", metavar="PATH", help="go on from a checkpoint, or a folder's last")
    up.add_argument(
        "--force-new-lineage",
        action="store_true",
        help="found the run anew although nobody of it answers: its state is lost",
    )
    up.set_defaults(command=_up)

    join = verbs.add_parser("join", help="start this machine's peer and join a run by address")
    join.set_defaults(command=_join)
    follow = verbs.add_parser("follow", help="follow a run as an archive: the state, and no vote")
    follow.set_defaults(command=_join, witness=False, role=ARCHIVE)

    for verb in (join, follow):
        verb.add_argument("address", metavar="ADDRESS", help="the invite that `atoll up` printed")
    for verb in (up, join):
        verb.add_argument("--witness", action="store_true", help="vote only: hold no state")
    for verb in (up, join, follow):
        verb.add_argument("--listen", metavar="HOST:PORT", help=f"default 0.0.0.0:{DEFAULT_PORT}")
        verb.add_argument("--advertise", metavar="HOST[:PORT]", help="how others reach this peer")
        add_checkpoint_options(verb)
    return up, join, follow


# ---------------------------------------------------------------- up


def _up(parsed: argparse.Namespace) -> int:
    run = check_run_name(parsed.run)
    with Home.open(default_home(parsed.home)) as home:
        record = home.load_run()
        if record is not None and record.run != run:
            raise ConfigError(
                f"this home belongs to run {record.run}, not {run}",
                fix=f"use `atoll up --run {record.run}`, or another --home",
            )
        secret = _secret(parsed.secret_file, record)
        listed = tuple(address for address in parsed.peers.split(",") if address)
        if parsed.expect and not listed:
            raise ConfigError("--expect needs the founders' addresses", fix="add --peers A,B,...")
        known = record.known if record is not None else ()
        fresh = parsed.force_new_lineage or not known
        if parsed.resume:
            loaded = _load(parsed.resume, run, secret if record or parsed.secret_file else None)
            home.save_run(RunRecord(run, secret, ()))
            return _start(home, parsed, run, secret, known[:-1], resume=loaded, found=True)
        if fresh:
            home.save_run(RunRecord(run, secret, ()))
            return _start(home, parsed, run, secret, listed, found=not parsed.expect)
        last = _last_checkpoint(parsed.checkpoint, run, secret)
        if last is not None:
            # Whoever lives will ask us in; if nobody does, a majority of the last view goes on.
            return _start(home, parsed, run, secret, known[:-1], resume=last, regenesis=True)
        # The last known address is our own former one, by which a record says "this run exists".
        return _start(home, parsed, run, secret, known[:-1], rejoins=True)


def _secret(path: str | None, record: RunRecord | None) -> bytes:
    if path is None:
        return record.secret if record is not None else secrets.token_bytes(SECRET_BYTES)
    try:
        secret = bytes.fromhex(Path(path).read_text("ascii").strip())
    except ValueError as error:
        raise ConfigError(f"{path} does not hold a secret", fix="make one: atoll secret") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes, not {SECRET_BYTES}")
    if record is not None and record.secret != secret:
        raise ConfigError(f"{path} is not the secret that this home has for its run")
    return secret


def _load(path: str, run: str, secret: bytes | None) -> Loaded:
    from atoll.peer.checkpoint import load_checkpoint

    loaded = load_checkpoint(path, run=run, secret=secret)
    for passed_over in loaded.passed_over:
        _say(f"passed over: {passed_over}")
    return loaded


def _last_checkpoint(folder: str | None, run: str, secret: bytes) -> Loaded | None:
    """Of this run, if this home keeps any."""
    if folder is None or not Path(folder).is_dir():
        return None
    try:
        return _load(folder, run, secret)
    except CheckpointError as error:
        _say(f"no checkpoint to go on from: {error.what}")
        return None


# ---------------------------------------------------------------- join, follow


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
        return _start(
            home, parsed, invite.run, invite.secret, contacts, fingerprint=invite.fingerprint
        )


# ---------------------------------------------------------------- the daemon


def _start(
    home: Home,
    parsed: argparse.Namespace,
    run: str,
    secret: bytes,
    contacts: tuple[str, ...],
    *,
    found: bool = False,
    fingerprint: bytes | None = None,
    resume: Loaded | None = None,
    regenesis: bool = False,
    rejoins: bool = False,
) -> int:
    from atoll.peer.options import DaemonOptions  # here, so that `atoll status` starts fast

    listen_host, listen_port = _listen_address(parsed.listen)
    role = getattr(parsed, "role", WITNESS if parsed.witness else REPLICA)
    rules = Rules()
    if hasattr(parsed, "policy"):
        rules = Rules(parsed.policy, parsed.on_lost, parsed.on_fork)
    options = DaemonOptions(
        run=run,
        secret=secret,
        listen_host=listen_host,
        listen_port=listen_port,
        advertise=parsed.advertise or _advertised_host(listen_host, contacts),
        found=found,
        contacts=contacts,
        fingerprint=fingerprint,
        role=role,
        rules=rules,
        expect=getattr(parsed, "expect", 0) if not resume and not rejoins else 0,
        resume=resume,
        regenesis=regenesis,
        checkpoint=Path(parsed.checkpoint) if parsed.checkpoint else None,
        every=parsed.every,
    )
    if rejoins and not options.contacts:
        raise _lost_run(run)
    return asyncio.run(_serve(home, options, parsed.home, rejoins))


async def _serve(
    home: Home, options: DaemonOptions, home_argument: str | None, rejoins: bool
) -> int:
    from atoll.peer.daemon import Daemon

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
        f"atoll up --run {run} --force-new-lineage (with it: --resume CHECKPOINT)",
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


def _say(line: str) -> None:
    print(line, flush=True)


def _log(line: str) -> None:
    """A daemon's line. Whoever read the log is gone, or its disk is full: training goes on, and
    `atoll status` still has the last events."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
