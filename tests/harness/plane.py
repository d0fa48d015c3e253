"""The data plane of a simulated world: reductions chunk by chunk, and what becomes of results.

Every chunk has an owner among the participants, as in the butterfly: the owner needs everyone's
part, everyone needs the owner's mean. So deaths, pauses and cuts in the middle leave some chunks
final on some peers, as they do in reality. Values say who is in them (harness/values.py), so what
is counted twice or with a wrong weight is seen by the checker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import ReadyRecord
from atoll.peer.membership.kept_chunks import Kept, parse_kept
from atoll.peer.membership.messages import GATHER, INIT, REDUCE, Begin
from atoll.peer.rounds.entries import entry_root
from harness.copies import Copies
from harness.disks import Stored
from harness.values import Entry, Job, Mean, State

if TYPE_CHECKING:
    from harness.host import Host
    from harness.world import World

__all__ = ["DataPlane", "root_of"]

RECHECK_S = 0.1  # an attempt that cannot go on now is looked at again
PROGRESS_S = 0.2  # between reports of bytes moved
CHUNK_BYTES = 1 << 20


@dataclass(eq=False)
class Reduction:
    """One attempt, as all its participants see it."""

    begin: Begin
    started_s: float
    joined: dict[bytes, Host] = field(default_factory=dict)
    formed: dict[int, Mean] = field(default_factory=dict)  # on their owners
    told: set[tuple[bytes, bytes]] = field(default_factory=set)
    serial: int = 0


class DataPlane:
    def __init__(self, world: World) -> None:
        self._world = world
        self._running: dict[Begin, Reduction] = {}
        self.owned = 0  # attempts whose parts a witness owned
        self._kept: dict[Begin, tuple[Kept, ...]] = {}
        self.copies = Copies(world, self)

    def span(self, begin: Begin) -> tuple[int, int]:
        """The chunks of the vector that this round is about."""
        world = self._world
        fragment, fragments = begin.fragment, world.fragments
        if begin.kind == INIT or fragments == 1:
            return 0, world.chunks
        return fragment * world.chunks // fragments, (fragment + 1) * world.chunks // fragments

    def size(self, begin: Begin) -> int:
        first, end = self.span(begin)
        return end - first

    # ------------------------------------------------------------ an attempt

    def reduce(self, host: Host, effect: ev.Reduce) -> None:
        begin, world = effect.begin, self._world
        helps = host.peer in begin.helpers  # a witness that owns parts and has none
        gone = begin.kind != INIT and not (
            helps or host.region(begin.fragment)
        )  # its trainer ended before BEGIN came
        if host.name == world.unusable or gone:
            event = ev.ReduceFailed(begin.round, begin.attempt, (), "cannot be read")
            world.after(world.chunk_s, lambda: world.deliver(host, event))
            return
        if not helps:
            world.checker.contributes(host, begin)
        host.reducing = begin
        before = host.jobs.get(begin.round)
        number = 0 if begin.kind == INIT or helps else host.region(begin.fragment)
        job = Job(begin, (host.peer, host.life, number))
        host.jobs[begin.round] = job
        if not helps:
            self._keep(host, job, before)
        running = self._running.get(begin)
        if running is None:
            running = self._running[begin] = Reduction(begin, world.now_s)
            self.owned += bool(begin.helpers)
        running.joined[host.peer] = host
        complete = len(running.joined) == len(begin.exchange)
        self._schedule(running, world.chunk_s if complete else RECHECK_S)
        self.finish(host, job)

    def _keep(self, host: Host, job: Job, before: Job | None) -> None:
        """Chunks that BEGIN keeps: what we have of them stays, the others are fetched."""
        for kept in self.kept(host, job.begin):
            mine = before.finals.get(kept.chunk) if before else None
            if mine is not None and mine.digest == kept.digest:
                job.finals[kept.chunk] = mine
            else:
                assert host.node.view is not None
                peers = host.node.view.peers
                self.copies.fetch_kept(host, job, kept, [peers[i] for i in kept.holders])

    def kept(self, host: Host, begin: Begin) -> Sequence[Kept]:
        """Read while the view that BEGIN speaks of is in force; it is asked for later too."""
        if not begin.kept:
            return ()
        known = self._kept.get(begin)
        if known is None:
            view = host.node.view
            assert view is not None
            assert view.number == begin.view
            known = self._kept[begin] = parse_kept(
                begin.kept, len(view.members), len(begin.origins)
            )
        return known

    def _schedule(self, running: Reduction, delay_s: float) -> None:
        running.serial += 1
        serial = running.serial

        def step() -> None:
            if serial == running.serial:
                self._step(running)

        self._world.after(delay_s, step)

    def takes_part(self, host: Host | None, begin: Begin) -> bool:
        if host is None or not host.alive or self._world.hosts[host.peer] is not host:
            return False
        job = host.jobs.get(begin.round)
        return job is not None and job.active and (job.begin is begin or job.begin == begin)

    def _step(self, running: Reduction) -> None:
        world, begin = self._world, running.begin
        group = {p: h for p, h in running.joined.items() if self.takes_part(h, begin)}
        if not group:
            del self._running[begin]
            return
        moved = self._form(running, group) | self._spread(running, group)
        going = [h for h in group.values() if self.takes_part(h, begin)]
        if any(not host.jobs[begin.round].complete for host in going):
            if not moved:
                self._report_broken(running, group)
            slow = max(host.slow for host in group.values())
            self._schedule(running, world.chunk_s * slow if moved else RECHECK_S)

    def _owners(self, begin: Begin) -> Sequence[bytes]:
        if begin.helpers:
            return begin.helpers
        shares = begin.layout.shares if begin.layout is not None else ()
        return tuple(compress(begin.participants, shares)) or begin.participants

    def _owner(self, begin: Begin, chunk: int) -> bytes:
        owners = self._owners(begin)
        return owners[chunk % len(owners)]

    def _form(self, running: Reduction, group: dict[bytes, Host]) -> bool:
        """Each owner forms the next mean of its shard, if everyone's part reaches it."""
        begin, world = running.begin, self._world
        if len(group) < len(begin.exchange) or any(h.paused for h in group.values()):
            return False
        busy: set[bytes] = set()
        for chunk in range(self.size(begin)):
            owner = group[self._owner(begin, chunk)]
            known = chunk in running.formed or chunk in owner.jobs[begin.round].finals
            if known or owner.peer in busy or self._is_kept(owner, begin, chunk):
                continue
            if all(h is owner or world.is_open(h, owner) for h in group.values()):
                parts = tuple(group[p].jobs[begin.round].contribution for p in begin.participants)
                assert all(parts)
                running.formed[chunk] = Mean(parts, begin.weights, chunk)  # type: ignore[arg-type]
                busy.add(owner.peer)
        return bool(busy)

    def _is_kept(self, host: Host, begin: Begin, chunk: int) -> bool:
        return any(kept.chunk == chunk for kept in self.kept(host, begin))

    def _spread(self, running: Reduction, group: dict[bytes, Host]) -> bool:
        begin, world = running.begin, self._world
        moved = False
        for chunk, mean in running.formed.items():
            owner = group.get(self._owner(begin, chunk))
            if owner is None or owner.paused:
                continue
            for host in group.values():
                job = host.jobs.get(begin.round)
                if job is None or host.paused or chunk in job.finals or job.begin != begin:
                    continue
                if host is owner or world.is_open(owner, host):
                    job.finals[chunk] = mean
                    moved = True
                    self.progress(host)
                    self.finish(host, job)
        return moved

    def progress(self, host: Host) -> None:
        world = self._world
        host.moved_bytes += CHUNK_BYTES
        if world.now_s - host.told_progress_s > PROGRESS_S:
            host.told_progress_s = world.now_s
            world.deliver(host, ev.Progressed(host.moved_bytes))

    def finish(self, host: Host, job: Job) -> None:
        """All chunks are here: say so once."""
        begin = job.begin
        if job.complete or len(job.finals) < self.size(begin):
            return
        job.complete = True
        if host.garbles:
            self._world.checker.statements.bad_memory = True
            first = job.finals[0]
            job.finals[0] = Mean(first.parts, first.weights, first.chunk, host.peer)
        job.root = root_of(begin, job.finals, self.kept(host, begin))
        self._world.deliver(host, ev.AttemptReduced(begin.round, begin.attempt, job.root))

    def _report_broken(self, running: Reduction, group: dict[bytes, Host]) -> None:
        """A dead process resets its streams at once; a silent edge is noticed later."""
        world, begin = self._world, running.begin
        late = world.now_s - running.started_s > world.broken_s
        owners = {*self._owners(begin)}
        for host in list(group.values()):
            missing = []
            for peer in begin.exchange:
                other = world.hosts[peer]
                exchange = owners.intersection((host.peer, peer))
                if other is host or (host.peer, peer) in running.told or not exchange:
                    continue
                both = world.is_open(host, other) and world.is_open(other, host)
                reset = not other.alive and not other.off and peer in running.joined
                if (reset and both) or (late and other.alive and not both):
                    running.told.add((host.peer, peer))
                    missing.append(peer)
            if missing and self.takes_part(host, begin):
                event = ev.ReduceFailed(begin.round, begin.attempt, tuple(missing), "broken")
                world.deliver(host, event)

    def fetch(self, host: Host, effect: ev.Fetch) -> None:
        self.copies.fetch(host, effect)

    def abort(self, host: Host, effect: ev.Abort) -> None:
        if host.reducing is not None and host.reducing.round == effect.round:
            host.reducing = None
        job = host.jobs.get(effect.round)
        if job is not None and job.begin.attempt == effect.attempt:
            job.active = False
            if host.peer in job.begin.helpers:
                del host.jobs[effect.round]

    def list_final(self, host: Host, effect: ev.ListFinal) -> None:
        """Which chunks of this attempt are final here?"""
        job = host.jobs.get(effect.round)
        digests, missing = b"", tuple[bytes, ...]()
        if job is not None and job.begin.attempt == effect.attempt:
            missing = self._missing(host, job)
            empty = bytes(32)
            size = self.size(job.begin)
            held = [job.finals.get(chunk) for chunk in range(size)]
            digests = b"".join(mean.digest if mean else empty for mean in held)
        event = ev.FinalChunks(effect.round, effect.attempt, digests, missing)
        self._world.after(0.001, lambda: self._world.deliver(host, event))

    def _missing(self, host: Host, job: Job) -> tuple[bytes, ...]:
        """For whom it waits: whose parts its own chunks lack, or else the owners of results."""
        begin, running = job.begin, self._running.get(job.begin)
        joined = running.joined if running is not None else {}
        formed = running.formed if running is not None else {}
        lacking = [chunk for chunk in range(self.size(begin)) if chunk not in job.finals]
        lacking = [chunk for chunk in lacking if not self._is_kept(host, begin, chunk)]
        owners = {self._owner(begin, chunk) for chunk in lacking if chunk not in formed}
        late = {
            peer
            for peer in begin.exchange
            if peer != host.peer
            and host.peer in owners
            and ((other := joined.get(peer)) is None or not self._world.is_open(other, host))
        }
        behind = {self._owner(begin, chunk) for chunk in lacking}
        return tuple(sorted((late or behind) - {host.peer}))

    # ------------------------------------------------------------ the state

    def apply(self, host: Host, effect: ev.Apply) -> None:
        world, begin = self._world, effect.begin
        means = self._result(host, begin)
        first, _ = self.span(begin)
        if begin.operation is not None:
            world.checker.reduced(begin, means)
            first, means = 0, ()  # the state stays what it is
        before = host.state
        in_order = begin.round == before.round + 1
        assert in_order, f"invariant 2: {host.name} applies {begin.round} after {before.round}"
        which = origin_of(len(means), self.kept(host, begin))
        entry = Entry(begin, first, means, before.chain, effect.chain, which)
        view = host.node.view  # a fork keeps what may have been committed, as a history of its own
        lineage = view.lineage if view is not None else entry.begin.lineage
        number = view.number if view is not None else entry.begin.view
        world.checker.committed(entry, lineage, host.name, number)
        world.committed = max(world.committed, begin.round)
        host.reducing = None
        for number in [n for n in host.jobs if n <= begin.round]:
            del host.jobs[number]
        state = before.after(entry, world.chunks)
        host.before = before
        self.enter(host, state.flipped(host.flipped) if host.flipped else state, False)
        host.log = [*host.log, entry][-world.log_rounds :]
        world.log("{} applied {}", host.name, begin.round)
        if host.disk is not None and begin.round % world.save_every == 0:
            world.saved(host)
        event = ev.Applied(begin.round, host.state.digest)
        world.after(host.digest_s, lambda: world.deliver(host, event))

    def stored(self, host: Host, record: ReadyRecord) -> Stored | None:
        """What a file of this round's R has."""
        begin = record.begin
        job = host.jobs.get(record.run.round)
        if begin is None or begin.operation is not None or job is None or not job.complete:
            return None
        if (job.begin.view, job.begin.attempt) != (begin.view, begin.attempt):
            return None
        means = tuple(job.finals[chunk] for chunk in range(self.size(begin)))
        which = origin_of(len(means), self.kept(host, begin))
        return Stored(begin, self.span(begin)[0], means, which, job.root)

    def _result(self, host: Host, begin: Begin) -> tuple[Mean, ...]:
        for_others = begin.kind == REDUCE and not host.node.follower.takes_part(begin)
        if begin.kind == GATHER or for_others:
            return ()
        job = host.jobs.get(begin.round)
        held = job is not None and job.begin == begin and job.complete
        assert held, f"invariant 2: {host.name} applies round {begin.round} without its result"
        assert job is not None
        return tuple(job.finals[chunk] for chunk in range(self.size(begin)))

    def enter(self, host: Host, state: State, doubted: bool) -> None:
        """``doubted``: memory errors may have come with what it was made of."""
        checker = self._world.checker
        host.tainted = (host.tainted or bool(host.flipped) or doubted) and not checker.is_true(
            state
        )
        checker.statements.bad_memory |= host.tainted
        host.state = state
        self._world.configure(host)
        host.digests[state.round] = state.digest
        if len(host.digests) > 64:
            del host.digests[min(host.digests)]
        if not host.tainted:
            checker.state(host.name, state)

    def take_back(self, host: Host, effect: ev.TakeBack) -> None:
        """The state stays what it is: only operations are taken back."""
        host.state = State(effect.round, effect.chain, host.state.values)
        host.before = None
        host.log = [entry for entry in host.log if entry.round <= effect.round]
        for number in [n for n in host.digests if n > effect.round]:
            del host.digests[number]
        self.enter(host, host.state, doubted=False)
        event = ev.Applied(effect.round, host.state.digest)
        self._world.after(0.001, lambda: self._world.deliver(host, event))

    def undo(self, host: Host, effect: ev.Undo) -> None:
        world = self._world
        before = host.before
        fits = before is not None and (before.round, before.chain) == (effect.round, effect.chain)
        if not fits or before is None:
            failed = ev.CatchUpFailed(f"the state after round {effect.round} is not here")
            world.after(0.001, lambda: world.deliver(host, failed))
            return
        self.copies.cancel(host)  # of a goal that is undone with it
        host.state, host.before = before, None
        host.log = [entry for entry in host.log if entry.round <= before.round]
        for number in [n for n in host.digests if n > before.round]:
            del host.digests[number]
        event = ev.CaughtUp(before.round, before.chain, before.digest)
        world.after(0.001, lambda: world.deliver(host, event))


def root_of(begin: Begin, finals: dict[int, Mean], kept: Sequence[Kept]) -> bytes:
    digests = [finals[chunk].digest for chunk in range(len(finals))]
    return entry_root(begin.origins, origin_of(len(finals), kept), digests, begin.blob)


def origin_of(size: int, kept: Sequence[Kept]) -> bytes:
    if not kept:
        return b""
    which = bytearray(size)
    for item in kept:
        which[item.chunk] = item.origin
    return bytes(which)
