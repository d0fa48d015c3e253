"""Take a daemon's first steps: prepare its process, build its parts, enter its run.

Its log tells of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.collectives.errors import ConfigError, ConnectError
from atoll.collectives.native import say_once
from atoll.collectives.units import duration
from atoll.peer.authority.ledger import Ledger
from atoll.peer.authority.policy import AuthorityAdmission, OpenAdmission
from atoll.peer.checkpoint.schedule import Checkpointer
from atoll.peer.daemon import allocator, descriptors
from atoll.peer.daemon.keys import HomeSigner
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.daemon.status import missing_founders
from atoll.peer.links.planner import Planner
from atoll.peer.membership.phase import Phase
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import Invite, fingerprint_of, parse_address
from atoll.peer.vectors.service import VectorService
from atoll.peer.verify.admission_chain import AdmissionChain
from atoll.peer.verify.ban_list import BanList
from atoll.peer.verify.manager import AuditManager

if TYPE_CHECKING:
    from atoll.peer.daemon.daemon import Daemon


T = TypeVar("T")
JOIN_TIMEOUT_S = 120.0  # from the start to the admission to a view
MISSING_PAUSE_S = 10.0  # between two lines about founders that are missing, at first ...
MISSING_PAUSE_MAX_S = 600.0  # ... and at last: they may be missing for days


def prepare_process(note: Callable[[str, str], None], verbose: bool = False) -> None:
    """Set the limits of this process, before its first thread starts.

    ``note`` takes the kind and the text of a line; what is as usual is said only if ``verbose``.
    """
    memory = f"{allocator.cap_arenas()}; {allocator.give_back_large()}"
    limits = f"{descriptors.raise_limit()}; {memory}"
    if verbose:
        note("limits", limits)
    say_once(lambda line: note("codecs", line))


def checkpointer_of(
    options: DaemonOptions,
    home: Home,
    incarnation: Callable[[], int],
    note: Callable[..., None],
) -> Checkpointer | None:
    """Return the checkpointer of a daemon that is to write checkpoints, else None."""
    if options.checkpoint is None:
        return None
    return Checkpointer(
        options.checkpoint,
        options.every,
        run=options.run,
        secret=options.secret,
        home=home,
        incarnation=incarnation,
        note=note,
    )


def audits_of(daemon: Daemon) -> AuditManager:
    """Return the audit host of a daemon. Its evidence goes to the guard, which tells the others."""
    return AuditManager(daemon.home.peer_id, HomeSigner(daemon.home), daemon)


def admission_of(daemon: Daemon) -> AdmissionChain:
    """Return the guard of a daemon: bans, and the authority's passes in a run that has one.

    Raises AdmissionError if the run has an authority and this peer's pass of it is no good.
    """
    ban_list = BanList(daemon.home.peer_id, daemon.home.path / "evidence", daemon)
    return AdmissionChain(_passes_of(daemon), ban_list)


def _passes_of(daemon: Daemon) -> OpenAdmission:
    options = daemon.options

    def per_address() -> int | None:
        terms = daemon.node.follower.terms
        on_probation = terms is not None and terms.probation > 0
        asked = options.per_address
        return asked if asked is not None or on_probation else 0

    if not options.authority:
        return OpenAdmission(per_address)
    return AuthorityAdmission(
        daemon.home,
        Ledger(options.authority, options.run),
        options.credential,
        options.role,
        founds=options.founds,
        daemon=daemon,
        per_address=per_address,
    )


def planner_of(daemon: Daemon) -> Planner:
    return Planner(
        node=daemon.node,
        links=daemon.monitor,
        streams=daemon.executor.streams,
        replica=daemon.executor.replica,
        daemon=daemon,
    )


def invite_of(daemon: Daemon) -> str:
    """Return an invite to the daemon's run.

    Raises ConfigError in a run whose authority makes the invites.
    """
    options, address = daemon.options, daemon.address
    if options.authority:
        again = f"atoll authority invite DIR --run {options.run} --at {address}"
        what = f"the authority of run {options.run} invites, and nobody else can"
        raise ConfigError(what, fix=f"ask it for what this prints there: {again}")
    fingerprint = fingerprint_of(daemon.home.peer_id)
    return str(Invite(*parse_address(address), options.run, fingerprint, options.secret))


def vector_service_of(daemon: Daemon) -> VectorService:
    return VectorService(
        node=daemon.node,
        trainers=daemon.trainers,
        host=daemon.host,
        streams=daemon.executor.streams,
        copies=daemon.executor.router.copies,
        log=lambda line: daemon.note("transfer", line),
    )


async def say_who_is_missing(daemon: Daemon) -> None:
    """Write to the log who is missing while founders gather; less and less often."""
    pause_s = MISSING_PAUSE_S
    while True:
        await asyncio.sleep(pause_s)
        if not daemon.node.bootstrap.waiting:
            return
        daemon.note("genesis", missing_founders(daemon))
        pause_s = min(2 * pause_s, MISSING_PAUSE_MAX_S)


async def first_contact(daemon: Daemon, end: asyncio.Future[None]) -> None:
    """Reach any peer of the run, unless this one is told to ``end`` meanwhile.

    Raises ConnectError if none can be reached.
    """
    contacts = daemon.options.contacts
    if not contacts:
        raise ConnectError(
            f"no known address of run {daemon.options.run}", fix="join with an invite: atoll join"
        )
    await unless_ended(daemon.reconnector.reach_any(contacts, daemon.options.fingerprint), end)


async def unless_ended(work: Awaitable[T], end: asyncio.Future[Any]) -> T | None:
    """Return what ``work`` gives; if ``end`` is done first, cancel the work and return None."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
        return None if end.done() else task.result()
    finally:
        task.cancel()


def check_joined_later(daemon: Daemon) -> None:
    """Check once, when the time for joining is up, that this peer is in its run.

    Whoever was in, or was let in to learn, comes back however long that takes.
    """
    asyncio.get_running_loop().call_later(JOIN_TIMEOUT_S, check_joined, daemon)


def check_joined(daemon: Daemon) -> None:
    node = daemon.node
    if node.bootstrap.waiting:  # which may take long
        check_joined_later(daemon)
    elif not daemon.was_in and node.phase is not Phase.LEARNER and node.view is None:
        why = f"this peer is {node.phase.value}; {daemon.event_log.last_error or 'no error'}"
        run, limit_s = daemon.options.run, JOIN_TIMEOUT_S
        what = f"not admitted to run {run} within {duration(limit_s)} ({why})"
        daemon.stop(ConnectError(what, fix="is there a quorum? `atoll status` on a member"))
