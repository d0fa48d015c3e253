"""Carry out the commands that start a daemon: ``atoll up``, ``join`` and ``follow``."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count
from atoll.peer.cli.admission import (
    Entry,
    add_address_option,
    add_admission_options,
    entry_of_join,
    entry_of_up,
    given_invite,
    read_invite,
)
from atoll.peer.cli.caps import add_cap_options, cap_options, relay_mbit
from atoll.peer.cli.checkpoint import EVERY_DEFAULT, add_checkpoint_options
from atoll.peer.cli.launchers import LAUNCHERS
from atoll.peer.cli.log_file import LOG_BYTES_MAX, LOG_FILES, LogFile
from atoll.peer.cli.page import add_page_option, page_option
from atoll.peer.cli.proxy import add_proxy_option, add_upnp_option, given_proxy, wants_upnp
from atoll.peer.cli.service_manager import ServiceManager
from atoll.peer.cli.settings import Parser, SecretAction
from atoll.peer.client.supervised import (
    SUPERVISOR_VARIABLE,
    is_kept_by_parent,
    is_orphaned,
    signal_when_parent_ends,
)
from atoll.peer.durable import DURABLE, LEDGER, OFF, ROUNDS
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import (
    ARCHIVE,
    DEFAULT_RULES,
    MEMBERS_MAX,
    ON_FORK,
    ON_LOST,
    POLICIES,
    REPLICA,
    WITNESS,
    Rules,
    View,
    short,
)
from atoll.peer.net.identity import Home, default_home
from atoll.peer.net.invite import (
    DEFAULT_PORT,
    Invite,
    check_run_name,
    format_address,
    parse_address,
    parse_listen,
)
from atoll.peer.net.own_address import NOWHERE, own_address
from atoll.peer.streams.congestion import AUTO, BBR, CUBIC, check

if TYPE_CHECKING:
    from atoll.peer.checkpoint.reader import LoadedCheckpoint
    from atoll.peer.daemon.daemon import Daemon
    from atoll.peer.daemon.options import DaemonOptions
    from atoll.peer.net.proxy import Proxy
    from atoll.peer.telemetry.page.server import PageServer


INTERRUPTED = 130
EVERY_ADDRESS = ("0.0.0.0", "::", "")
# What SIGTERM means: the run goes on without this peer, and ends with the last one; or this peer
# keeps its place in it.
LEAVE, KEEP = "leave", "keep"


def trainer_count(text: str) -> int:
    """Parse a number of trainers, from 1 to as many as a run can have.

    Raises ValueError, of which argparse makes a usage error, for anything else.
    """
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:8]) <= MEMBERS_MAX:
        raise ValueError(text)
    return int(text)


def add_daemon_verbs(verbs: Any) -> tuple[Parser, ...]:
    up = verbs.add_parser(
        "up",
        help="start this machine's peer; the first one founds the run",
        epilog="The same line starts the peer again later: it finds its way back into the run.",
    )
    up.add_argument("--run", required=True, metavar="NAME", help="name of the run")
    up.set_defaults(command=_up)
    join = verbs.add_parser("join", help="start this machine's peer and join a run by address")
    join.set_defaults(command=_join)
    follow = verbs.add_parser("follow", help="follow a run as an archive: the state, and no vote")
    follow.set_defaults(command=_join, witness=False, role=ARCHIVE)

    for verb in (join, follow):
        verb.add_argument(
            "address",
            action=SecretAction,
            in_file="invite-file",
            nargs="?",
            metavar="INVITE",
            help="what `atoll invite` prints on a member; - reads it from standard input",
        )
        verb.add_argument("--invite-file", metavar="FILE", help="a file that holds the invite")
    for verb in (up, join, follow):
        add_peer_options(verb)
    for verb in (up, join):
        verb.add_argument("--witness", action="store_true", help="vote only: hold no state")
        add_durable_option(verb)
    add_founding_options(up)
    add_admission_options(up)
    return up, join, follow


def add_peer_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that every daemon has."""
    verb.add_argument("--verbose", action="store_true", help="print limits of the process too")
    verb.add_argument(
        "--on-term",
        choices=(LEAVE, KEEP),
        default=LEAVE,
        help="what SIGTERM means: leave the run (the default), or keep the place in it for a"
        " restart, as one that was killed does; when all have left, the run is over",
    )
    verb.add_argument(
        "--log",
        metavar="FILE",
        help=f"write the lines to this file too; {LOG_FILES} files of {LOG_BYTES_MAX >> 20} MiB"
        " at most: FILE, FILE.1, ...",
    )
    verb.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"default :{DEFAULT_PORT}, which is every address of this machine, IPv4 and IPv6;"
        " port 0 takes any that is free",
    )
    verb.add_argument("--advertise", metavar="HOST[:PORT]", help="how others reach this peer")
    add_proxy_option(verb)
    add_upnp_option(verb)
    _add_stream_options(verb)
    add_address_option(verb)
    add_checkpoint_options(verb)
    add_page_option(verb)


