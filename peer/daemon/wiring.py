"""Build all components of a daemon, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from atoll.peer.caps.caps import CapOptions, Caps, Measured
from atoll.peer.checkpoint.schedule import Checkpointer
from atoll.peer.daemon.event_log import EventLog, RoundLines
from atoll.peer.daemon.ipc_server import IpcServer
from atoll.peer.daemon.memory import HomeMemory, checkpoint_folder
from atoll.peer.daemon.optional import (
    ABOUT_AUDITS,
    AdmissionChain,
    LazyVerifier,
    authority_admission,
)
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.daemon.port_mapper import PortMapper
from atoll.peer.daemon.ports import DaemonPort
from atoll.peer.daemon.reach_watch import ReachWatch
from atoll.peer.daemon.reconnect import KnownAddresses, Reconnector
from atoll.peer.daemon.resuming import Inquiry
from atoll.peer.daemon.trainer_service import TrainerService
from atoll.peer.links.monitor import LinkMonitor
from atoll.peer.links.planner import Planner
from atoll.peer.membership.node import Node
from atoll.peer.membership.signatures import verifies
from atoll.peer.membership.view import Member
from atoll.peer.net.admission_policy import AdmissionPolicy
from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home
from atoll.peer.net.upnp import UpnpRouter
from atoll.peer.rounds.durability import Durability
from atoll.peer.rounds.executor import RoundExecutor
from atoll.peer.rounds.rewinding import Checkpoints
from atoll.peer.telemetry.event_file import EVENTS_FILE, EventFile
from atoll.peer.telemetry.reporter import RowReporter
from atoll.peer.telemetry.rows import RoundClock
from atoll.peer.vectors.server import VectorService


class Components:
    """Hold what a daemon is made of, each with the port that it needs and the parts before it."""

    def __init__(
        self,
        home: Home,
        options: DaemonOptions,
        event_log: EventLog,
        daemon: DaemonPort,
        memory: HomeMemory | None,
    ) -> None:
        """Build them. ``memory``: what the home remembers; None: nothing, and nothing is written.

        Raises AdmissionError if the run has an authority and this peer's pass of it is no good.
        """
        self.home, self.options, self.event_log = home, options, event_log
        self.started_s = time.monotonic()
        self.inquiry: Inquiry | None = None  # while it is asked whether the run lives
        me, signer = home.peer_id, HomeSigner(home)
        self.memory = memory
        member = Member(me, daemon.incarnation(), options.role)
        known = memory.recovered if memory is not None else None
        self.node = Node(member, signer=signer, life=daemon.life(), recovered=known)
        self.addresses = KnownAddresses(home, options, self.node, event_log)
        # Bans, and the authority's passes in a run that has one.
        passes = _passes(home, options, self.node, daemon)
        self.admission = AdmissionChain(passes, me, home.path / "evidence", daemon)
        self.caps = _caps(home, options.caps, daemon)
        self.host = _host(home, options, daemon, self.admission, self.caps)
        mapper = _mapper(options, daemon)
        self.reach = ReachWatch(
            self.node, self.host, daemon, advertises=options.advertises, mapper=mapper
        )
        self.audits = LazyVerifier(me, signer, daemon)
        self.executor = RoundExecutor(
            me=me,
            host=self.host,
            audits=self.audits,
            daemon=daemon,
            received=home.path / "received",
            files=memory.rounds if memory is not None else None,
            checkpoints=_checkpoints(home, options),
        )
        streams = self.executor.streams
        self._report_rounds(me, daemon)
        self.monitor = LinkMonitor(
            me=me, streams=streams, daemon=daemon, probes=options.probes, caps=self.caps
        )
        self.planner = Planner(
            node=self.node,
            links=self.monitor,
            streams=streams,
            replica=self.executor.replica,
            daemon=daemon,
        )
        self.reconnector = Reconnector(self.host, streams, self.reach, daemon)
        self.ipc_server = IpcServer(home.socket_path)
        event_log.publish = self.ipc_server.publish
        self.trainers = TrainerService(
            options.run, self.node, self.executor, self.ipc_server, daemon.feed, event_log
        )
        self.vectors = VectorService(
            node=self.node,
            trainers=self.trainers,
            host=self.host,
            streams=streams,
            transfers=self.executor.router.transfers,
            log=partial(daemon.note, "transfer"),
        )
        if self.caps is not None:
            self.executor.donor.refuses = self.caps.refuses_state
        self.checkpointer = _checkpointer(home, options, daemon)
        self.durability = _durability(memory, self.executor, daemon)

    def _report_rounds(self, me: bytes, daemon: DaemonPort) -> None:
        """Make what tells people of events and rounds: lines, the file of events, rows."""
        self.round_clock, self.round_lines = RoundClock(me), RoundLines(daemon)
        self.event_file = EventFile(self.home.path / EVENTS_FILE, partial(daemon.note, "disk"))
        self.event_log.record = self.event_file.append
        self.rows = RowReporter(me, daemon, self.host.counts, self.event_file.append)

    def connections(self) -> Iterator[Measured]:
        """Return an iterator over everything of which the kernel counts packets to other peers."""
        streams = self.executor.streams
        yield from (stream for _, stream in (*streams.outgoing(), *streams.incoming()))
        yield from self.host.links()


class HomeSigner:
    """Sign with the identity key as this peer, and verify as anybody (signing.Signer).

    Ed25519: 0.03 ms to sign, 0.1 ms to verify.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    def sign(self, text: bytes) -> bytes:
        return self._home.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        return verifies(peer, text, signature)


