"""Audited attempts under a virtual clock: of honest participants, and of some that lie.

A seed gives the number of participants, who of them lies and how, the rule, the codec, the delays
and the pauses. The decisions and the arithmetic are those that ship (peer/verify/); what is
replaced is the network and the reduction, whose owners compute with the same functions. Attempts
follow each other, without those that were banned or named, until one passes. Where a seed says so,
an honest participant is started again in the middle of the first attempts, and its BEGIN is
repeated to the new process, which knows nothing of what the old one has signed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.audit.recompute import recomputed
from atoll.collectives.digests import strong_digest
from atoll.collectives.robust.gram import InnerProducts, packed_sum
from atoll.peer.membership.view import short
from atoll.peer.verify import attempt_audit as mc
from atoll.peer.verify.attempt_audit import AttemptAudit, AuditStep
from atoll.peer.verify.ban_list import WORD_S
from atoll.peer.verify.ban_record import Ban, Bans
from atoll.peer.verify.evidence import Evidence, verify_evidence
from atoll.peer.verify.promises import Promises
from atoll.peer.verify.statement import AuditMessage
from atoll.peer.verify.terms import AuditTerms
from simulation.audit_options import Options, expand, keys
from simulation.audit_peer import Peer, array
from simulation.audit_sums import gram_of, matrix_of
from simulation.liars import liar_of

__all__ = ["Options", "World", "expand", "run"]
ATTEMPTS_MAX = 40
RESTARTS_MAX = 3  # attempts with a restart: those after them are to pass
TICK_S = 0.25


class World:
    def __init__(self, options: Options, signers: list[Any]) -> None:
        self.options, self.rng = options, random.Random(options.seed ^ 0x5EED)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._last_s: dict[tuple[bytes, bytes], float] = {}
        self.numbers = np.random.default_rng(options.seed)
        made = [
            Peer(
                signer.me,
                signer,
                liar_of(options.liars.get(i, ""), self.rng),
                Promises(signer.me, 1),
                bans=Bans(signer.me),
            )
            for i, signer in enumerate(signers)
        ]
        self.peers = {peer.name: peer for peer in sorted(made, key=lambda p: p.name)}
        self.newcomers = {signers[i].me for i in options.newcomers}
        honest = [p.name for p in self.peers.values() if p.liar.honest]
        self.deaf = set(honest[:2]) if options.deaf_pair else set[bytes]()
        self.lives = dict.fromkeys(self.peers, 1)
        self.restarted: set[bytes] = set()  # in the attempt at hand
        self.attempt = self.count = self.attempts = 0
        self.round = 6
        self.trace: list[str] = []

    def kinds_of_bans(self) -> set[str]:
        """What the honest ones have banned others for."""
        return {each.kind for peer in self.honest for each in peer.banned.values()}

    @property
    def honest(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.liar.honest]

    # ------------------------------------------------------------ attempts

    def play(self) -> int:
        """A round of those who are not banned: attempts until one passes; the number of them."""
        banned = {b for p in self.honest for b in p.banned}
        participants = tuple(name for name in self.peers if name not in banned)
        self.round += 1
        for attempt in range(1, ATTEMPTS_MAX + 1):
            self.attempt = attempt
            self._begin(self._terms(participants, attempt))
            if self.options.restarts and attempt <= RESTARTS_MAX:
                self._restart_one(participants)
            self._run()
            self._check_attempt(participants)
            outcomes = {p.outcome for p in self.honest if p.name in participants}
            if outcomes <= {"passed"}:
                return attempt
            participants = self._next(participants)
            assert participants, "nobody is left"
        raise AssertionError(f"{ATTEMPTS_MAX} attempts, and none has passed")

    def _terms(self, participants: tuple[bytes, ...], attempt: int) -> AuditTerms:
        o = self.options
        size, counted = 256 * o.blocks, tuple(p not in self.newcomers for p in participants)
        return AuditTerms(
            b"L" * 32, 1, self.round, self.round * ATTEMPTS_MAX + attempt, 0, participants, counted,
            tuple(map(int, counted)), o.rule, o.codec, size * o.chunks - 100, size,
            lives=tuple(self.lives[peer] for peer in participants),
        )  # fmt: skip

    def _begin(self, terms: AuditTerms) -> None:
        self.count, self.restarted = len(terms.participants), set()
        base = self.numbers.standard_normal(terms.elements)
        for peer in self.peers.values():
            self.peers[peer.name] = self._process(peer, peer.promises)
        for name in terms.participants:
            self._take_part(self.peers[name], terms, base)
        for _ in range(self.options.pauses):
            peer = self.rng.choice(list(self.peers.values()))
            peer.paused_until_s = self.now_s + self.rng.uniform(0, 6)
        for peer in self.peers.values():
            if peer.audit is not None:
                self._later(0, lambda p=peer: self._pump(p))
                self._later(TICK_S, lambda p=peer: self._tick(p))

    def _process(self, before: Peer, promises: Promises) -> Peer:
        """A participant without an attempt; a new process has no promises of an earlier one."""
        kept = {"bans": before.bans, "attempts": before.attempts}
        return Peer(before.name, before.signer, before.liar, promises, **kept)

    def _take_part(self, peer: Peer, terms: AuditTerms, base: NDArray[np.float64]) -> None:
        """Begin an attempt, if the peer may promise anything in it."""
        work, index = terms.work, terms.participants.index(peer.name)
        values = (base + 0.3 * self.numbers.standard_normal(terms.elements)).astype(np.float32)
        if not peer.promises.may_promise(terms):
            peer.outcome = "failed"
            return
        own = []
        for chunk in range(work.grid.count if terms.counted[index] else 0):
            lo, hi = work.grid.bounds(chunk)
            out = np.empty(work.part_codec.encoded_bytes(hi - lo), np.uint8)
            work.part_codec.encode(values[lo:hi], out)
            own.append(out)
        secret = self.rng.randbytes(32)
        peer.audit = AttemptAudit(terms, peer.name, peer.signer, own, secret, self.now_s)
        peer.got = {(index, chunk): own[chunk].tobytes() for chunk in range(len(own))}
        peer.attempts.append(terms)
        peer.liar.begin(terms, index, self)

    def _restart_one(self, participants: tuple[bytes, ...]) -> None:
        """Some time in the attempt; the machine that would end it is late or lies."""
        honest = [peer.name for peer in self.honest if peer.name in participants]
        name = self.rng.choice(honest)
        self._later(self.rng.uniform(0.0, 12.0) * self.options.delay_s, lambda: self._restart(name))

    def _restart(self, name: bytes) -> None:
        before = self.peers[name]
        if before.audit is None or before.outcome:
            return
        terms = before.audit.terms
        self.lives[name] += 1
        self.restarted.add(name)
        peer = self._process(before, Promises(name, self.lives[name]))
        self.peers[name] = peer
        for other in self.peers.values():
            if other.audit is not None and name in other.audit.terms.participants:
                self._later(self.options.delay_s, partial(other.audit.link_lost, name))
        self._take_part(peer, terms, self.numbers.standard_normal(terms.elements))
        if peer.audit is not None:
            self._pump(peer)
            self._later(TICK_S, lambda: self._tick(peer))

    def _next(self, participants: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Without who is banned, and without who was named by most (the coordinator's part), unless
        a restart has ended the attempt."""
        banned = {b for p in self.honest for b in p.banned}
        left = [p for p in participants if p not in banned]
        named: dict[bytes, int] = {}
        for peer in self.honest:
            for other in peer.failed if peer.name in participants else ():
                named[other] = named.get(other, 0) + 1
        if len(left) == len(participants) and named and not self.restarted:
            worst = max(named, key=lambda name: (named[name], name))
            left.remove(worst)
        return tuple(left)

    # ------------------------------------------------------------ the network

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def _run(self) -> None:
        attempt = self.attempt
        end_s = self.now_s + 400
        while self._queue:
            at_s, _, act = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            assert self.now_s < end_s, "an attempt that does not end"
            act()
        assert attempt == self.attempt

    def send(self, source: bytes, dest: bytes, message: object, *, bulk: bool = False) -> None:
        """In order between each two."""
        if {source, dest} == self.deaf and not bulk and self.count > 2:
            return
        pair = (source, dest)
        at_s = self.now_s + self.rng.uniform(0.5, 1.5) * self.options.delay_s
        at_s += self.peers[dest].liar.reads_after_s
        at_s = self._last_s[pair] = max(at_s, self._last_s.get(pair, 0.0))
        self._later(at_s - self.now_s, lambda: self._deliver(source, dest, message))

    def _deliver(self, source: bytes, dest: bytes, message: object) -> None:
        peer = self.peers[dest]
        if self.now_s < peer.paused_until_s:
            self._later(
                peer.paused_until_s - self.now_s, lambda: self._deliver(source, dest, message)
            )
            return
        if isinstance(message, Evidence):
            self._learn(peer, message, source)
        if peer.audit is None or source in peer.bans:
            return
        audit = peer.audit
        if isinstance(message, AuditMessage):
            audit.hear(message, source, self.now_s)
        elif isinstance(message, tuple):
            self._bulk(peer, message)
        self._pump(peer)

    def _tick(self, peer: Peer) -> None:
        if self.peers[peer.name] is not peer or peer.audit is None or peer.outcome:
            return
        if self.now_s >= peer.paused_until_s:
            peer.audit.tick(self.now_s)
            self._pump(peer)
            peer.give_up(self.now_s)
        self._later(TICK_S, lambda: self._tick(peer))

    # ------------------------------------------------------------ effects

    def _pump(self, peer: Peer) -> None:
        audit = peer.audit
        assert audit is not None
        while effects := audit.take():
            for effect in effects:
                self._carry(peer, audit, effect)
        for dest, piece in peer.liar.pieces(audit.answers()):
            self.send(peer.name, dest, piece)
        for dest, ask in audit.asks(self.now_s):
            self.send(peer.name, dest, ask)

    def _carry(self, peer: Peer, audit: AttemptAudit, effect: mc.Effect) -> None:
        others = [p for p in audit.terms.participants if p != peer.name]
        if isinstance(effect, mc.TellParticipants):
            for dest in effect.peers or others:
                for delay_s, message in peer.liar.tell(effect.message, dest):
                    if delay_s:
                        self._later(delay_s, lambda d=dest, m=message: self.send(peer.name, d, m))
                    else:
                        self.send(peer.name, dest, message)
        elif isinstance(effect, mc.Convicted):
            self._learn(peer, effect.evidence, peer.name)
        elif isinstance(effect, mc.Passed):
            peer.outcome = "passed"
        elif isinstance(effect, mc.AuditFailed):
            peer.outcome, peer.failed = "failed", effect.peers
        elif effect.step is AuditStep.REDUCE:
            peer.gate_s = self.now_s
            self._send_parts(peer, audit)
            self._reduce(peer)
        elif effect.step is AuditStep.CHECK:
            audit.told(peer.liar.check(audit.numbers()), self.now_s)
        elif effect.step is AuditStep.VERDICT:
            accused, doubted = audit.verdict()
            audit.judged(peer.liar.accused(accused), doubted, self.now_s)
        else:
            audit.resolved(audit.settlement(), self.now_s)

    def _learn(self, peer: Peer, evidence: Evidence, source: bytes) -> None:
        """Whoever finds or hears of evidence checks it, and hands on what counts for it; of a pair,
        a little later, its word. ``source`` says that it counts there."""
        digest, bans = evidence.digest, peer.bans
        if source == peer.name or not bans.knows(digest):
            took_part = any(terms == evidence.terms for terms in peer.attempts)
            self._adopted(peer, bans.learn(evidence, first_hand=took_part))
            self._later(WORD_S, lambda: self._say(peer, evidence))
        if source != peer.name:
            self._adopted(peer, bans.told(digest, source, self.peers))

    def _say(self, peer: Peer, evidence: Evidence) -> None:
        if peer.bans.say(evidence.digest):
            self._hand_on(peer, evidence)
            self._adopted(peer, peer.bans.told(evidence.digest, peer.name, self.peers))

    def _adopted(self, peer: Peer, found: list[Ban]) -> None:
        for ban in found:
            text = f"{ban.finding.kind} {ban.finding.text}"
            self.trace.append(f"{self.now_s:.2f} {short(peer.name)}: {text}")
            if (audit := self.peers[peer.name].audit) is not None:
                audit.banned((ban.peer,), self.now_s)
        if found:
            self._hand_on(peer, found[0].evidence)

    def _hand_on(self, peer: Peer, evidence: Evidence) -> None:
        for dest in self.peers if peer.liar.honest else ():
            if dest != peer.name:
                self.send(peer.name, dest, evidence, bulk=True)

    # ------------------------------------------------------------ the reduction

    def _send_parts(self, peer: Peer, audit: AttemptAudit) -> None:
        work = audit.terms.work
        for chunk, owner in enumerate(work.plan.owners if audit._own else ()):
            data = audit._own[chunk].tobytes()
            if owner != audit.index:
                dest = audit.terms.participants[owner]
                part = ("part", audit.terms.attempt, audit.index, chunk)
                self.send(peer.name, dest, (*part, peer.liar.part(chunk, data)), bulk=True)

    def _bulk(self, peer: Peer, message: tuple[Any, ...]) -> None:
        kind, attempt, index, chunk, data = message
        assert peer.audit is not None
        if attempt != peer.audit.terms.attempt or peer.outcome:
            return
        if kind == "part":
            peer.got[index, chunk] = data
        elif kind == "gram":
            peer.grams[index] = data
        else:
            peer.results[chunk] = data
        self._reduce(peer)

    def _reduce(self, peer: Peer) -> None:
        audit = peer.audit
        assert audit is not None
        work, terms = audit.terms.work, audit.terms
        mine = work.shards.get(audit.index, [])
        needed = [(s, c) for c in mine for s in work.counted]
        if peer.gate_s is None or any(place not in peer.got for place in needed):
            return
        for sender, chunk in needed:
            if sender != audit.index:
                audit.keep(sender, chunk, array(peer.got[sender, chunk]))
        if audit.step is not AuditStep.REDUCE:
            return
        if liars := audit.unlike_promised():
            peer_name = terms.participants[liars[0]]
            audit.mismatch(peer_name, "its part is not what it has promised", self.now_s)
            return
        grams = work.rule is not None and work.rule.needs_gram
        if mine and grams and audit.index not in peer.grams:
            peer.own_grams = peer.liar.gram(gram_of(work, peer.got, mine))
            peer.grams[audit.index] = packed_sum(peer.own_grams, len(work.counted))
            for dest in terms.participants:
                if dest != peer.name:
                    told = ("gram", terms.attempt, audit.index, 0, peer.grams[audit.index])
                    self.send(peer.name, dest, told, bulk=True)
        if grams and len(peer.grams) < len(work.shards):
            return
        if not peer.made:
            peer.made = True
            matrix = matrix_of(work, peer.grams)
            peer.matrix = matrix.astype("<f4").tobytes() if grams and matrix is not None else b""
            for chunk in mine:
                parts = {s: peer.got[s, chunk] for s in work.counted}
                size = work.grid.size(chunk)
                data = recomputed(
                    work.plan, chunk, parts, work.part_codec, work.codec, size, matrix
                )
                for dest in terms.participants:
                    sent = peer.liar.result(chunk, data, dest)
                    if dest == peer.name:
                        peer.results[chunk] = sent
                    else:
                        told = ("result", terms.attempt, audit.index, chunk, sent)
                        self.send(peer.name, dest, told, bulk=True)
        if len(peer.results) == work.grid.count:
            results = [array(peer.results[c]) for c in range(work.grid.count)]
            digests = [strong_digest(peer.results[c]) for c in range(work.grid.count)]
            products = InnerProducts(peer.grams, peer.own_grams, peer.matrix)
            audit.reduced(results, digests, products, self.now_s)

    # ------------------------------------------------------------ checks

    def _check_attempt(self, participants: tuple[bytes, ...]) -> None:
        honest = [p for p in self.honest if p.name in participants]
        outcomes = {short(p.name): p.outcome for p in honest}
        assert all(outcomes.values()), f"somebody is still waiting: {outcomes}"
        paired = 0
        for banned, evidence in {b: e for p in self.honest for b, e in p.banned.items()}.items():
            verify_evidence(evidence)
            if self.peers[banned].liar.honest:
                assert evidence.kind == "pair", f"{short(banned)} is honest: {evidence.kind}"
                paired += 1
        assert paired <= len(self.options.liars), "more honest ones than liars have gone in pairs"
        cheats = [p for p in self.peers.values() if p.name in participants and p.liar.must_fall]
        passed = [p for p in honest if p.outcome == "passed"]
        if passed:
            roots = {tuple(p.results[c] for c in sorted(p.results)) for p in passed}
            assert len(roots) == 1, "two different results have passed"
            assert not cheats, f"it has passed: {[cheat.liar.kind for cheat in cheats]}"
        liars = [p for p in self.peers.values() if p.name in participants and not p.liar.honest]
        gone = {b for p in self.honest for b in p.banned}
        for cheat in cheats if len(liars) == 1 and not self.restarted else ():
            kind = cheat.liar.kind
            assert cheat.name in gone, f"{kind} was not banned in the attempt in which it was done"
        if not passed:
            named = {short(other) for p in honest for other in p.failed}
            hit = any(liar.name in gone or short(liar.name) in named for liar in liars)
            hit = hit or bool(self.restarted)
            assert hit, f"an attempt has failed, and no liar was banned or named: {named}"


def run(seed: int) -> World:
    """AssertionError, with the seed and what it stands for, if anything is wrong."""
    options = expand(seed)
    world = World(options, keys(options))
    try:
        world.attempts = world.play()
    except Exception as error:
        lines = "\n".join(world.trace[-40:])
        what = f"{type(error).__name__}: {error}"
        raise AssertionError(f"seed {seed}: {what}\n{options}\n{lines}") from error
    return world