def add_durable_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--durable",
        choices=DURABLE,
        default=ROUNDS,
        help="what this peer still knows when it is started again: its votes and the rounds"
        " (the default), its votes alone, or nothing",
    )


def add_founding_options(up: argparse.ArgumentParser) -> None:
    rules = up.add_argument_group("rules of the run, chosen when it is founded")
    rules.add_argument(
        "--policy",
        choices=POLICIES,
        help="who goes on when others are silent: a majority, any who are left, or (auto, the"
        " default) any of two and a majority of more",
    )
    rules.add_argument(
        "--on-lost",
        choices=ON_LOST,
        help="if nobody alive has the last round: halt (default), or roll back to the one before",
    )
    rules.add_argument(
        "--on-fork",
        choices=ON_FORK,
        help="if two histories meet: the longer one wins (auto, the default), or both halt",
    )
    rules.add_argument(
        "--min-trainers",
        type=trainer_count,
        metavar="N",
        help="no round begins with fewer trainers; default: what the training script says, else 1",
    )
    through = up.add_argument_group("a founder that cannot be dialled")
    through.add_argument(
        "--via",
        metavar="FILE",
        help="a file with the line of a relay, a peer that can be dialled and was started with"
        " `atoll up --run NAME --witness --relay MBIT`, or - for standard input: for a founder that"
        " cannot be dialled itself. The relay holds the rules of the run",
    )
    together = up.add_argument_group("founding together, in any order")
    together.add_argument("--expect", type=int, metavar="N", help="founders, this one included")
    together.add_argument("--peers", metavar="A,B,...", help="their addresses, HOST:PORT each")
    together.add_argument("--secret-file", metavar="FILE", help="what `atoll secret` has printed")
    together.add_argument(
        "--secret",
        action=SecretAction,
        in_file="secret-file",
        metavar="HEX",
        help="that itself, and not here, where all users see it: in ATOLL_SECRET or in atoll.toml",
    )
    together.add_argument(
        "--from",
        dest="launcher",
        choices=LAUNCHERS,
        help="take the run's name, --expect, --peers and --advertise from the environment of a job:"
        " of Slurm, of a StatefulSet of Kubernetes, or of SkyPilot",
    )
    loss = up.add_argument_group("when nobody of the run is left")
    loss.add_argument("--resume", metavar="PATH", help="go on from this checkpoint or folder")
    loss.add_argument("--force-new-lineage", action="store_true", help="begin anew, without state")


# ---------------------------------------------------------------- up


def _add_stream_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--plain-streams",
        action="store_true",
        help="bulk data neither secret nor protected from changes, with peers that say so too"
        " and in private networks only: for networks that are trusted, and for benchmarks",
    )
    verb.add_argument(
        "--congestion",
        default=AUTO,
        metavar="NAME",
        help=f"the kernel's congestion control for what this peer sends; {AUTO}, the default, is"
        f" {BBR} over a network, if the kernel has it, {CUBIC} within this machine and wherever"
        " a plan keeps a stream to its pace and nothing is lost",
    )
    add_cap_options(verb)
    verb.add_argument(
        "--relay",
        metavar="MBIT",
        type=relay_mbit,
        default=0.0,
        help="carry data between peers of the run that cannot dial each other, so much in Mbit/s;"
        " their control links are carried always. It sees sizes and times, and nothing else",
    )
    verb.add_argument(
        "--probes",
        choices=("on", "off"),
        default="on",
        help="off: send no probes to measure links to other machines, and take none; rounds measure"
        " them then. On, the default, costs at most the bytes of one round in an hour",
    )