def _passes(home: Home, options: DaemonOptions, node: Node, daemon: DaemonPort) -> AdmissionPolicy:
    """Return who judges whether a peer may come in, whatever bans there are."""

    def per_address() -> int | None:
        terms = node.follower.terms
        on_probation = terms is not None and terms.probation > 0
        asked = options.per_address
        return asked if asked is not None or on_probation else 0

    if not options.authority:
        return AdmissionPolicy(per_address)
    return authority_admission(
        home,
        options.run,
        options.authority,
        options.credential,
        options.role,
        founds=options.founds,
        daemon=daemon,
        per_address=per_address,
    )


def _host(
    home: Home,
    options: DaemonOptions,
    daemon: DaemonPort,
    admission: AdmissionChain,
    caps: Caps | None,
) -> ConnectionManager:
    return ConnectionManager(
        peer_id=home.peer_id,
        tls=run_tls(home, options.secret),
        run=options.run,
        daemon=daemon,
        ciphers=options.ciphers,
        congestion=options.congestion,
        policy=admission,
        of_rounds=ABOUT_AUDITS,
        caps=caps,
        relay_bytes_per_s=options.relay_mbit * 1e6 / 8,
        proxy=options.proxy,
    )


def _mapper(options: DaemonOptions, daemon: DaemonPort) -> PortMapper | None:
    """Return who has a router forward the port; None where the user has said what to dial."""
    if not options.upnp or options.advertises or options.proxy is not None:
        return None
    return PortMapper(UpnpRouter, partial(daemon.note, "reach"))


def _caps(home: Home, options: CapOptions, daemon: DaemonPort) -> Caps | None:
    """Return the caps of a daemon that has any, else None."""
    if options.up.is_open and options.down.is_open:
        return None
    return Caps(options, home.path, partial(daemon.note, "caps"))


def _checkpoints(home: Home, options: DaemonOptions) -> Checkpoints | None:
    """Return where this peer writes checkpoints; None if it writes none."""
    folder = checkpoint_folder(home, options)
    return Checkpoints(folder, options.run, options.secret) if folder is not None else None


def _checkpointer(home: Home, options: DaemonOptions, daemon: DaemonPort) -> Checkpointer | None:
    """Return the checkpointer of a daemon that is to write checkpoints, else None."""
    folder = checkpoint_folder(home, options)
    if folder is None:
        return None
    return Checkpointer(
        folder,
        options.every,
        run=options.run,
        secret=options.secret,
        home=home,
        daemon=daemon,
        quiet=options.checkpoint is None,
    )


def _durability(
    memory: HomeMemory | None, executor: RoundExecutor, daemon: DaemonPort
) -> Durability | None:
    """Return who writes down what the daemon is to remember; None if nothing is."""
    if memory is None:
        return None
    log, restored = executor.replica.log, memory.recovered.state[0]
    executor.durability = Durability(memory.ledger, memory.rounds, log, daemon, restored)
    return executor.durability
