"""Run the peer daemon: one event loop that connects the membership machine to the world.

Sockets, timers and threads become events for the machine; its effects become messages, dials and
orders about rounds. Who takes each message of another peer, and who carries out each effect, is in
two tables; what they are is built in wiring.py. Decisions live elsewhere (peer/membership/).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from atoll.collectives.codecs import U8
from atoll.collectives.errors import (
    AtollError,
    ConnectError,
    IdentityInUseError,
    IncompatibleRunError,
    RemoteProtocolError,
)
from atoll.collectives.native import say_once
from atoll.collectives.threads import workers
from atoll.collectives.units import duration
from atoll.peer.daemon.admin_service import AdminService
from atoll.peer.daemon.event_log import EventLog
from atoll.peer.daemon.memory import HomeMemory, room_of
from atoll.peer.daemon.optional import ABOUT_AUDITS, ABOUT_BANS, ABOUT_PASSES
from atoll.peer.daemon.options import DaemonOptions, first_event
from atoll.peer.daemon.process import prepare_process
from atoll.peer.daemon.reconnect import is_refusal, went_unheard
from atoll.peer.daemon.resuming import Inquiry
from atoll.peer.daemon.status import (
    answers_late,
    missing_founders,
    nobody_answers,
    nobody_leads,
    phase_of,
)
from atoll.peer.daemon.wiring import Components
from atoll.peer.durable.disk import Room
from atoll.peer.links.messages import AboutLinks, StreamPlan
from atoll.peer.links.planner import round_bytes
from atoll.peer.links.tcp_info import since_answer_s
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.durable_records import ReadyRecord
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.packing import Packing
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.probation import terms_of
from atoll.peer.membership.view import ARCHIVE, View, short
from atoll.peer.net import byte_counts
from atoll.peer.net.dial import greet_proxy
from atoll.peer.net.examination import RunOutline, outline_of
from atoll.peer.net.hello import COPIED_HOME_FIX
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import format_address
from atoll.peer.net.proxy import Proxy
from atoll.peer.net.reach_messages import ReachTold
from atoll.peer.net.wire import name_of, wire_of
from atoll.peer.rounds.salvage import FetchKept
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.state_sync.messages import ANSWERED_BY_DONORS, ASKED_OF_DONORS, ResultHead
from atoll.peer.streams.stream import DataStream
from atoll.peer.telemetry.rows import LinkSeen, RoundRow
from atoll.peer.vectors.messages import AboutVectors

if TYPE_CHECKING:
    from atoll.peer.verify.evidence import Evidence

T = TypeVar("T")
BUSY_AGAIN_S = 1.0  # between two tries of a newcomer for whom nobody has time
REACH_AGAIN_S = 5.0  # between two tries to reach anybody of a run that this home was in ...
LINK_LOOK_S = 0.05  # ... in which somebody else may dial this peer
JOIN_TIMEOUT_S = 120.0  # from the first link to the admission to a view; as long to get a link
MISSING_PAUSE_S = 10.0  # between two lines about founders that are missing, at first ...
MISSING_PAUSE_MAX_S = 600.0  # ... and at last: they may be missing for days
# Messages that are heard also while it is asked whether the run lives.
BEFORE_THE_RUN = ABOUT_PASSES | ABOUT_BANS | {name_of(ReachTold(False))}
RENEW_PAUSE_S = 5.0  # between two tries to store a new incarnation
WORKERS_MAX = min(32, (os.cpu_count() or 1) + 4)  # as asyncio has it


class Daemon:
    """Run one peer: ``await run()`` lives until the peer has left.

    It returns nothing or raises AtollError.
    """

    def __init__(
        self,
        home: Home,
        options: DaemonOptions,
        say: Callable[[str], None],
        memory: HomeMemory | None = None,
    ) -> None:
        """Make a daemon that goes on where the ``memory`` of its home ends; None: it has none."""
        event_log = EventLog(say)
        self.note = event_log.note
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._life = home.next_incarnation(time.time_ns())
        self._inc = memory.incarnation(self._life) if memory is not None else self._life
        self.parts = Components(home, options, event_log, self, memory)
        self.node, self.host = self.parts.node, self.parts.host
        self.executor = self.parts.executor
        self._message_handlers = self._message_table()
        self._effect_handlers = self._effect_table()
        self._archive = options.role == ARCHIVE
        self._on_view: Callable[[View], None] | None = None  # see tell_view
        self._packing = Packing()
        self._was_in = options.returns  # in some view; or it goes on trying without a limit
        self._rounds = 0  # that were committed in it

    # ------------------------------------------------------------ life

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Listen, found or join, serve until left. ``on_ready`` runs when commands are answered."""
        parts = self.parts
        self._loop.set_exception_handler(self._on_defect)
        self._loop.set_default_executor(workers(WORKERS_MAX, "work"))
        if parts.checkpointer is not None and self._archive:
            # It may fall behind, so it stands still while it is copied.
            self.executor.sync.may_finish = parts.checkpointer.idle
        try:
            prepare_process(self.note, parts.options.verbose)
            say_once(partial(self.note, "codecs"))
            await self._listen()
            admin = AdminService(parts, self)
            handlers = parts.trainers.handlers() | parts.vectors.handlers() | admin.handlers()
            parts.ipc_server.start(handlers, parts.vectors.gone)
            self.spawn(self.executor.run())
            if parts.durability is not None:
                self.spawn(parts.durability.run())
            if parts.caps is not None:
                self.spawn(parts.caps.run(parts.connections))
            self.spawn(parts.monitor.run())
            self.spawn(parts.planner.run())
            self.spawn(parts.reach.run())
            await self._enter()
            if not self._end.done():
                self.spawn(parts.reconnector.run(self.node, parts.addresses))
                on_ready()
            await self._end
        finally:
            await self._close()

    async def _enter(self) -> None:
        """Found the run, wait for other founders, or reach a member."""
        parts, options = self.parts, self.parts.options
        if self._remembers():
            self._hear_of_links()
            return
        loaded, begins = options.resume, first_event(options, self.advertised())
        if loaded is not None:
            self.executor.restore(loaded)
            self.note("checkpoint", f"round {loaded.round} of {loaded.path.name} is loaded")
        if begins is None:
            await self._reach_any()
        elif isinstance(begins, ev.Found) and loaded is not None and options.contacts:
            parts.inquiry = Inquiry(self.host, self.node.me, options.contacts)
            begins = None if await self._lives(parts.inquiry) else begins
        if begins is not None:
            self.feed(begins)
        self._hear_of_links()
        if begins is None:
            self._check_joined_later()
            return
        if self.host.proxy is not None:
            self.spawn(self._try_proxy(self.host.proxy))
        if self.node.view is not None:
            await parts.addresses.save_view(self.node.view)  # before anybody can rely on the run
        else:
            self.spawn(self._say_who_is_missing())

    def _remembers(self) -> bool:
        """Go on in the view that this peer's home remembers; return whether it remembers one."""
        memory = self.parts.memory
        if memory is None:
            return False
        for line in memory.lines:
            self.note("recovered", line)
        if memory.reader is not None and memory.recovered.has_files:
            self.executor.load(memory.reader)
        if memory.recovered.view is None:
            return False
        self.feed(ev.Tick())
        return True

    async def _reach_any(self) -> None:
        """Reach any peer of the run, unless this one is told to end meanwhile.

        Raises ConnectError if none can be reached; but who was in the run before waits until
        somebody can be, or dials it: those who are left may all be peers that can only dial out.
        Where somebody takes connections and has no time or no place for another one, a newcomer
        goes on trying for as long as it may take to be admitted.
        """
        options, said = self.parts.options, False
        until_s = self._loop.time() + JOIN_TIMEOUT_S
        if not options.contacts:
            raise ConnectError(
                f"no known address of run {options.run}", fix="join with an invite: atoll join"
            )
        while not self._end.done():
            reached = self.parts.reconnector.reach_any(options.contacts, options.fingerprint)
            try:
                await unless_ended(self._first_link(reached), self._end)
                return
            except ConnectError as error:
                is_busy = went_unheard(error) and self._loop.time() < until_s
                is_final = is_refusal(error, returns=options.returns)
                if is_final or not (options.returns or is_busy):
                    raise
                if not said and options.returns:
                    self.note("waiting", nobody_answers(options.run, self.advertised(), error.what))
                elif not said:
                    self.note("waiting", answers_late(error.what, JOIN_TIMEOUT_S))
                said = True
                if not options.returns:  # of many that come at once not all ask again at once
                    pause_s = random.uniform(0.5, 1.5) * BUSY_AGAIN_S
                    await unless_ended(asyncio.sleep(pause_s), self._end)

    async def _first_link(self, reached: asyncio.Future[None]) -> None:
        """Return with the first link, whoever dialled it.

        Raises what ``reached`` does; a ConnectError after a pause where this peer will try again.
        """
        reached.add_done_callback(lambda done: done.cancelled() or done.exception())
        pause_s = REACH_AGAIN_S if self.parts.options.returns else 0.0
        again_s = self._loop.time() + pause_s
        while not self.host.link_peers():
            if reached.done():
                error = reached.exception()
                is_final = is_refusal(error, returns=self.parts.options.returns)
                is_final |= not isinstance(error, ConnectError)
                if is_final or self._loop.time() >= again_s:
                    reached.result()
                    return
            await asyncio.sleep(LINK_LOOK_S)

    def _check_joined_later(self) -> None:
        """Check once, when the time for joining is up, that this peer is in its run.

        Whoever was in, or was let in to learn, comes back however long that takes.
        """
        self._loop.call_later(JOIN_TIMEOUT_S, self._check_joined)

    def _check_joined(self) -> None:
        node = self.node
        if node.bootstrap.waiting:  # which may take long
            self._check_joined_later()
        elif not self._was_in and node.phase is not Phase.LEARNER and node.view is None:
            last = self.parts.event_log.last_error or "no error"
            run, limit_s = self.parts.options.run, JOIN_TIMEOUT_S
            why = f"this peer is {node.phase.value}; {last}"
            what = f"not admitted to run {run} within {duration(limit_s)} ({why})"
            self.stop(ConnectError(what, fix="is there a quorum? `atoll status` on a member"))
        elif node.view is None and not node.joining.is_followed:
            self.note("waiting", nobody_leads(self.parts.options.run, self.host.link_peers()))

    async def _say_who_is_missing(self) -> None:
        """Write to the log who is missing while founders gather; less and less often."""
        pause_s = MISSING_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            if not self.node.bootstrap.waiting:
                return
            self.note("genesis", missing_founders(self.parts))
            pause_s = min(2 * pause_s, MISSING_PAUSE_MAX_S)

    async def _try_proxy(self, proxy: Proxy) -> None:
        """Say what is wrong with the proxy: a founder dials nobody, which would show it."""
        try:
            await greet_proxy(proxy)
        except ConnectError as error:
            self.note("link", f"{error.what}: until then this peer dials nobody ({error.fix})")

    async def _listen(self) -> None:
        options = self.parts.options
        _, port = await self.host.listen(options.listen_host, options.listen_port)
        has_port = ":" in options.advertise.rpartition("]")[2]
        address = (
            options.advertise if has_port else format_address(options.advertise.strip("[]"), port)
        )
        self.node.advertise(address)

    async def _lives(self, inquiry: Inquiry) -> bool:
        """Return whether the run to be resumed lives.

        True also if this peer is to end meanwhile.
        """
        view = await unless_ended(inquiry.ask(), self._end)
        if self._end.done():
            return True
        self.note("resume", inquiry.outcome(self.parts.options.run, view))
        return view is not None

    def _hear_of_links(self) -> None:
        """Take up the links that were made while it was asked whether the run lives."""
        inquiry, self.parts.inquiry = self.parts.inquiry, None
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
        parts = self.parts
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        parts.round_lines.sum_up()
        parts.rows.close()
        if parts.checkpointer is not None:
            await parts.checkpointer.close()
        parts.vectors.close()
        parts.audits.close()
        self.executor.close()
        if parts.durability is not None:
            parts.durability.close()
        await self.host.close()
        await parts.reach.close()
        if parts.caps is not None:
            parts.caps.save()
        parts.ipc_server.close()
        parts.event_file.close()

    # ------------------------------------------------------------ events in, effects out

    def feed(self, event: ev.Event) -> None:
        if self._end.done():
            return
        if isinstance(event, ev.Applied | ev.CaughtUp | ev.Restored | ev.HomeRead):
            self._configure()  # first: the machine is not to act on a state whose terms it lacks
        for effect in self.node.handle(event, self._loop.time()):
            self._effect_handlers[type(effect)](effect)
        if isinstance(event, ev.Applied | ev.CaughtUp):
            self._moved_on(event)
        elif isinstance(event, ev.HomeRead) and self.parts.durability is not None:
            self.parts.durability.moved_to(event.round, applied=True)
        clock, waiting = self.parts.round_clock, self.node.heartbeats.waiting
        if waiting is not clock.said or isinstance(event, ev.Submitted):
            own = self.node.follower
            clock.hears(waiting, phase_of(own), submitted=bool(own.submissions))
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
            state = self.executor.state
            terms = terms_of(spec, [state.fragment_grid(n) for n in range(spec.fragments)])
            self.spawn(self._look_for_room(self.executor.state))
            if spec.audit:
                self.spawn(asyncio.to_thread(self.parts.audits.preload))
            self.feed(ev.Configured(wire, spec.fragments, spec.rounds_in_flight, terms))

    async def _look_for_room(self, state: ReplicatedState) -> None:
        """Say what the disk has no room for; keep votes only where it is too small for rounds."""
        if self.parts.checkpointer is not None and self.parts.options.checkpoint is not None:
            await self.parts.checkpointer.look_for_room(state)
        if self.parts.durability is not None:
            await self.parts.durability.look_for_room()

    def _moved_on(self, event: ev.Applied | ev.CaughtUp) -> None:
        """Act on a state that has changed: tell the checkpointer; an archive saves addresses."""
        self._rounds += 1
        state, view = self.executor.state, self.node.known_view
        if state is None:
            return
        if self._archive and view is not None:
            # Not its bans: no votes come with a view that one is told of.
            self.parts.admission.installed(view.peers, ())
            # The peer of its invite may not live for ever.
            self.spawn(self.parts.addresses.save_view(view))
        durability, checkpointer = self.parts.durability, self.parts.checkpointer
        if checkpointer is not None and isinstance(event, ev.CaughtUp):
            checkpointer.trust()
        if durability is not None:
            durability.moved_to(event.round, applied=isinstance(event, ev.Applied))
        # Without room for rounds, the home is left alone.
        asked = self.parts.options.checkpoint is not None
        if checkpointer is not None and view is not None and (asked or self._keeps_rounds):
            checkpointer.committed(event.round, view, state, self.executor.replica.log)

    @property
    def _keeps_rounds(self) -> bool:
        return self.parts.durability is not None and self.parts.durability.keeps_rounds

    def _tick(self) -> None:
        if (progress_bytes := self.executor.progress_bytes) != self.node.heartbeats.progress_bytes:
            self.feed(ev.Progressed(progress_bytes))
        self.feed(ev.Tick())
        self.executor.router.note_lag(self.node.lag_s)

    def _effect_table(self) -> dict[type, Callable[[Any], object]]:
        """Return what carries out each effect of the membership machine."""
        return self.executor.handlers() | {
            ev.Send: lambda e: self.host.send(e.peer, self._packing.packed(e.peer, e.message)),
            ev.Connect: lambda e: self.parts.reconnector.dial(e.peer, e.address),
            ev.AskKernel: lambda e: self._ask_kernel(e.peer),
            ev.ProbePeer: lambda e: self.spawn(self._probe(e.peer, e.address)),
            ev.Installed: lambda e: self._on_installed(e.view),
            ev.Renew: lambda e: self.spawn(self._renew()),
            ev.Persist: lambda e: self._persist(e),
            ev.Left: lambda e: self.spawn(self._on_left()),
            ev.Note: lambda e: self._on_note(e),
        }

    def _message_table(self) -> dict[str, Callable[[bytes, Any], None]]:
        """Return who takes each message of another peer, by its name on the wire."""
        rows: tuple[tuple[object, Callable[[bytes, Any], None]], ...] = (
            (ms.MEMBERSHIP, self._on_membership),
            (ABOUT_PASSES, self.parts.admission.on_message),
            (ABOUT_BANS, self.parts.admission.on_ban_message),
            (ABOUT_AUDITS, self.parts.audits.on_message),
            (AboutLinks, self.parts.monitor.on_message),
            (ReachTold, self._on_reach_told),
            (StreamPlan, self.parts.planner.on_message),
            (FetchKept, self.executor.kept_server.on_fetch_kept),
            (ResultHead, self.executor.fetcher.on_head),
            (ASKED_OF_DONORS, self.executor.donor.on_message),
            (ANSWERED_BY_DONORS, self.executor.sync.on_message),
            (AboutVectors, self.parts.vectors.on_message),
            (RoundRow, self.parts.rows.on_message),
        )
        table: dict[str, Callable[[bytes, Any], None]] = {}
        for kinds, handler in rows:
            for name in _names(kinds):
                assert table.setdefault(name, handler) is handler, f"two take {name}"
        return table

    def on_message(self, peer: bytes, message: object) -> None:
        if not self.parts.admission.check_message(peer, message):
            return
        name = name_of(message)
        handler = self._message_handlers.get(name)
        if self.parts.inquiry is not None and name not in BEFORE_THE_RUN:
            self.parts.inquiry.on_message(peer, message)
        elif handler is None:
            raise RemoteProtocolError(f"nobody expects a {name} here")
        else:
            handler(peer, message)

    def _on_membership(self, peer: bytes, message: object) -> None:
        if isinstance(message, ms.Packed):
            message = self._packing.unpacked(peer, message)
        self.feed(ev.Received(peer, message))

    def _ask_kernel(self, peer: bytes) -> None:
        """Tell the machine when the other end of a link has acknowledged something last."""
        ago_s = since_answer_s(self.host.tcp_info(peer))
        if ago_s is not None:  # not at once: the machine is not to be entered twice
            event = ev.KernelAnswered(peer, self._loop.time() - ago_s)
            self._loop.call_soon(self.feed, event)

    def _on_reach_told(self, peer: bytes, told: ReachTold) -> None:
        self.parts.reach.on_message(peer, told)
        streams = self.executor.streams
        streams.know(peer, self.parts.reach.address_of(peer, streams.address(peer)))

    def on_up(self, peer: bytes, address: str, inc: int) -> None:
        self.executor.streams.know(peer, self.parts.reach.address_of(peer, address))
        self.parts.reconnector.answered(address, peer)
        self.parts.admission.linked(peer)
        self.parts.reach.linked(peer)
        if self.parts.inquiry is not None:
            self.parts.inquiry.on_up(peer, address)
            return
        srtt_s, life = self.host.srtt_s(peer), self.host.linked_life(peer)
        self.feed(ev.LinkUp(peer, address, srtt_s, life))

    def on_down(self, peer: bytes, why: str) -> None:
        self.note("link", f"connection to {short(peer)} ended: {why}")
        self.parts.admission.unlinked(peer)
        self.parts.audits.link_lost(peer)
        self.parts.reach.unlinked(peer)
        self.executor.link_down(peer)
        self.parts.vectors.link_down(peer, why)
        self.feed(ev.LinkDown(peer, why))

    def on_conflict(self, life: int) -> None:
        what = f"this identity was started elsewhere (life {life}, ours {self._life})"
        self.stop(IdentityInUseError(what, fix=COPIED_HOME_FIX))

    # ------------------------------------------------------------ what components ask (ports.py)

    def lend_result(self, ready: ReadyRecord) -> AbstractContextManager[U8 | None]:
        return self.executor.lend_result(ready)

    def checkpoint_rounds(self) -> Collection[int]:
        checkpointer, memory = self.parts.checkpointer, self.parts.memory
        if checkpointer is None:
            return ()
        remembered = memory.recovered.view if memory is not None else None
        return checkpointer.rounds(self.node.view or remembered)

    def writing_since(self) -> int | None:
        return self.parts.checkpointer.writing_since if self.parts.checkpointer else None

    def checkpointed(self, round_number: int) -> None:
        if self.parts.durability is not None:
            self.parts.durability.checkpointed(round_number)

    def room(self) -> Room:
        return room_of(self.parts.home, self.parts.checkpointer, self.executor.state)

    def want_checkpoint(self) -> None:
        if self.parts.checkpointer is not None:
            self.parts.checkpointer.want()

    def life(self) -> int:
        return self._life

    def incarnation(self) -> int:
        return self._inc

    def outline(self) -> RunOutline:
        state = self.executor.state
        return outline_of(state.spec, state.manifest) if state is not None else RunOutline(0.0)

    def advertised(self) -> str:
        return self.node.me.address

    def on_data(self, peer: bytes, stream: DataStream) -> None:
        self.executor.streams.accept(peer, stream)

    def send(self, peer: bytes, message: object) -> bool:
        return self.host.send(peer, message)

    def link_peers(self) -> Sequence[bytes]:
        return self.host.link_peers()

    def relays(self) -> Mapping[bytes, float]:
        return self.parts.reach.relays()

    def linked_life(self, peer: bytes) -> int:
        return self.host.linked_life(peer)

    def is_relayed(self, peer: bytes) -> bool:
        link = self.host.link_of(peer)
        return link is not None and bool(link.relay)

    def is_local(self, peer: bytes) -> bool:
        return self.host.is_local(peer)

    def least_rtt_s(self, peer: bytes) -> float:
        return self.host.least_rtt_s(peer)

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
        self.parts.admission.convict(evidence)

    def banned(self, peers: Collection[bytes]) -> None:
        self.parts.audits.banned(peers)

    def took_part(self, terms: bytes) -> bool:
        return self.parts.audits.took_part(terms)

    def awaited_call(self, fragment: int) -> int | None:
        return self.parts.trainers.awaited_call(fragment)

    def tell_trainer(self, effect: ev.TellTrainer, call: int | None) -> None:
        self.parts.trainers.tell(effect, call)

    def round_committed(self, begin: Begin, took_s: float, tries: int) -> None:
        parts, takes_part = self.parts, self.node.me.peer in begin.participants
        submitted_s = parts.trainers.submitted_s(begin.fragment)
        times = parts.round_clock.committed(time.monotonic(), took_s, submitted_s)
        parts.round_lines.committed(begin, times, takes_part=takes_part)
        parts.rows.committed(begin, times, tries, takes_part=takes_part)

    def trainer_figures(self) -> Mapping[str, float]:
        trainer = self.parts.trainers.trainer
        return trainer.figures if trainer is not None else {}

    def new_heldout_loss(self) -> float | None:
        return self.parts.trainers.new_heldout_loss()

    def links_seen(self) -> tuple[LinkSeen, ...]:
        view, me = self.node.view, self.node.me.peer
        others = [peer for peer in view.peers if peer != me] if view is not None else []
        return tuple(self.parts.monitor.seen(peer) for peer in others)

    def own_rates(self) -> tuple[int, int]:
        totals = self.parts.monitor.totals()
        return totals["up_bytes_per_s"], totals["down_bytes_per_s"]

    def standing(self) -> tuple[str, str]:
        return self.node.phase.value, self.parts.event_log.last_error

    def predicted_s(self) -> float:
        return self.parts.planner.predicted_s

    def last_round(self) -> int | None:
        own = self.node.follower
        return None if self.node.view is None or own.is_behind else own.round

    def sent_for_rounds_bytes(self) -> int:
        return self.host.counts.sent[byte_counts.ROUNDS]

    def new_loss(self) -> float | None:
        return self.parts.trainers.new_loss()

    def round_bytes(self, peers: int) -> int:
        """Return how many bytes this peer sends in a round with so many peers.

        That is as the run's terms have it, or what the rounds so far have sent in the mean.
        """
        sent_bytes = self.host.counts.sent[byte_counts.ROUNDS]
        return round_bytes(self.executor.state, peers) or sent_bytes // max(1, self._rounds)

    # ------------------------------------------------------------ carrying out effects

    def _on_installed(self, view: View) -> None:
        self._was_in = True
        self._packing.enter(view)
        self.parts.event_log.installed(view)
        self.parts.admission.installed(view.peers, view.banned)
        self.executor.installed(view)
        for member in view.members:
            if member.peer != self.parts.home.peer_id:
                address = self.parts.reach.address_of(member.peer, member.address)
                self.executor.streams.know(member.peer, address)
                if member.peer in self.host.link_peers():
                    self.executor.streams.warm(member.peer)
        self.spawn(self.parts.addresses.save_view(view))

    async def _probe(self, peer: bytes, address: str) -> None:
        out = self.parts.admission.is_out(peer)  # its process may live, its membership does not
        answer = "refused" if out else await self.parts.reconnector.probe(peer, address)
        self.feed(ev.Probed(peer, answer))

    async def _renew(self) -> None:
        home, before = self.parts.home, self._inc
        while self._inc == before:
            try:
                self._inc = await asyncio.to_thread(home.next_incarnation, time.time_ns())
            except OSError as error:  # a full disk must not end the training
                self.note("disk", f"cannot store a new incarnation in {home.path}: {error}")
                await asyncio.sleep(RENEW_PAUSE_S)
        for peer in self.host.link_peers():
            self.host.drop(peer, "joining again as a new incarnation")
        self.feed(ev.Incarnated(self._inc))

    def _persist(self, effect: ev.Persist) -> None:
        assert self.parts.durability is not None, "a machine without a ledger has no records"
        self.parts.durability.persist(effect)

    async def _on_left(self) -> None:
        """End the daemon, and forget the addresses of a run that ended with this peer.

        Such a run may be founded again; any other is rejoined.
        """
        view = self.node.view
        if view is not None and len(view.members) == 1:
            await self.parts.addresses.save(())
        self.stop()

    def _on_note(self, note: ev.Note) -> None:
        of = {"peer": short(note.peer)} if note.peer else {}
        self.note(note.kind, note.text, **of | note.fields)
        if note.kind == "refused":
            self.stop(IncompatibleRunError(note.text, fix="join with the run's specification"))
        elif note.kind == "conflict":
            self.stop(IdentityInUseError(note.text, fix=COPIED_HOME_FIX))
        elif note.kind == "doubt" and self.parts.checkpointer is not None:
            self.parts.checkpointer.doubt()

    # ------------------------------------------------------------ tasks

    def dial_failed(self, error: ConnectError | IdentityInUseError) -> None:
        self.parts.event_log.failed(error.what)
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


async def unless_ended(work: Awaitable[T], end: asyncio.Future[Any]) -> T | None:
    """Return what ``work`` gives; if ``end`` is done first, cancel the work and return None."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
        return None if end.done() else task.result()
    finally:
        task.cancel()


def _names(kinds: Any) -> Iterator[str]:
    """Return the names on the wire of a union's message classes, and of those derived from them.

    Names stay as they are.
    """
    if isinstance(kinds, frozenset):
        yield from kinds
        return
    for kind in get_args(kinds) or (kinds,):
        if (name := wire_of(kind)) is not None:
            yield name
        for derived in kind.__subclasses__():
            yield from _names(derived)