def _stream_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of DaemonOptions that these options set.

    Raises ConfigError for a congestion control that a socket may not have.
    """
    return {
        "plain_streams": parsed.plain_streams,
        "congestion": check(parsed.congestion),
        "probes": parsed.probes == "on",
        "relay_mbit": parsed.relay,
        "caps": cap_options(parsed),
    }


def _end_with_parent() -> None:
    """Let this process end with the `atoll run` that has started it. Raises ConfigError if it has.

    Killed by force, that cannot end its daemon, and the next one would find the home in use. The
    first thing of all: the kernel tells nothing of a parent that was gone before it was asked.
    """
    if is_kept_by_parent():
        signal_when_parent_ends(signal.SIGTERM)
    if is_orphaned():
        raise ConfigError(
            "`atoll run` is gone, and so this daemon does not start",
            fix=f"start `atoll run` again, or unset {SUPERVISOR_VARIABLE} to start it by itself",
        )


def _up(parsed: argparse.Namespace) -> int:
    _end_with_parent()
    run, log = check_run_name(parsed.run), _Log(parsed.log)
    if parsed.via:
        return _up_via(parsed, run, log)
    listed = _founders(parsed)
    with Home.open(default_home(parsed.home)) as home:
        record = home.load_run()
        if record is not None and record.run != run:
            raise ConfigError(
                f"this home belongs to run {record.run}, not {run}",
                fix=f"use `atoll up --run {record.run}`, or another --home",
            )
        entry = entry_of_up(parsed, run, home, record)
        # The last known address is our own former one, by which a record says "this run exists".
        known = record.known if record is not None else ()
        others = known[:-1]
        if parsed.resume:
            given = record or parsed.secret_file or parsed.secret or parsed.invite
            loaded = _load(parsed.resume, run, entry.secret if given else None, log)
            return _start(home, parsed, run, entry, others, log, resume=loaded, found=True)
        if parsed.force_new_lineage or not known:
            _refuse_to_overlook(parsed, run)
            if parsed.launcher and listed and parsed.advertise not in listed:
                return _start(home, parsed, run, entry, listed, log)  # the job has grown
            how: dict[str, Any] = {"found": not listed, "founders": listed}
            return _start(home, parsed, run, entry, listed, log, **how)
        # Where the founders are now, which may be elsewhere than they were.
        own = (*known[-1:], parsed.advertise)
        now = (address for address in listed if address not in own)
        contacts = tuple(dict.fromkeys((*others, *now)))
        return _start(home, parsed, run, entry, contacts, log, returns=True)


# What whoever founds a run decides, or brings: with --via that is the relay.
_OF_FOUNDERS = (
    *("policy", "on_lost", "on_fork", "min_trainers", "expect", "peers", "secret_file", "secret"),
    *("launcher", "resume", "force_new_lineage", "authority", "invite"),
)


def _up_via(parsed: argparse.Namespace, run: str, log: _Log) -> int:
    """Come into a run that a relay holds for this peer, which cannot be dialled.

    Raises ConfigError where the relay's run is another, or for what the relay has to be told.
    """
    given = [name for name in _OF_FOUNDERS if getattr(parsed, name)]
    if given:
        option = given[0].replace("_", "-").replace("launcher", "from").replace("invite", "pass")
        fix = f"give --{option} to `atoll up` on the relay, or leave it out"
        raise ConfigError(
            f"--{option} is for whoever founds the run, with --via the relay", fix=fix
        )
    invite = read_invite(parsed.via)
    if invite.run != run:
        fix = f"`atoll up --run {run} --witness --relay MBIT` on the relay prints the right line"
        raise ConfigError(f"that relay holds run {invite.run}, not {run}", fix=fix)
    return _enter(parsed, invite, log)


def _founders(parsed: argparse.Namespace) -> tuple[str, ...]:
    """Return the addresses of all founders, or none where nobody founds together.

    Raises ConfigError for options that contradict each other.
    """
    if parsed.resume and (parsed.expect is not None or parsed.peers):
        fix = "resume on one machine, and let the others `atoll join` it"
        raise ConfigError("--resume goes on from a checkpoint, --expect begins anew", fix=fix)
    if parsed.resume and parsed.force_new_lineage:
        fix = "give --resume alone"
        raise ConfigError("--force-new-lineage begins without state, --resume with it", fix=fix)
    if parsed.resume and parsed.witness:
        raise ConfigError("a witness holds no state to go on from", fix="leave --witness out")
    if (parsed.expect is None) != (not parsed.peers):
        fix = "say how many and where: --expect 3 --peers A:29600,B:29600,C:29600"
        raise ConfigError("--expect and --peers need each other", fix=fix)
    if parsed.expect is None:
        return ()
    listed = tuple(dict.fromkeys(filter(None, parsed.peers.split(","))))
    for address in listed:
        parse_address(address)
    if parsed.expect != len(listed):  # or not all would be of one mind about who they are
        fix = "name all founders, this one too; others join later"
        raise ConfigError(f"--expect {parsed.expect}, but --peers has {len(listed)}", fix=fix)
    if parsed.expect < 2:
        raise ConfigError("founding together takes two", fix="leave --expect and --peers out")
    if not (parsed.secret_file or parsed.secret or parsed.invite):
        fix = (
            "make one with `(umask 077; atoll secret > FILE)`, let all have it, and give"
            " --secret-file FILE, or set ATOLL_SECRET"
        )
        raise ConfigError("the founders need one secret in common", fix=fix)
    return listed


def _refuse_to_overlook(parsed: argparse.Namespace, run: str) -> None:
    """Raise ConfigError where a run would begin anew of which there are checkpoints.

    That is hardly ever meant; ``--force-new-lineage`` says that it is.
    """
    from atoll.peer.checkpoint.reader import candidates

    folder = parsed.checkpoint
    if parsed.force_new_lineage or folder is None or not Path(folder).is_dir():
        return
    found = candidates(Path(folder), run)
    if found:
        raise ConfigError(
            f"run {run} would begin anew, but {folder} has checkpoints of it: {found[0].name}",
            fix=f"go on from there: --resume {folder}; or begin anew: --force-new-lineage",
        )


def _load(path: str, run: str, secret: bytes | None, log: _Log) -> LoadedCheckpoint:
    from atoll.peer.checkpoint.reader import load_checkpoint

    loaded = load_checkpoint(path, run=run, secret=secret)
    for passed_over in loaded.passed_over:
        log.say(f"passed over: {passed_over}")
    return loaded


# ---------------------------------------------------------------- join, follow


def _join(parsed: argparse.Namespace) -> int:
    _end_with_parent()
    return _enter(parsed, given_invite(parsed), _Log(parsed.log))


def _enter(parsed: argparse.Namespace, invite: Invite, log: _Log) -> int:
    """Run the daemon of a peer that an invite leads into its run."""
    with Home.open(default_home(parsed.home)) as home:
        record = home.load_run()
        entry = entry_of_join(invite, home, record)
        contacts = (invite.address, *(record.known if record else ()))
        pinned = invite.fingerprint or None
        how: dict[str, Any] = {"fingerprint": pinned, "returns": record is not None}
        return _start(home, parsed, invite.run, entry, contacts, log, **how)


# ---------------------------------------------------------------- the daemon


def _start(
    home: Home,
    parsed: argparse.Namespace,
    run: str,
    entry: Entry,
    contacts: tuple[str, ...],
    log: _Log,
    **how: Any,
) -> int:
    """Run a daemon until it has left, and return the exit code.

    ``how``: the fields of DaemonOptions that say how it comes into the run. The home remembers the
    run as soon as there is a view of it, and nothing of a start that failed before. Raises
    ConfigError for options that contradict each other.
    """
    from atoll.peer.daemon.options import DaemonOptions  # here, so that `atoll status` starts fast

    if how.get("returns") and not contacts and not (home.path / LEDGER).exists():
        raise _lost_run(run)
    role = getattr(parsed, "role", WITNESS if parsed.witness else REPLICA)
    if parsed.checkpoint is None and parsed.every is not None:
        raise ConfigError("--every without --checkpoint", fix="add --checkpoint DIR")
    if parsed.checkpoint is not None and role == WITNESS:
        raise ConfigError(
            "a witness holds no state, so it writes no checkpoints",
            fix="leave --checkpoint out here, and give it to the others",
        )
    listen_host, listen_port = parse_listen(parsed.listen)
    if parsed.advertise:
        _check_advertised(parsed.advertise)  # a wrong one is said before anything has begun
    proxy = given_proxy(parsed)
    options = DaemonOptions(
        run=run,
        **entry._asdict(),
        listen_host=listen_host,
        listen_port=listen_port,
        advertise=parsed.advertise or _advertised_host(listen_host, contacts, proxy, log),
        advertises=parsed.advertise is not None,
        proxy=proxy,
        upnp=wants_upnp(parsed),
        contacts=contacts,
        role=role,
        rules=_rules(parsed, how.get("resume")),
        durable=getattr(parsed, "durable", OFF),
        checkpoint=Path(parsed.checkpoint) if parsed.checkpoint else None,
        every=parsed.every or EVERY_DEFAULT,
        per_address=parsed.per_address,
        keeps_place=parsed.on_term == KEEP,
        secret_given=_gives_secret(parsed),
        verbose=parsed.verbose,
        page=page_option(parsed.page),
        **_stream_options(parsed),
        **how,
    )
    try:
        with asyncio.Runner() as runner:
            runner.get_loop()  # may fail for want of descriptors: then nothing is to be awaited
            return runner.run(_serve(home, options, parsed.home, log))
    finally:
        log.begin()


def _gives_secret(parsed: argparse.Namespace) -> bool:
    """Return whether the user has given the run's secret, and so all who are to have it."""
    return any(getattr(parsed, name, None) is not None for name in ("secret", "secret_file"))


