"""A simulated world for peer/state_sync/machine.py: donors with links, under a virtual clock.

The state is small bytes with the real hashes: chunks of 64 bytes, entries of 8 bytes per chunk, so
that every proof, chain and digest is the one that ships. Bandwidths are in bytes per second.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.collectives.digests import strong_digest
from atoll.collectives.merkle import MerkleTree
from atoll.optim.manifest import chunk_range
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import Member, genesis_chain
from atoll.peer.rounds.entries import STEP, EntryHead, EntryOrigin, entry_chain, entry_root
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.machine import SyncMachine
from atoll.peer.state_sync.verification import entry_leaf, open_parts, part_head

CHUNK_BYTES, ENTRY_BYTES = 64, 8
ORIGIN = EntryOrigin((b"o" * 32,), (1.0,))


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def step(chunk: bytes, entry: bytes) -> bytes:
    return hashlib.sha512(chunk + entry).digest()


class History:
    """The truth: states, entries and digests of rounds 1, 2, ..."""

    def __init__(self, chunks: int, fragments: int = 1, salt: bytes = b"") -> None:
        self.blob, self.fragments, self.salt = b"blob of the run", fragments, salt
        self.states = [
            [],
            [hashlib.sha512(bytes([i % 256, i // 256])).digest() for i in range(chunks)],
        ]
        self.entries: list[dict[int, bytes]] = [{}, {}]
        root = sha(b"init")
        init = EntryHead(1, STEP, 0, (ORIGIN,), b"", root, b"")
        chain = entry_chain(genesis_chain(b"L" * 32), init)
        self.heads = [init, EntryHead(1, STEP, 0, (ORIGIN,), b"", root, chain)]
        self.trees = [MerkleTree([b"\0" * 32]), self._tree(1)]

    @property
    def last(self) -> int:
        return len(self.states) - 1

    def range_of(self, fragment: int) -> tuple[int, int]:
        return chunk_range(fragment, self.fragments, len(self.states[1]))

    def commit(self) -> None:
        number = self.last + 1
        first, end = self.range_of(number % self.fragments)
        entry = {c: sha(self.salt, b"%d %d" % (number, c))[:ENTRY_BYTES] for c in range(first, end)}
        state = [
            step(old, entry[c]) if c in entry else old for c, old in enumerate(self.states[-1])
        ]
        root = entry_root((ORIGIN,), b"", [strong_digest(entry[c]) for c in range(first, end)])
        head = EntryHead(number, STEP, number % self.fragments, (ORIGIN,), b"", root, b"")
        chain = entry_chain(self.heads[-1].chain, head)
        self.heads.append(EntryHead(number, STEP, head.fragment, (ORIGIN,), b"", root, chain))
        self.states.append(state)
        self.entries.append(entry)
        self.trees.append(self._tree(number))

    def fork_at(self, number: int, salt: bytes) -> History:
        """The same up to this round; what comes then differs."""
        other = History(len(self.states[1]), self.fragments, salt)
        other.states, other.entries = self.states[: number + 1], self.entries[: number + 1]
        other.heads, other.trees = self.heads[: number + 1], self.trees[: number + 1]
        return other

    def digest(self, number: int) -> bytes:
        return sha(sha(self.blob), self.trees[number].root)

    def chain(self, number: int) -> bytes:
        return self.heads[number].chain

    def _tree(self, number: int) -> MerkleTree:
        return MerkleTree([strong_digest(chunk) for chunk in self.states[number]])

    def entry_proof(self, number: int, chunk: int) -> bytes:
        head = self.heads[number]
        first, end = self.range_of(head.fragment)
        entry = self.entries[number]
        leaves = [entry_leaf(head, c - first, strong_digest(entry[c])) for c in range(first, end)]
        return MerkleTree(leaves).proof(chunk - first)


class Store:
    """``ev.SyncStore`` in a dictionary, on an own state that may be wrong."""

    def __init__(self, chunks: int, fragments: int, own: list[bytes]) -> None:
        self.is_open = True
        self.chunks, self.fragments, self.own = chunks, fragments, own
        self.data: dict[int, bytes] = {}
        self.version: dict[int, int] = {}
        self.noted: dict[int, bytes] = {}  # hashes that are believed to be those of own chunks

    def state_bytes(self, chunk: int) -> int:
        return CHUNK_BYTES

    def entry_bytes(self, head: EntryHead, chunk: int) -> int:
        return ENTRY_BYTES

    def place(self, head: EntryHead, chunk: int) -> tuple[int, int] | None:
        first, end = chunk_range(head.fragment, self.fragments, self.chunks)
        return (chunk - first, end - first) if first <= chunk < end else None

    def leaf(self, chunk: int) -> bytes:
        here = self.data.get(chunk) or (self.own[chunk] if self.own else b"")
        return strong_digest(here) if here else b""

    def hint(self, chunk: int) -> bytes:
        return self.noted.get(chunk) or self.leaf(chunk)

    def keep(self, chunk: int, number: int) -> None:
        self.data.setdefault(chunk, self.own[chunk] if self.own else b"")
        self.version[chunk] = number

    def put(self, chunk: int, number: int, data: memoryview, leaf: bytes, digest: bytes) -> None:
        self.noted.pop(chunk, None)
        self.data[chunk], self.version[chunk] = bytes(data), number

    def replay(self, chunk: int, head: EntryHead, data: memoryview) -> None:
        assert self.version[chunk] < head.round
        self.data[chunk], self.version[chunk] = step(self.data[chunk], bytes(data)), head.round

    def digest(self, blob: bytes) -> bytes:
        leaves = [strong_digest(self.data[c]) for c in range(self.chunks)]
        return sha(sha(blob), MerkleTree(leaves).root)


@dataclass(eq=False)
class Donor:
    member: Member
    history: History
    rate: float
    round: int
    log: int = 100  # entries that it remembers
    lie: str = ""  # what it gets wrong
    alive: bool = True
    delay_s: float = 0.01
    queue: deque[msg.FetchPiece] = field(default_factory=deque)
    sending: bool = False
    sent: int = 0

    def answer(self, message: object) -> object | None:
        history, number = self.history, self.round
        match message:
            case msg.AskState() if self.lie == "silence":
                return None
            case msg.AskHeads() if self.lie == "no heads":
                return msg.HeadsAre(message.first, b"", ())
            case msg.AskHeads() if self.lie == "no answer about heads":
                return None
            case msg.AskState() if self.lie == "empty":
                return msg.StateIs(-1)
            case msg.AskState():
                first = max(1, min(message.first, number))
                digests = [history.digest(n) for n in range(first, number + 1)]
                root = history.trees[number].root
                if self.lie == "digest":
                    digests, root = [sha(b"lie", d) for d in digests], sha(b"lie", root)
                log_first = max(2, number + 1 - self.log)
                return msg.StateIs(
                    number, root, sha(history.blob), log_first, first, b"".join(digests)
                )
            case msg.AskBlob():
                return msg.BlobIs(b"another blob" if self.lie == "blob" else history.blob)
            case msg.AskHeads():
                first = message.first
                if first < max(2, number + 1 - self.log):
                    return msg.HeadsAre(first, b"", ())
                heads = history.heads[first : min(message.last, number, first + 6) + 1]
                if self.lie == "heads" and heads:
                    head = heads[-1]
                    heads[-1] = EntryHead(
                        head.round, STEP, head.fragment, (ORIGIN,), b"", sha(b"lie"), head.chain
                    )
                return msg.HeadsAre(first, history.chain(first - 1), tuple(heads))
        return None

    def piece(self, message: msg.FetchPiece) -> tuple[int, bytes] | str:
        """Number and frame, or why not."""
        history, chunk, number = self.history, message.chunk, message.entry
        if number:
            if not max(2, self.round + 1 - self.log) <= number <= self.round:
                return "not in the log"
            run = range(number, min(message.last, self.round) + 1)
            having = [n for n in run if chunk in history.entries[n]]
            parts = [(history.entries[n][chunk], history.entry_proof(n, chunk)) for n in having]
            return number, b"".join(self._part(*part) for part in parts)
        else:
            number, tree = self.round, history.trees[self.round]
            data, proof = history.states[number][chunk], tree.proof(chunk)
            if message.have == tree.leaves[chunk]:
                return number, part_head(proof, 0, same=True)
        if self.lie == "same":
            return number, part_head(proof, 0, same=True)
        return number, self._part(data, proof)

    def _part(self, data: bytes, proof: bytes) -> bytes:
        if self.lie == "bytes":
            data = bytes(len(data))
        if self.lie == "length":
            data += b"more"
        return part_head(proof, len(data), same=False) + data


class World:
    """Runs the machine against donors until it is done or has failed."""

    def __init__(self, donors: list[Donor], link: float, seed: int = 0) -> None:
        self.donors = {donor.member.peer: donor for donor in donors}
        self.link = link
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.machine = SyncMachine()
        self.done: list[ev.Synced] = []
        self.failed: list[str] = []
        self.said: list[str] = []
        self.received = self.refused = 0
        self.store: Store | None = None
        self.own: list[bytes] = []
        self.noted: dict[int, bytes] = {}  # see Store
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._link_free_s = 0.0
        self._linked: set[bytes] = set(self.donors)

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._serial), act))

    def feed(self, event: ev.Event) -> None:
        for effect in self.machine.handle(event, self.now_s):
            self._carry_out(effect)

    def run(self, until: Callable[[], object], limit_s: float = 1000.0) -> None:
        """Until the condition holds. AssertionError if it does not within ``limit_s``."""
        ticking = self.now_s
        while not until():
            assert self.now_s < limit_s, f"nothing after {limit_s} s: {self.machine.phase}"
            if self._events and self._events[0][0] <= ticking:
                self.now_s, _, act = heapq.heappop(self._events)
                act()
            else:
                self.now_s = ticking
                ticking += 0.25
                self.feed(ev.LinkedPeers(frozenset(self._linked)))

    def stands_at(self, history: History) -> bool:
        """The last goal that was reached is the end of this history."""
        number = history.last
        goal = ev.Synced(number, history.chain(number), history.digest(number))
        return bool(self.done) and self.done[-1] == goal

    # ------------------------------------------------------------ faults

    def kill(self, donor: Donor) -> None:
        donor.alive = donor.sending = False
        donor.queue.clear()
        self._linked.discard(donor.member.peer)
        self.feed(ev.LinkedPeers(frozenset(self._linked)))

    def revive(self, donor: Donor) -> None:
        donor.alive = True

    def cut_stream(self, donor: Donor) -> None:
        donor.queue.clear()
        self.feed(ev.StreamBroken(donor.member.peer))

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendToDonor():
                donor = self.donors[effect.peer]
                if donor.alive:
                    message = effect.message
                    self.at(self.now_s + donor.delay_s, lambda: self._tell(donor, message))
            case ev.DialDonor():
                donor = self.donors[effect.member.peer]
                if donor.alive:
                    self._linked.add(effect.member.peer)
            case ev.PrepareStore():
                chunks = next(iter(self.donors.values())).history
                own = [] if effect.blob else self.own
                self.store = Store(len(chunks.states[1]), chunks.fragments, own)
                self.store.noted = dict(self.noted)
                prepared = ev.StoreReady(self.store)
                self.at(self.now_s + 0.05, lambda: self.feed(prepared))
            case ev.InstallState():
                assert isinstance(effect.store, Store)
                found = effect.store.digest(b"blob of the run")
                if found == effect.digest:
                    self.own = [effect.store.data[c] for c in range(effect.store.chunks)]
                outcome: ev.Event = (
                    ev.StateInPlace()
                    if found == effect.digest
                    else ev.StateRejected("another digest", is_mismatch=True)
                )
                self.at(self.now_s + 0.05, lambda: self.feed(outcome))
            case ev.Synced():
                self.done.append(effect)
            case ev.SyncFailed():
                self.failed.append(effect.why)
            case ev.LogLine():
                self.said.append(effect.text)

    def _tell(self, donor: Donor, message: object) -> None:
        if not donor.alive:
            return
        if isinstance(message, msg.FetchPiece):
            if len(donor.queue) >= msg.ASKED_MAX:
                refused = ev.DonorMessage(
                    donor.member.peer, msg.NoPiece(message.ticket, "too many")
                )
                self.at(self.now_s + donor.delay_s, lambda: self.feed(refused))
                self.refused += 1
                return
            donor.queue.append(message)
            self._send_next(donor)
        elif isinstance(message, msg.DropPieces):
            waiting = [m for m in donor.queue if m.ticket not in message.tickets]
            donor.queue = deque(waiting)
        elif (answer := donor.answer(message)) is not None:
            heard = ev.DonorMessage(donor.member.peer, answer)
            self.at(self.now_s + donor.delay_s, lambda: self.feed(heard))

    def _send_next(self, donor: Donor) -> None:
        if donor.sending or not donor.queue:
            return
        if donor.lie == "stuck":
            return  # it takes requests, and never sends anything
        message = donor.queue.popleft()
        found = donor.piece(message)
        if isinstance(found, str):
            heard = ev.DonorMessage(donor.member.peer, msg.NoPiece(message.ticket, found))
            self.at(self.now_s + donor.delay_s, lambda: self.feed(heard))
            self._send_next(donor)
            return
        donor.sending = True
        number, frame = found

        def sent() -> None:
            if not donor.alive:
                return
            donor.sending = False
            donor.sent += len(frame)
            self._link_free_s = max(self._link_free_s, self.now_s) + len(frame) / self.link
            self.at(self._link_free_s + donor.delay_s, arrived)
            self._send_next(donor)

        def arrived() -> None:
            self.received += len(frame)
            parts = open_parts(memoryview(frame))
            self.feed(ev.PieceArrived(donor.member.peer, message.ticket, number, parts))

        self.at(self.now_s + len(frame) / donor.rate, sent)


def donors_of(history: History, rates: list[float], **values: object) -> list[Donor]:
    return [
        Donor(Member(bytes([i + 1]) * 32, 1, address=f"h{i}:1"), history, rate, history.last)
        for i, rate in enumerate(rates)
    ]


def goal_of(history: History, donors: list[Donor], number: int = 0, suspect: bool = False) -> Goal:
    number = number or history.last
    members = tuple(donor.member for donor in donors)
    return Goal(number, history.chain(number), members[0].peer, members, suspect)


def own_of(history: History, number: int) -> ev.OwnState:
    return ev.OwnState(number, history.chain(number), history.digest(number), sha(history.blob))
