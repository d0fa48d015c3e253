"""What must hold in every run, checked while it happens (invariants of both design pages).

Numbers I1 to I7 are those of design/membership.md. The checker knows everything: which submission
is in which chunk, the true state after every chain, what every peer has promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import GATHER, INIT, STEP, Begin
from atoll.peer.membership.operations import unpack_objects
from atoll.peer.membership.view import View
from harness.bounds import held_items
from harness.decisions import Decisions
from harness.statements import Statements
from harness.values import Contribution, Entry, Mean, State, chunk_after, giver_of

if TYPE_CHECKING:
    from harness.host import Host
    from harness.world import World

__all__ = ["Checker"]

ITEMS_FIXED = 600
ITEMS_PER_PEER = 30  # per pair of peers: votes hold views, views hold members
ANCESTORS_CHECKED = 40  # rounds back in which a submission may not have been counted already


class Checker:
    """Told of everything that counts; raises AssertionError with the invariant's name."""

    def __init__(self) -> None:
        self.views: dict[tuple[bytes, int], View] = {}
        self.commits: dict[tuple[bytes, int], tuple[int, bytes]] = {}  # -> first view, chain
        self.truth: dict[bytes, tuple[bytes, ...]] = {}  # chain -> values of all chunks
        self.decisions = Decisions(self.views)
        self.submissions: dict[Contribution, float] = {}  # -> weight
        self.rollbacks: list[View] = []
        self._operations: set[bytes] = set()  # chains of committed rounds that change no state
        self.probation, self.least = 0, 1  # of the run's specification ...
        self.min_trainers = 1  # ... too, where the view has no number of its own
        self.asynchronous = False  # ... too: a round may be of fewer than have a trainer
        self._begun = {0, 1}  # rounds after which runs were founded or resumed
        self._founders: set[bytes] = set()
        self._work: dict[bytes, Counter[bytes]] = {}  # chain -> steps that each took part in
        self._all_work: Counter[bytes] = Counter()  # ... with those that were taken back
        self._history: dict[bytes, tuple[bytes, frozenset[Contribution]]] = {}
        self._reduced: dict[Begin, tuple[Contribution, ...]] = {}
        self._objects: dict[tuple[bytes, int, int, int], bytes] = {}  # what BEGIN carried
        self._said: dict[object, dict[int, ms.Ready]] = {}  # by whose memory it is (Host.memory)
        self._frozen: dict[object, tuple[bytes, int]] = {}
        self.statements = Statements(self.views, self._history, self._operations)

    @property
    def latest(self) -> View:
        return max(self.views.values(), key=lambda view: view.number)

    # ------------------------------------------------------------ views

    def installed(self, host: Host, view: View) -> None:
        known = self.views.get((view.lineage, view.number))
        if known is not None:
            assert known == view, f"invariant 1: two views {view.number}: {known} and {view}"
            return
        self.decisions.decided(host, view)
        self.views[view.lineage, view.number] = view
        self.statements.installed(view)
        self._begun |= {view.base_round} if view.number == 1 else set()
        if view.base_round in self._begun:  # nothing was trained yet, or since it was resumed
            self._founders |= {*view.peers, *(gone.peer for gone in view.absent)}
        if view.rollback:
            self.rollbacks.append(view)
        for (lineage, number), (decided_in, chain) in self.commits.items():
            if lineage == view.lineage and decided_in < view.number:
                self._survives(view, decided_in, number, chain)

    def _survives(self, view: View, decided_in: int, number: int, chain: bytes) -> None:
        if self._rolled_back(view.lineage, decided_in, (number, chain), view.number):
            return
        lost = view.base_round < number
        assert not lost, f"invariant 5: view {view.number} forgets committed round {number}"
        if view.base_round == number:
            assert view.base_chain == chain, f"invariant 5: view {view.number} rewrites {number}"

    def _rolled_back(
        self, lineage: bytes, decided_in: int, place: tuple[int, bytes], until: int
    ) -> bool:
        """Return whether a view up to this one took that round back.

        That is a flagged rollback, or one behind operations only, which nobody in it held
        (Statements).
        """
        return any(
            (view.rollback and view.lineage == lineage) or self._forgets_operations(view, *place)
            for view in self.views.values()
            if decided_in < view.number <= until and view.base_round < place[0]
        )

    def _forgets_operations(self, view: View, number: int, chain: bytes) -> bool:
        while number > view.base_round and chain in self._operations:
            number, chain = number - 1, self._history[chain][0]
        return (number, chain) == (view.base_round, view.base_chain)

    # ------------------------------------------------------------ rounds

    def contributes(self, host: Host, begin: Begin) -> None:
        """A peer takes part in an attempt: it must be one of S, with everyone's state."""
        assert host.peer in begin.participants, f"invariant 4: {host.name} is not in {begin}"
        if begin.kind != INIT:
            true = host.tainted or bool(host.flipped) or self.is_true(host.state)
            assert true, f"invariant 6: {host.name} takes part in {begin.round} with a wrong state"

    def committed(self, entry: Entry, lineage: bytes, name: str, view_number: int = 0) -> None:
        """``lineage``: of the history that this peer continues with it, in its view of a number."""
        begin, chain = entry.begin, entry.chain
        key = (lineage, begin.round)
        known = self.commits.get(key)
        if known is not None and self._rolled_back(
            lineage, known[0], (begin.round, known[1]), begin.view
        ):
            known = None
        if known is None:
            self.commits[key] = (begin.view, chain)
            self.decisions.committed.add((*key, chain))
            for (views_of, number), view in self.views.items():
                if views_of == lineage and number > begin.view:
                    self._survives(view, begin.view, begin.round, chain)
        elif known != (begin.view, chain):
            # Who was stopped may apply what a later view has taken back, of which it has yet to
            # hear.
            is_late = view_number < known[0] and (*key, chain) in self.decisions.committed
            assert is_late, f"invariant 2: two histories of round {begin.round} ({name})"
        if chain not in self._history:
            self._first_commit(entry)

    def _first_commit(self, entry: Entry) -> None:
        """I4 and the weights, chunk by chunk; and what the state must be from now on."""
        counted: set[Contribution] = set()
        begin = entry.begin
        for mean, origin in zip(entry.means, entry.origins, strict=True):
            names = tuple(part[0] for part in mean.parts)
            wrong = f"invariant 5: weights of round {begin.round} chunk {mean.chunk}"
            assert (names, mean.weights) == origin, f"{wrong}: {mean} is not of {origin}"
            counted.update(mean.parts)
            for part, weight in zip(mean.parts, mean.weights, strict=True):
                self._weighs(begin, part, weight, mean.weights)
        self._has_trainers(begin)
        self._counts(entry)
        counted |= self._given(begin)
        parts = frozenset() if begin.kind == INIT else frozenset(counted)
        chain = entry.before
        for _ in range(ANCESTORS_CHECKED):
            if chain not in self._history:
                break
            chain, earlier = self._history[chain]
            again = sorted(earlier & parts)
            assert not again, f"invariant 4: {again} counted again in round {begin.round}"
        self._history[entry.chain] = (entry.before, parts)
        if begin.operation is not None:
            self._operations.add(entry.chain)
        self.statements.applied(begin, entry.chain)
        before = list(self.truth.get(entry.before, ()))
        size = max(len(before), entry.first + len(entry.means))
        before += [b""] * (size - len(before))
        for offset, mean in enumerate(entry.means):
            before[entry.first + offset] = chunk_after(before[entry.first + offset], mean)
        self.truth[entry.chain] = tuple(before)

    def _has_trainers(self, begin: Begin) -> None:
        """So many as its view needs, none of whom its coordinator may have made up."""
        view = self.views.get((begin.lineage, begin.view))
        if begin.kind == INIT or view is None or self.asynchronous:
            return
        assert not {*begin.aside} - {*view.peers}, f"invariant 14: strangers in {begin}"
        here = len({*begin.participants, *begin.aside})
        needed = view.rules.min_trainers or self.min_trainers
        text = f"invariant 14: round {begin.round} has {here} trainers, not {needed}"
        assert here >= needed, text

    def _counts(self, entry: Entry) -> None:
        """Enough of those in a step count, and no newcomer that has not worked for it: by what was
        committed before, not by what views say."""
        work = self._work.get(entry.before, Counter())
        self._work[entry.chain] = work
        if entry.begin.kind != STEP:
            return
        for _, weights in entry.origins if self.probation else ():
            assert set(weights) <= {0.0, 1.0}, f"invariant 13: weights {weights}"
        for peers, weights in entry.origins:
            count = [peer for peer, weight in zip(peers, weights, strict=True) if weight]
            assert len(count) >= self.least, f"invariant 13: {len(count)} peers count"
            done = self._all_work if self.rollbacks else work
            new = {p for p in count if done[p] < self.probation} - self._founders
            assert not new, f"invariant 13: newcomers {new} count in round {entry.begin.round}"
        self._work[entry.chain] = work + Counter(entry.begin.participants)
        self._all_work.update(entry.begin.participants)

    def _given(self, begin: Begin) -> set[Contribution]:
        """Who has given what to an operation: to a GATHER as it says itself."""
        if begin.kind != GATHER:
            return set(self._reduced.get(begin, ()))
        # Whoever was restarted in between has the sizes only.
        blob = self._objects.get(_place(begin), begin.blob)
        objects = unpack_objects(blob, len(begin.participants))
        assert objects is not None, "invariant 4: objects of a few bytes did not fit"
        givers = [giver_of(data) for data in objects]
        right = [giver[0] for giver in givers] == list(begin.participants)
        assert right, f"invariant 4: objects of {givers} in {begin}"
        assert all(giver in self.submissions for giver in givers), f"nobody gave {givers}"
        return set(givers)

    def reduced(self, begin: Begin, means: Sequence[Mean]) -> None:
        """An operation's result: all of one origin, which is that of BEGIN."""
        for mean in means:
            names = tuple(part[0] for part in mean.parts)
            right = (names, mean.weights) == (begin.participants, begin.weights)
            assert right, f"invariant 4: {mean} in a result of {begin}"
            self._reduced[begin] = mean.parts

    def operated(self, host: Host, begin: Begin) -> None:
        """A trainer gets the result of the operation that it has called, and is in it."""
        assert host.peer in begin.participants, f"{host.name} gets the result of others: {begin}"
        mine = next(x for x in self._given(begin) if x[0] == host.peer)
        event = host.regions.get(mine[2])
        right = mine[1] == host.life and event is not None and event.operation == begin.operation
        assert right, f"{host.name} gets the result of {begin.operation} for {event}"

    def _weighs(
        self, begin: Begin, part: Contribution, weight: float, all_weights: Sequence[float]
    ) -> None:
        if begin.kind == INIT or (self.probation and begin.kind == STEP):
            return
        own = self.submissions[part]
        alike = set(all_weights) == {1.0}  # nobody counted anything
        fine = weight == own or (alike and own == 0.0)
        assert fine, f"invariant 5: {part[0][:4]!r} weighs {weight} in {begin.round}, not {own}"

    def state(self, name: str, state: State) -> None:
        same = self.is_true(state)
        assert same, f"invariant 3: {name} holds another state after round {state.round}"

    def is_true(self, state: State) -> bool:
        return self.truth.get(state.chain) == state.values

    def bounded(self, world: World) -> None:
        """No machine holds more than its peers and limits explain, whatever has happened."""
        limit = ITEMS_PER_PEER * (len(world.hosts) + 2) ** 2 + ITEMS_FIXED
        for host in world.living():
            items = held_items(host.node)
            assert items <= limit, f"invariant 9: {host.name} holds {items} items, not {limit}"

    # ------------------------------------------------------------ what a peer has said

    def watch(self, host: Host, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        """READY is not taken back, and not said any more after a promise."""
        self.decisions.watch(host, event, effects)
        self.statements.watch(host, event, effects)
        for effect in effects if host.disk is not None else ():
            if type(effect) is ev.Send and type(effect.message) in (ms.Promise, ms.Accepted):
                self._is_on_disk(host, effect.message)
        if type(event) is ev.Received and (said := self._said.get(host.memory)):
            for ready in [x for x in said.values() if _overtakes(event.message, x)]:
                del said[ready.round]
        for effect in effects:
            if type(effect) is ev.Send and type(effect.message) in _REMEMBERED:
                self._says(host, effect.message)

    def _says(self, host: Host, message: object) -> None:
        memory = host.memory
        if type(message) is ms.Ready:
            frozen = self._frozen.get(memory) == (message.lineage, message.view)
            assert not frozen, f"I5: {host.name} says READY after a promise"
            if not message.pending and not self._is_lazy(host, message):
                self._said.setdefault(memory, {})[message.round] = message
        elif type(message) is ms.Begin and message.kind == GATHER:
            self._objects[_place(message)] = message.blob
        elif type(message) is ms.Promise:
            self._frozen[memory] = (message.lineage, message.view)
            self._reports_ready(host, message)

    def _is_on_disk(self, host: Host, message: ms.Promise | ms.Accepted) -> None:
        """Ignore older views: nothing of them binds, and a compaction may have dropped it."""
        view, disk = host.node.view, host.disk
        if disk is None or view is None or not host.node._here.outbox.is_on:
            return
        if (message.lineage, message.view) == (view.lineage, view.number):
            text = f"invariant 16: {host.name} says what is not on its disk: {message}"
            assert disk.backs(message), text

    def _is_lazy(self, host: Host, ready: ms.Ready) -> bool:
        """Whether a power cut may forget it: a collective of a session changes no state."""
        held = host.node.follower.held.get(ready.round)
        return host.disk is not None and held is not None and not held.changes_state

    def _reports_ready(self, host: Host, promise: ms.Promise) -> None:
        report = promise.report
        reported = {(run.round, run.attempt) for run in report.runs}
        for said in self._said.get(host.memory, {}).values():
            if (said.lineage, said.view) == (promise.lineage, promise.view):
                known = max(report.round, report.known_round)
                held = known >= said.round or (said.round, said.attempt) in reported
                assert held, f"I5: {host.name} takes READY {said.round}.{said.attempt} back"


_REMEMBERED = (ms.Ready, Begin, ms.Promise)


def _place(begin: Begin) -> tuple[bytes, int, int, int]:
    return begin.lineage, begin.view, begin.round, begin.attempt


def _overtakes(news: object, said: ms.Ready) -> bool:
    """A newer attempt means that the older was given up; a later commit has a quorum of its own."""
    if isinstance(news, Begin):
        same = (news.lineage, news.view) == (said.lineage, said.view)
        return same and news.attempt > said.attempt and news.round == said.round
    if isinstance(news, ms.Notice):
        same = (news.lineage, news.view) == (said.lineage, said.view)
        return same and news.attempt > said.attempt and news.round == said.round
    if isinstance(news, ms.Commit | ms.CoordinatorBeat):
        return news.lineage == said.lineage and news.round > said.round
    return False