def _rules(parsed: argparse.Namespace, resume: LoadedCheckpoint | None) -> Rules:
    """Return the run's rules: what is asked for, else the resumed run's or the default."""
    rules = resume.rules if resume is not None else DEFAULT_RULES
    names = ("policy", "on_lost", "on_fork", "min_trainers")
    asked = {name: getattr(parsed, name, None) for name in names}
    return replace(rules, **{name: value for name, value in asked.items() if value is not None})


FIRST_LINE_S = 2.0  # to find out how this peer comes into its run; then it says what it tries
PRIVATE_UMASK = 0o077  # everything that a daemon makes is for its user alone
END_TIMEOUT_S = 30.0  # from the daemon's end to that of its process, whatever its threads do


def _listen_for_page(home: Home, options: DaemonOptions) -> PageServer | None:
    if options.page is None:
        return None
    from atoll.peer.telemetry.page.history import History
    from atoll.peer.telemetry.page.server import PageServer

    return PageServer(*options.page, History(home.path), home.path)


def _show(page: PageServer, daemon: Daemon, log: _Log) -> None:
    """Answer whoever looks at the status page, from now on; say where it is."""
    from atoll.peer.daemon.status import snapshot
    from atoll.peer.telemetry.page.server import asked_in_loop

    parts, loop = daemon.parts, asyncio.get_running_loop()
    rows = asked_in_loop(loop, lambda: parts.rows.table.told(1))
    page.start(asked_in_loop(loop, lambda: snapshot(parts)), rows)
    log.say(_where_page_is(page, parts.options.advertise, with_token=log.is_for_a_terminal))


