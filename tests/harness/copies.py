"""Transfers of the simulated data plane: results, kept chunks, and the state from several donors.

A transfer takes its time, needs both ends alive and the way open when it arrives, and moves one
item at a time from each donor, so that a slow or dying donor delays only what it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import Kept
from atoll.peer.membership.messages import Begin
from harness.values import Entry, Job, Mean, State, chunk_after

if TYPE_CHECKING:
    from harness.host import Host
    from harness.plane import DataPlane
    from harness.world import World

__all__ = ["Copies", "Task"]

ENTRY_SHARE = 0.1  # of the whole state's time: a result has fewer bytes than state and momentum
GIVE_UP_S = 4.0  # without one item: nobody can be asked


@dataclass(eq=False)
class Task:
    """One peer's way to a state: what it has so far stays when its goal moves on."""

    round: int
    chain: bytes
    donors: tuple[bytes, ...]
    suspect: bool
    chunks: dict[int, tuple[int, bytes, bool]] = field(default_factory=dict)  # round, value, ours
    asked: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # donor -> what it sends
    progress_s: float = 0.0
    over: bool = False


class Copies:
    def __init__(self, world: World, plane: DataPlane) -> None:
        self._world = world
        self._plane = plane
        self.tasks: dict[Host, Task] = {}

    # ------------------------------------------------------------ results

    def fetch(self, host: Host, effect: ev.Fetch) -> None:
        """The whole result of an attempt from one holder."""
        world, begin = self._world, effect.begin
        holder = world.hosts[effect.holder]
        delay_s = world.chunk_s * self._plane.size(begin) * holder.slow
        job = host.jobs.get(begin.round)
        if job is None or job.begin != begin:  # not one of the participants
            job = host.jobs[begin.round] = Job(begin, None)

        def arrive() -> None:
            finals = self._result(holder, begin)
            open_ = holder.alive and not holder.paused and world.is_open(holder, host)
            if finals is not None and open_ and host.jobs.get(begin.round) is job:
                if job.complete:
                    return
                job.finals = dict(finals)
                self._plane.progress(host)
                self._plane.finish(host, job)

        world.after(delay_s, arrive)

    def _result(self, holder: Host, begin: Begin) -> dict[int, Mean] | None:
        job = holder.jobs.get(begin.round)
        if job is not None and job.begin == begin and job.complete:
            return job.finals
        for entry in holder.log:
            if entry.begin == begin:
                return dict(enumerate(entry.means))
        return None

    def fetch_kept(
        self, host: Host, job: Job, kept: Kept, holders: Sequence[bytes], turn: int = 0
    ) -> None:
        """One chunk that an earlier attempt has finished: from its holders in turn."""
        world = self._world
        holder = world.hosts[holders[turn % len(holders)]]

        def arrive() -> None:
            if not self._plane.takes_part(host, job.begin) or kept.chunk in job.finals:
                return
            theirs = holder.jobs.get(job.begin.round)
            mean = theirs.finals.get(kept.chunk) if theirs else None
            open_ = holder.alive and not holder.paused and world.is_open(holder, host)
            if mean is not None and mean.digest == kept.digest and open_:
                job.finals[kept.chunk] = mean
                self._plane.progress(host)
                self._plane.finish(host, job)
            elif turn < 2 * len(holders):
                self.fetch_kept(host, job, kept, holders, turn + 1)
            else:
                event = ev.ReduceFailed(
                    job.begin.round, job.begin.attempt, (holder.peer,), "kept chunk gone"
                )
                world.deliver(host, event)

        world.after(world.chunk_s * (1 + turn), arrive)

    # ------------------------------------------------------------ the state

    def sync(self, host: Host, effect: ev.StartSync) -> None:
        goal = effect.goal
        donors = tuple(m.peer for m in goal.donors if m.peer != host.peer)
        running = self.tasks.get(host)
        host.loads += running is None or running.over
        if running is not None and not running.over:  # what is under way goes on
            running.round, running.chain = goal.round, goal.chain
            running.donors, running.suspect = donors, goal.suspect
            self._step(host, running)
            return
        task = self.tasks[host] = Task(goal.round, goal.chain, donors, goal.suspect)
        task.progress_s = self._world.now_s
        self._step(host, task)
        self._watch(host, task)

    def cancel(self, host: Host) -> None:
        """What is under way ends without a word."""
        task = self.tasks.get(host)
        if task is not None:
            task.over = True

    def _watch(self, host: Host, task: Task) -> None:
        """Ask again what was lost on the way; give up when nobody sends anything."""
        world = self._world
        if task.over or not host.alive:
            return
        stuck = any(world.stuck(host, world.hosts[p]) for p in task.donors)
        if world.now_s - task.progress_s > GIVE_UP_S and not stuck:
            self._end(host, task, None, "no donor sends anything")
            return
        self._step(host, task)
        world.after(0.5, lambda: self._watch(host, task))

    def _step(self, host: Host, task: Task) -> None:
        state = host.state
        if task.over:
            return
        if (state.round, state.chain) == (task.round, task.chain) and not task.suspect:
            self._end(host, task, state, "")  # it is here already
            return
        for peer in task.donors:
            if task.over:
                return
            donor = self._world.hosts.get(peer)
            if donor is not None and peer not in task.asked and self._reaches(donor, host):
                self._ask(host, task, donor)

    def _reaches(self, donor: Host, host: Host) -> bool:
        world = self._world
        return donor.alive and world.is_open(donor, host) and world.is_open(host, donor)

    def _ask(self, host: Host, task: Task, donor: Host) -> None:
        item = self._next(host, task, donor)
        if item is None:
            return
        world = self._world
        task.asked[donor.peer] = item

        def arrive() -> None:
            if task.asked.get(donor.peer) == item:
                del task.asked[donor.peer]
            if task.over or not host.alive or not self._reaches(donor, host) or donor.paused:
                return
            if world.stuck(host, donor):
                return
            if self._take(host, task, donor, item):
                task.progress_s = world.now_s
                self._plane.progress(host)
            self._step(host, task)

        share = {"chunk": 1 / world.chunks, "entry": ENTRY_SHARE, "finish": ENTRY_SHARE}[item[0]]
        world.after(world.load_s * share * donor.slow, arrive)

    def _next(self, host: Host, task: Task, donor: Host) -> tuple[str, int] | None:
        """An entry that continues what we have, else a chunk; by whichever is shorter."""
        taken = task.asked.values()
        if not task.suspect and not task.chunks:
            following = self._entry(donor, host.state)
            if following is not None and not self._is_elsewhere(task, donor):
                return None if ("entry", 0) in taken else ("entry", 0)
        if donor.state.round < task.round:
            return None  # it is behind itself
        for chunk in range(self._world.chunks):
            have = task.chunks.get(chunk)
            if (have is None or not self._covers(donor, have[0])) and ("chunk", chunk) not in taken:
                return "chunk", chunk
        return None if ("finish", 0) in taken else ("finish", 0)

    def _entry(self, donor: Host, state: State) -> Entry | None:
        for entry in donor.log:
            if entry.round == state.round + 1 and entry.before == state.chain and state.round > 0:
                return entry
        return None

    def _is_elsewhere(self, task: Task, donor: Host) -> bool:
        """Return whether a donor's log leads to another state than the goal.

        What does not fold to the goal's chain is not taken (atoll/peer/state_sync).
        """
        return any(e.round == task.round and e.chain != task.chain for e in donor.log)

    def _covers(self, donor: Host, number: int) -> bool:
        """Whether the donor's log reaches from that round to its state."""
        if donor.state.round == number:
            return True
        return bool(donor.log) and donor.log[0].round <= number + 1 <= donor.log[-1].round

    def _take(self, host: Host, task: Task, donor: Host, item: tuple[str, int]) -> bool:
        if item[0] == "entry":
            return self._take_entry(host, task, donor)
        if donor.state.round < 1:
            return False
        if item[0] == "chunk":
            value = donor.state.values[item[1]]
            task.chunks[item[1]] = (donor.state.round, value, False)
            return True
        return self._finish(host, task, donor)

    def _take_entry(self, host: Host, task: Task, donor: Host) -> bool:
        entry = self._entry(donor, host.state)
        if entry is None or self._is_elsewhere(task, donor):
            return False
        state = host.state.after(entry, self._world.chunks)
        host.log = [*host.log, entry][-self._world.log_rounds :]
        host.before = host.state
        self._plane.enter(host, state, False)
        self._world.saved(host)
        if state.round >= task.round:
            self._end(host, task, state, "")
        else:
            self._world.deliver(host, ev.CaughtUp(state.round, state.chain, state.digest))
        return True

    def _finish(self, host: Host, task: Task, donor: Host) -> bool:
        """All chunks are here, perhaps of different rounds: replay the log on top of each, up to
        the goal. If one is beyond it, the goal has yet to move on."""
        if len(task.chunks) < self._world.chunks:
            return False
        versions = [version for version, _, _ in task.chunks.values()]
        covered = all(self._covers(donor, version) for version in versions)
        if donor.state.round < task.round or max(versions) > task.round or not covered:
            return False
        entries = [entry for entry in donor.log if entry.round <= task.round]
        last = entries[-1] if entries and entries[-1].round == task.round else None
        if last is None and donor.state.round > task.round:
            return False
        chain = last.chain if last is not None else donor.state.chain
        values = []
        for chunk in range(self._world.chunks):
            version, value, _ = task.chunks[chunk]
            for entry in entries:
                if version < entry.round and (
                    entry.first <= chunk < entry.first + len(entry.means)
                ):
                    value = chunk_after(value, entry.means[chunk - entry.first])
            values.append(value)
        state = State(task.round, chain, tuple(values))
        attested = state.digest == self._attested(task, task.round)
        if not attested or chain != task.chain:
            task.chunks.clear()
            self._end(host, task, None, "the donors' states differ")
            return True
        host.flipped = b""
        host.before = None
        host.log = list(entries[-self._world.log_rounds :])
        hosts = self._world.hosts
        self._plane.enter(host, state, any(hosts[peer].tainted for peer in task.donors))
        self._world.saved(host)
        self._end(host, task, state, "")
        return True

    def _attested(self, task: Task, number: int) -> bytes:
        """What most of the donors say the digest is."""
        said: list[bytes] = []
        for peer in task.donors:
            donor = self._world.hosts.get(peer)
            if donor is not None and donor.alive and number in donor.digests:
                said.append(donor.digests[number])
        return max(said, key=said.count, default=b"")

    def _end(self, host: Host, task: Task, state: State | None, why: str) -> None:
        """The machine hears of it later: it may be in the middle of asking."""
        task.over = True
        event: ev.Event = ev.CatchUpFailed(why)
        if state is not None:
            event = ev.CaughtUp(state.round, state.chain, state.digest)
        self._world.after(0.0, lambda: self._world.deliver(host, event))
