"""Run the peer daemon: one event loop that connects the membership machine to the world.

Sockets, timers and threads become events for the machine; its effects become messages, dials and
orders to the round runner. Decisions live elsewhere (peer/membership/), this file only wires.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, get_args

from atoll.collectives.errors import (
    AtollError,
    ConnectError,
    IdentityInUseError,
    IncompatibleRunError,
    RemoteProtocolError,
)
from atoll.collectives.threads import workers
from atoll.peer.audit.ban_list import AboutBans
from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.statements import AuditMessage
from atoll.peer.authority.messages import AboutPasses
from atoll.peer.daemon.admin_service import Commands
from atoll.peer.daemon.event_log import EventLog, RoundLines
from atoll.peer.daemon.ipc_server import IpcServer
from atoll.peer.daemon.keys import HomeSigner
from atoll.peer.daemon.options import DaemonOptions, first_event
from atoll.peer.daemon.reconnect import Reconnector
from atoll.peer.daemon.resuming import Inquiry
from atoll.peer.daemon.startup import (
    admission_of,
    audits_of,
    check_joined_later,
    checkpointer_of,
    first_contact,
    planner_of,
    prepare_process,
    say_who_is_missing,
    unless_ended,
    vector_service_of,
)
from atoll.peer.daemon.trainer_service import TrainerService
from atoll.peer.links.messages import AboutLinks, StreamPlan
from atoll.peer.links.monitor import LinkMonitor
from atoll.peer.links.planner import round_bytes
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.node import Node
from atoll.peer.membership.probation import terms_of
from atoll.peer.membership.view import ARCHIVE, Member, View, short
from atoll.peer.net import byte_counts
from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.hello import COPIED_HOME_FIX
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import format_address
from atoll.peer.net.wire import name_of
from atoll.peer.rounds.executor import RoundExecutor
from atoll.peer.rounds.salvage import FetchKept
from atoll.peer.state_sync.messages import ANSWERED_TO_LEARNERS, ASKED_OF_DONORS, ResultHead
from atoll.peer.streams.stream import DataStream
from atoll.peer.vectors.messages import AboutVectors

RENEW_PAUSE_S = 5.0  # between two tries to store a new incarnation
WORKERS_MAX = min(32, (os.cpu_count() or 1) + 4)  # as asyncio has it


class Daemon:
    """Run one peer: ``await run()`` lives until the peer has left.

    It returns nothing or raises AtollError.
    """

    def __init__(self, home: Home, options: DaemonOptions, say: Callable[[str], None]) -> None:
        self.home = home
        self.options = options
        self.started_s = time.monotonic()
        self.event_log = EventLog(say)
        self.note = self.event_log.note
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._known: tuple[str, ...] = ()  # addresses of the run, as the home has them
        self._saving = asyncio.Lock()
        self._inc = home.next_incarnation(time.time_ns())
        self.address = ""
        self.admission = admission_of(self)
        self.host = ConnectionManager(
            peer_id=home.peer_id,
            tls=run_tls(home, options.secret),
            run=options.run,
            daemon=self,
            ciphers=options.ciphers,
            congestion=options.congestion,
            policy=self.admission,
            of_rounds=get_args(AuditMessage),
        )
        self.node = Node(Member(home.peer_id, self._inc, options.role), signer=HomeSigner(home))
        self.audits = audits_of(self)
        self.executor = RoundExecutor(
            me=home.peer_id,
            host=self.host,
            audits=self.audits,
            daemon=self,
            received=home.path / "received",
        )
        self.rounds = RoundLines(self)
        self.monitor = LinkMonitor(
            me=home.peer_id, streams=self.executor.streams, daemon=self, probes=options.probes
        )
        self.planner = planner_of(self)
        self.reconnector = Reconnector(
            self.host, self.executor.streams, self.spawn, self._on_dial_error
        )
        self.trainers = TrainerService(
            options.run, short(home.peer_id), self.node, self.executor, self.feed
        )
        self.vectors = vector_service_of(self)
        handlers = self.trainers.handlers() | self.vectors.handlers() | Commands(self).handlers()
        self.ipc_server = IpcServer(home.socket_path, handlers, self.vectors.gone)
        self.trainers.ipc_server, self.event_log.publish = self.ipc_server, self.ipc_server.publish
        self._message_handlers = self._message_table()
        self._effect_handlers = self._effect_table()
        self._archive = options.role == ARCHIVE
        self._on_view: Callable[[View], None] | None = None  # see tell_view
        self.was_in = False  # in some view of this life
        self._rounds = 0  # that were committed in it
        self.inquiry: Inquiry | None = None  # while it is asked whether the run lives
        self.checkpointer = checkpointer_of(options, home, lambda: self._inc, self.note)

    # ------------------------------------------------------------ life

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Listen, found or join, serve until left. ``on_ready`` runs when commands are answered."""
        self._loop.set_exception_handler(self._on_defect)
        self._loop.set_default_executor(workers(WORKERS_MAX, "work"))
        if self.checkpointer is not None and self._archive:
            # It may fall behind, so it stands still while it is copied.
            self.executor.sync.may_finish = self.checkpointer.idle
        try:
            prepare_process(self.note, self.options.verbose)
            await self._listen()
            self.ipc_server.start()
            self.spawn(self.executor.run())
            self.spawn(self.monitor.run())
            self.spawn(self.planner.run())
            await self._enter()
            if not self._end.done():
                self.spawn(self.reconnector.run(lambda: self.node.view, self.contacts, self._seeks))
                on_ready()
            await self._end
        finally:
            await self._close()

    async def _enter(self) -> None:
        """Found the run, wait for other founders, or reach a member."""
        loaded, begins = self.options.resume, first_event(self.options, self.address)
        if loaded is not None:
            self.executor.restore(loaded)
            self.note("checkpoint", f"round {loaded.round} of {loaded.path.name} is loaded")
        if begins is None:
            await first_contact(self, self._end)
        elif isinstance(begins, ev.Found) and loaded is not None and self.options.contacts:
            self.inquiry = Inquiry(self.host, self.node.me, self.options.contacts)
            begins = None if await self._lives(self.inquiry) else begins
        if begins is not None:
            self.feed(begins)
        self._hear_of_links()
        if begins is None:
            check_joined_later(self)
            return
        if self.node.view is not None:
            await self._save_known(self.node.view)  # before anybody can rely on the run
        else:
            self.spawn(say_who_is_missing(self))

    async def _listen(self) -> None:
        options = self.options
        _, port = await self.host.listen(options.listen_host, options.listen_port)
        has_port = ":" in options.advertise.rpartition("]")[2]
        self.address = (
            options.advertise if has_port else format_address(options.advertise.strip("[]"), port)
        )
        self.node.advertise(self.address)

    async def _lives(self, inquiry: Inquiry) -> bool:
        """Return whether the run to be resumed lives.

        True also if this peer is to end meanwhile.
        """
        view = await unless_ended(inquiry.ask(), self._end)
        if self._end.done():
            return True
        self.note("resume", inquiry.outcome(self.options.run, view))
        return view is not None

    def _hear_of_links(self) -> None:
        """Take up the links that were made while it was asked whether the run lives."""
        inquiry, self.inquiry = self.inquiry, None
        if inquiry is not None:
            for peer in self.host.link_peers():
                self.on_up(peer, inquiry.addresses.get(peer, ""), 0)

    def leave(self) -> None:
        self.note("leave", "leaving the run")
        self.feed(ev.LeaveAsked())

    def stop(self, error: AtollError | None = None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self.rounds.sum_up()
        if self.checkpointer is not None:
            await self.checkpointer.close()
        self.vectors.close()
        self.audits.close()
        self.executor.close()
        await self.host.close()
        self.ipc_server.close()

    # ------------------------------------------------------------ events in, effects out

    def feed(self, event: ev.Event) -> None:
        if self._end.done():
            return
        if isinstance(event, ev.Applied | ev.CaughtUp | ev.Restored):
            self._configure()  # first: the machine is not to act on a state whose terms it lacks
        for effect in self.node.handle(event, self._loop.time()):
            self._effect_handlers[type(effect)](effect)
        if isinstance(event, ev.Applied | ev.CaughtUp):
            self._moved_on(event)
        if self._on_view is not None:
            self.tell_view(self._on_view)
        if self._timer is not None:
            self._timer.cancel()
        deadline_s = self.node.next_deadline_s()
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._tick)

    def tell_view(self, on_view: Callable[[View], None]) -> None:
        """Call ``on_view`` once, as soon as this peer knows a view of the run."""
        view = self.node.known_view
        known = view is not None and view.number > 0  # view 0 is that of those who gather
        self._on_view = None if known else on_view
        if known and view is not None:
            on_view(view)

    def _configure(self) -> None:
        if self.executor.state is None:
            return
        spec = self.executor.state.spec
        wire = str(spec.to_wire())
        if wire != self.node.follower.spec:
            terms = terms_of(spec)
            if self.checkpointer is not None:
                self.spawn(self.checkpointer.look_for_room(self.executor.state))
            self.feed(ev.Configured(wire, spec.fragments, spec.rounds_in_flight, terms))

    def _moved_on(self, event: ev.Applied | ev.CaughtUp) -> None:
        """Act on a state that has changed: tell the checkpointer; an archive saves addresses."""
        self._rounds += 1
        state, view = self.executor.state, self.node.known_view
        if state is None:
            return
        if self._archive and view is not None:
            # Not its bans: no votes come with a view that one is told of.
            self.admission.ban_list.installed(view.peers, ())
            self.spawn(self._save_known(view))  # the peer of its invite may not live for ever
        if self.checkpointer is not None and view is not None:
            self.checkpointer.committed(event.round, view, state, self.executor.replica.log)

    def _tick(self) -> None:
        if (progress_bytes := self.executor.progress_bytes) != self.node.heartbeats.progress_bytes:
            self.feed(ev.Progressed(progress_bytes))
        self.feed(ev.Tick())

    def _effect_table(self) -> dict[type, Callable[[Any], object]]:
        """Return what carries out each effect of the membership machine."""
        return self.executor.handlers() | {
            ev.Send: lambda e: self.host.send(e.peer, e.message),
            ev.Connect: lambda e: self.reconnector.dial(e.peer, e.address),
            ev.ProbePeer: lambda e: self.spawn(self._probe(e.peer, e.address)),
            ev.Installed: lambda e: self._on_installed(e.view),
            ev.Renew: lambda e: self.spawn(self._renew()),
            ev.Left: lambda e: self.spawn(self._on_left()),
            ev.Note: lambda e: self._on_note(e),
        }

    def _message_table(self) -> dict[type, Callable[[bytes, Any], None]]:
        """Return who takes each message of another peer."""
        rows: tuple[tuple[object, Callable[[bytes, Any], None]], ...] = (
            (ms.MEMBERSHIP, self._on_membership),
            (AboutPasses, self.admission.on_message),
            (AboutBans, self.admission.ban_list.on_message),
            (AuditMessage, self.audits.on_message),
            (AboutLinks, self.monitor.on_message),
            (StreamPlan, self.planner.on_message),
            (FetchKept, self.executor.reducer.kept_server.on_fetch_kept),
            (ResultHead, self.executor.reducer.fetcher.on_head),
            (ASKED_OF_DONORS, self.executor.donor.on_message),
            (ANSWERED_TO_LEARNERS, self.executor.sync.on_message),
            (AboutVectors, self.vectors.on_message),
        )
        table: dict[type, Callable[[bytes, Any], None]] = {}
        for kinds, handler in rows:
            for kind in _kinds(kinds):
                assert table.setdefault(kind, handler) is handler, f"two take {kind.__name__}"
        return table

    def on_message(self, peer: bytes, message: object) -> None:
        if not self.admission.check_message(peer, message):
            return
        handler = self._message_handlers.get(type(message))
        if self.inquiry is not None and not isinstance(message, AboutPasses | AboutBans):
            self.inquiry.on_message(peer, message)
        elif handler is None:
            raise RemoteProtocolError(f"nobody expects a {name_of(message)} here")
        else:
            handler(peer, message)

    def _on_membership(self, peer: bytes, message: object) -> None:
        self.feed(ev.Received(peer, self.executor.believed(message)))

    def on_up(self, peer: bytes, address: str, inc: int) -> None:
        self.executor.streams.know(peer, address)
        self.reconnector.answered(address, peer)
        self.admission.linked(peer)
        if self.inquiry is not None:
            self.inquiry.on_up(peer, address)
            return
        self.feed(ev.LinkUp(peer, address, self.host.srtt_s(peer)))

    def on_down(self, peer: bytes, why: str) -> None:
        self.note("link", f"connection to {short(peer)} ended: {why}")
        self.admission.unlinked(peer)
        self.executor.link_down(peer)
        self.vectors.link_down(peer, why)
        self.feed(ev.LinkDown(peer, why))

    def on_conflict(self, inc: int) -> None:
        what = f"this identity was started elsewhere (incarnation {inc}, ours {self._inc})"
        self.stop(IdentityInUseError(what, fix=COPIED_HOME_FIX))

    # ------------------------------------------------------------ what components ask (ports.py)

    def incarnation(self) -> int:
        return self._inc

    def advertised(self) -> str:
        return self.address

    def on_data(self, peer: bytes, stream: DataStream) -> None:
        self.executor.streams.accept(peer, stream)

    def send(self, peer: bytes, message: object) -> bool:
        return self.host.send(peer, message)

    def link_peers(self) -> Sequence[bytes]:
        return self.host.link_peers()

    def is_local(self, peer: bytes) -> bool:
        return self.host.is_local(peer)

    def tcp_info(self, peer: bytes) -> bytes:
        return self.host.tcp_info(peer)

    def expel(self, peer: bytes, why: str) -> None:
        self.host.drop(peer, why, expelled=True)

    def view(self) -> View | None:
        return self.node.view

    def is_outside(self) -> bool:
        return self.node.view is None

    def member_peers(self) -> Collection[bytes]:
        # Not of a view that it was told of: whoever is linked could say that its friends are the
        # run.
        return self.node.view.peers if self.node.view is not None else ()

    def begins(self) -> Iterable[Begin]:
        return self.node.follower.begins.values()

    def convict(self, evidence: Evidence) -> None:
        self.admission.ban_list.convict(evidence)

    def banned(self, peers: Collection[bytes]) -> None:
        self.audits.banned(peers)

    def took_part(self, terms: bytes) -> bool:
        return self.audits.took_part(terms)

    def tell_trainer(self, effect: ev.TellTrainer) -> None:
        self.trainers.tell(effect)

    def round_committed(self, begin: Begin, took_s: float, takes_part: bool) -> None:
        self.rounds.committed(begin, took_s, takes_part=takes_part)

    def sent_for_rounds_bytes(self) -> int:
        return self.host.counts.sent[byte_counts.ROUNDS]

    def new_loss(self) -> float | None:
        return self.trainers.new_loss()

    def round_bytes(self, peers: int) -> int:
        """Return how many bytes this peer sends in a round with so many peers.

        That is as the run's terms have it, or what the rounds so far have sent in the mean.
        """
        sent_bytes = self.host.counts.sent[byte_counts.ROUNDS]
        return round_bytes(self.executor.state, peers) or sent_bytes // max(1, self._rounds)

    # ------------------------------------------------------------ carrying out effects

    def _on_installed(self, view: View) -> None:
        self.was_in = True
        self.event_log.installed(view)
        self.admission.ban_list.installed(view.peers, view.banned)
        self.executor.installed(view)
        for member in view.members:
            if member.peer != self.home.peer_id:
                self.executor.streams.know(member.peer, member.address)
                if member.peer in self.host.link_peers():
                    self.executor.streams.warm(member.peer)
        self.spawn(self._save_known(view))

    async def _save_known(self, view: View) -> None:
        """Save whom to ask after a restart. Our own address stands for "this run exists"."""
        others = [m.address for m in view.members if m.peer != self.home.peer_id and m.address]
        await self._save_record((*others, self.address))

    async def _save_record(self, known: tuple[str, ...]) -> None:
        if known == self._known:
            return
        self._known = known
        async with self._saving:  # one at a time: the last one that is asked for stays
            try:
                await asyncio.to_thread(self.home.save_run, self.options.record(self._known))
            except OSError as error:  # a full disk must not end the training
                self.note("disk", f"cannot save the run's addresses in {self.home.path}: {error}")

    async def _probe(self, peer: bytes, address: str) -> None:
        out = self.admission.is_out(peer)  # its process may live, its membership does not
        answer = "refused" if out else await self.reconnector.probe(peer, address)
        self.feed(ev.Probed(peer, answer))

    async def _renew(self) -> None:
        before = self._inc
        while self._inc == before:
            try:
                self._inc = await asyncio.to_thread(self.home.next_incarnation, time.time_ns())
            except OSError as error:  # a full disk must not end the training
                self.note("disk", f"cannot store a new incarnation in {self.home.path}: {error}")
                await asyncio.sleep(RENEW_PAUSE_S)
        for peer in self.host.link_peers():
            self.host.drop(peer, "joining again as a new incarnation")
        self.feed(ev.Incarnated(self._inc))

    async def _on_left(self) -> None:
        """End the daemon, and forget the addresses of a run that ended with this peer.

        Such a run may be founded again; any other is rejoined.
        """
        view = self.node.view
        if view is not None and len(view.members) == 1:
            await self._save_record(())
        self.stop()

    def _on_note(self, note: ev.Note) -> None:
        self.note(note.kind, note.text, **note.fields)
        if note.kind == "refused":
            self.stop(IncompatibleRunError(note.text, fix="join with the run's specification"))
        elif note.kind == "conflict":
            self.stop(IdentityInUseError(note.text, fix=COPIED_HOME_FIX))

    # ------------------------------------------------------------ links

    def contacts(self) -> tuple[str, ...]:
        """Return the addresses of the run to try outside a view, our own left out."""
        known = self._known or self.options.contacts
        if self._seeks():
            known = (*known, *self.options.contacts)
        return tuple(address for address in dict.fromkeys(known) if address != self.address)

    def _seeks(self) -> bool:
        """Return whether there may be others of the run that no view names."""
        return self.node.bootstrap.waiting or self.options.resume is not None

    def _on_dial_error(self, error: ConnectError | IdentityInUseError) -> None:
        self.event_log.failed(error.what)
        if isinstance(error, IdentityInUseError):
            self.stop(error)

    def spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_defect(self._loop, {"message": "a task failed", "exception": error})

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the daemon loudly by an error that nobody handles: half a daemon would only hang."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._end.done():
            self._end.set_exception(error)


def _kinds(kinds: Any) -> Iterator[type]:
    """Return the message classes of a union, and those that are derived from them."""
    for kind in get_args(kinds) or (kinds,):
        yield kind
        for derived in kind.__subclasses__():
            yield from _kinds(derived)