def _where_page_is(page: PageServer, advertise: str, *, with_token: bool) -> str:
    """Return the line that says where a page is.

    The token is for a terminal: not for the log of events, which the page itself shows, nor for the
    log of a service, which others may read.
    """
    has_port = ":" in advertise.rpartition("]")[2]  # that of the daemon
    where = page.url(advertise.rpartition(":")[0] if has_port else advertise, with_token=with_token)
    hidden = f" (its token is in {page.token_path})" if page.token and not with_token else ""
    return f"  page: {where}{hidden}"


async def _serve(home: Home, options: DaemonOptions, home_argument: str | None, log: _Log) -> int:
    from atoll.peer.daemon.daemon import Daemon
    from atoll.peer.daemon.memory import open_memory
    from atoll.peer.daemon.reach_lines import who_can_join

    os.umask(PRIVATE_UMASK)
    memory = await asyncio.to_thread(open_memory, home, options)
    remembers = memory is not None and memory.recovered.view is not None
    if options.returns and not options.contacts and not remembers:
        raise _lost_run(options.run)
    page = _listen_for_page(home, options)  # where that cannot be, nothing is begun
    daemon = Daemon(home, options, log.say, memory)
    manager = ServiceManager(os.environ, log.say)
    if page is not None:
        _show(page, daemon, log)
    interrupts, was_kept = 0, is_kept_by_parent()

    def interrupt(keep: bool) -> None:
        nonlocal interrupts
        if is_kept_by_parent():  # all processes of a job were told, and the script comes first
            daemon.note("leave", "told to end by a signal: `atoll run` says when to leave")
            return
        if was_kept:
            daemon.note("leave", "`atoll run` is gone, and so this daemon ends; its place is kept")
        interrupts += 1
        if interrupts > 1:
            os._exit(INTERRUPTED)  # asked twice: at once
        manager.stopping()
        if keep or was_kept:
            daemon.stop()
        else:
            daemon.leave()

    faulthandler.register(signal.SIGUSR1)  # where do its threads stand? `kill -USR1 PID` shows it
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt, False)
    loop.add_signal_handler(signal.SIGTERM, interrupt, options.keeps_place)

    where = f" --home {home_argument}" if home_argument else ""
    here = f"  here: atoll status{where}   atoll leave{where}   or Ctrl+C to leave"

    def joined(view: View) -> None:
        own = f"peer {short(home.peer_id)} at {daemon.advertised()}"
        first = _where_it_is_back(daemon, view) if remembers else _whom_it_joined(daemon, view)
        log.begin(first, f"  this is {own}, home {home.path}", here)

    def ready() -> None:
        manager.ready()
        if options.founders or (options.found and daemon.node.view is not None):
            relays = bool(options.relay_mbit)
            joinable = who_can_join(daemon.advertised(), relays=relays)
            told = (f"  home {home.path}", f"  {joinable}", here)
            log.begin(*_how_to_join(daemon), *told)
        else:
            daemon.tell_view(joined)

    if options.contacts and not options.founders:
        loop.call_later(FIRST_LINE_S, log.begin_if_silent, _what_it_tries(options))
    try:
        await daemon.run(ready)
    finally:
        if page is not None:
            page.close()
        # Threads that a disk or a driver holds are waited for without a limit otherwise.
        faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
    left = daemon.node.phase is Phase.LEFT or not (options.keeps_place or was_kept)
    log.say("left the run" if left else f"stopped; its place in run {options.run} is kept")
    return 0


def _how_to_join(daemon: Daemon) -> tuple[str, str]:
    """Return the first lines of a daemon that founds a run: what to type elsewhere, who it is."""
    from atoll.peer.daemon.admin_service import invite_of

    options, address = daemon.parts.options, daemon.advertised()
    run = options.run
    me = f"peer {short(daemon.node.me.peer)} of run {run} at {address}"
    if options.authority:
        at = f"--run {run} --at {address}"
        return f"run {run} takes invites of its authority: atoll authority invite DIR {at}", me
    if options.secret_given:
        others = "`atoll invite` prints the line for a machine that has it not"
        return f"run {run} is for those who have its secret; {others}", me
    return f"atoll join {invite_of(daemon.parts)}", f"{me}; the line above is for other machines"


def _whom_it_joined(daemon: Daemon, view: View) -> str:
    node = daemon.node
    lead = view.member(view.coordinator)
    number = max(node.follower.round + node.syncing.rounds_behind, view.base_round)
    others = count(sum(peer != node.me.peer for peer in view.peers), "peer")
    run = daemon.parts.options.run
    follows = "following" if node.me.role == ARCHIVE else "joined"
    return (
        f"{follows} run {run}: {others}, coordinator"
        f" {short(view.coordinator)} at {lead.address if lead else 'an unknown address'},"
        f" round {number}"
    )


def _where_it_is_back(daemon: Daemon, view: View) -> str:
    """Return the first line of a daemon whose home remembers its place in the run."""
    others = sum(peer != daemon.node.me.peer for peer in view.peers)
    run, number = daemon.parts.options.run, daemon.node.follower.round
    with_them = f"with {count(others, 'other member')}"
    return f"back in run {run} {with_them}, as this home remembers it: round {number}"


def _what_it_tries(options: DaemonOptions) -> str:
    """Return the first line where it takes a while until there is more to say."""
    first, *others = options.contacts
    more = f" and {len(others)} more" if others else ""
    return f"entering run {options.run}, asking {first}{more}"


def _lost_run(run: str) -> ConfigError:
    again = f"atoll up --run {run}"
    return ConfigError(
        f"this home was in run {run}, which had no other member",
        fix=f"go on from a checkpoint: {again} --resume PATH; or begin anew, without its state:"
        f" {again} --force-new-lineage",
    )


def _check_advertised(text: str) -> None:
    """Raise ConfigError for what is no address at which others can dial."""
    has_port = ":" in text.rpartition("]")[2]
    host = parse_address(text)[0] if has_port else text.strip("[]")
    if host in EVERY_ADDRESS:
        raise ConfigError(
            f"--advertise {text}: that is every address of a machine, and others can dial none",
            fix="give the address or the name at which other machines reach this one",
        )


def _advertised_host(
    listen_host: str, contacts: tuple[str, ...], proxy: Proxy | None, log: _Log
) -> str:
    """Return the host part of our address, for others to reach.

    It is where we listen, or the interface that leads to the run; 127.0.0.1 without a route. Behind
    a proxy this machine may have no route to the run, and cannot resolve its names. Who listens on
    IPv4 alone has no use for an address of IPv6.
    """
    if listen_host not in EVERY_ADDRESS:
        return format_address(listen_host, 0).removesuffix(":0")
    targets = [*(parse_address(one)[0] for one in contacts[:1]), *NOWHERE]
    if proxy is not None:
        targets = [*NOWHERE, proxy.host]
    host = own_address(*targets, only_ipv4=listen_host == "0.0.0.0")
    if not host:
        host = "127.0.0.1"
        log.say("no route to other machines was found: advertising 127.0.0.1 (--advertise sets it)")
    return f"[{host}]" if ":" in host else host


class _Log:
    """Print a daemon's lines, first of all how it came into its run.

    What there is to say before that line waits for it.
    """

    def __init__(self, path: str | None = None) -> None:
        """Print to standard output, and to a file at ``path``. Raises ConfigError for none."""
        self._held: list[str] | None = []
        self._file_works = True
        try:
            self._file = LogFile(Path(path).expanduser().absolute()) if path else None
        except OSError as error:
            what = f"--log {path} cannot be written: {error.strerror or error}"
            raise ConfigError(what, fix="choose another file, in a folder that is there") from error

    @property
    def is_for_a_terminal(self) -> bool:
        """Return whether what is said stands on a terminal, and in no file."""
        return self._file is None and sys.stdout.isatty()

    def say(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
        else:
            self._write(line)

    def begin(self, *first: str) -> None:
        """Print ``first``, then what has waited, and from now on each line at once."""
        held, self._held = self._held or [], None
        for line in (*first, *held):
            self._write(line)

    def begin_if_silent(self, first: str) -> None:
        if self._held is not None:
            self.begin(first)

    def _write(self, line: str) -> None:
        _print(line)
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            if self._file_works:
                _print(f"--log: {error.strerror or error}; each line is tried again")
            self._file_works = False
        else:
            self._file_works = True


def _print(line: str) -> None:
    """Print a line, if there is anybody to read it.

    If the reader is gone, or the disk is full, training goes on, and `atoll status` still has the
    last events.
    """
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
