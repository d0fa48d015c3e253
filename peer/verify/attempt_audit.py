"""Take one participant's part in one audited attempt: statements, numbers, verdict. Sans-I/O.

Theory (BTARD, Gorbunov et al. 2022, algorithms 1 to 3). Everybody *commits* to its encoded parts
and to a secret number before any part is sent, so that nobody can choose its part by those of
others. Owners *commit to their results* before any number is revealed, so that nobody can choose a
result by the draw; then all secrets are *revealed*, and together they are the draw. From it
everybody computes the same random projections, tells those of its own parts (*check*), and owners
compare what is told with the parts that they hold (*verdict*). Where a result or a number is in
doubt, the parts of that chunk are *opened* to all, and everybody computes what is right.

What an honest participant does not get from another is asked of all the others: statements prove
themselves, so that anybody may hand them on. So who said something to one honest participant has
said it to all, and who said two things is found out. What nobody has after ``SILENCE_S`` is
*withheld*: more than half of the participants who say so are evidence, once the draw has begun.
Before it, and where they are fewer, the attempt fails and names who was missing; nobody says so of
one unless it has had a link to it all the time, and to the very process that the terms name: one
that was started again has lost what it would have to say. A participant that dies, or was started
again, is the membership machine's affair: it ends the attempt long before.

The step says what is waited for; what comes early is kept. An attempt ends in PASSED, or in FAILED
with evidence or without.

Whoever has sockets and threads carries out the effects, in order, and calls ``numbers``,
``verdict`` and ``settlement`` where a ``Need`` says so, in a thread of its own if it takes long:
``AuditManager`` in a daemon, and the simulator without threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from atoll.collectives.codecs import U8
from atoll.collectives.digests import strong_digest
from atoll.collectives.merkle import merkle_root, opening, opens, shard_roots
from atoll.collectives.robust.gram import InnerProducts
from atoll.peer.membership.signing import Signer
from atoll.peer.membership.view import short
from atoll.peer.verify.checks import Numbers, ResultNumbers, doubted
from atoll.peer.verify.disclosure import HeldParts, PartDisclosure
from atoll.peer.verify.evidence import Evidence, Shown
from atoll.peer.verify.inbox import Inbox, accusations, settle
from atoll.peer.verify.statement import (
    ANY_TIME,
    IN_ORDER,
    WORD_BYTES_MAX,
    AskPart,
    AskStatement,
    AuditMessage,
    Check,
    Commitment,
    DisclosedPiece,
    Elimination,
    Resultant,
    Reveal,
    SignedStatement,
    StatementPhase,
    Verdict,
    Withholding,
    body_of,
    draw_of,
    shard_gram,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms


class AuditStep(Enum):
    COMMIT = "commit"  # until all have committed
    REDUCE = "reduce"  # until the result is here
    RESULT = "result"  # until all owners have committed to theirs
    REVEAL = "reveal"  # until all secrets are known
    CHECK = "check"  # until all have told their numbers
    VERDICT = "verdict"  # until all owners have compared them
    OPEN = "open"  # until what is in doubt is opened and judged
    PASSED = "passed"
    FAILED = "failed"


class Cause(Enum):
    ALL_SAID = "all have said it"
    REDUCED = "the result is here"
    CLEAN = "nothing is in doubt"
    DOUBT = "something is in doubt"
    BROKEN = "somebody is guilty, or missing"


TRANSITIONS: Final[Mapping[tuple[AuditStep, Cause], AuditStep]] = {
    (AuditStep.COMMIT, Cause.ALL_SAID): AuditStep.REDUCE,
    (AuditStep.REDUCE, Cause.REDUCED): AuditStep.RESULT,
    (AuditStep.RESULT, Cause.ALL_SAID): AuditStep.REVEAL,
    (AuditStep.REVEAL, Cause.ALL_SAID): AuditStep.CHECK,
    (AuditStep.CHECK, Cause.ALL_SAID): AuditStep.VERDICT,
    (AuditStep.VERDICT, Cause.CLEAN): AuditStep.PASSED,
    (AuditStep.VERDICT, Cause.DOUBT): AuditStep.OPEN,
    (AuditStep.OPEN, Cause.CLEAN): AuditStep.PASSED,
    (AuditStep.COMMIT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.REDUCE, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.RESULT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.REVEAL, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.CHECK, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.VERDICT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.OPEN, Cause.BROKEN): AuditStep.FAILED,
}
# In which step the statements of which phase are waited for.
WAITS_FOR: Final[Mapping[AuditStep, StatementPhase]] = {
    AuditStep.COMMIT: StatementPhase.COMMIT,
    AuditStep.RESULT: StatementPhase.RESULT,
    AuditStep.REVEAL: StatementPhase.REVEAL,
    AuditStep.CHECK: StatementPhase.CHECK,
    AuditStep.VERDICT: StatementPhase.VERDICT,
}
OVER: Final = (AuditStep.PASSED, AuditStep.FAILED)
PATIENT: Final = (AuditStep.REVEAL, AuditStep.CHECK, AuditStep.VERDICT, AuditStep.OPEN)
OPENED: Final = len(IN_ORDER)  # the phase of a Withholding that is about an opened part


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class TellParticipants:
    """Send to these participants; to all others if none are named."""

    message: SignedStatement | AskStatement
    peers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Do what ``step`` needs, and tell the audit.

    REDUCE: parts may be sent (``reduced``). CHECK: compute the ``numbers`` (``told``). VERDICT:
    compare those of others, which gives the ``verdict`` (``judged``). OPEN: all parts that were in
    doubt are here, and their ``settlement`` is due (``resolved``).
    """

    step: AuditStep


@dataclass(frozen=True, slots=True)
class Convicted:
    """Report evidence: whoever it bans is to be banned."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Passed:
    """Report that the result may be committed."""


@dataclass(frozen=True, slots=True)
class AuditFailed:
    """Report that the attempt has failed because of these peers (none: it cannot be said)."""

    peers: tuple[bytes, ...]
    why: str


Effect = TellParticipants | Need | Convicted | Passed | AuditFailed


# ---------------------------------------------------------------- the audit

ASK_S: Final = 1.0  # a statement may be on its way that long before all others are asked for it
# A peer whose process has stopped is found dead within two seconds (membership/timing.py), and who
# lives answers at once, but for the arithmetic of a round: so this is no matter of a slow line.
SILENCE_S: Final = 20.0
GRACE_S: Final = 5.0  # for others to come to the same conclusion
# A slow machine sketches and hashes as much: an hour for a trillion, seconds for what runs today.
ELEMENTS_PER_S: Final = 10_000_000
# What a line of 1 Mbit/s brings: nobody withholds a part that may still be on its way.
OPEN_BYTES_PER_S: Final = 128 * 1024
# Before one says that it contradicts another, and between the turns of those who may have to say it
# of the same one: news goes around in that time. All of it together is less than SILENCE_S.
PAIR_S: Final = 3.0
TURN_S: Final = 1.0
TURNS_S: Final = 12.0


class AttemptAudit:
    """Take part in one audited attempt.

    ``own``: the encoded own parts, one for each chunk, which the reduction will send; none if this
    peer does not count. ``work``: the commitment to the local steps behind them, where there are
    validators. ``secret``: 32 random bytes. Times are of the caller's clock, in seconds.
    """

    def __init__(
        self,
        terms: AuditTerms,
        me: bytes,
        signer: Signer,
        own: Sequence[U8],
        secret: bytes,
        now_s: float,
        work: bytes = b"",
    ) -> None:
        self.terms, self.me, self.step = terms, me, AuditStep.COMMIT
        self.index = terms.participants.index(me)
        self.inbox = Inbox(terms)
        self._id = terms.digest
        self._signer, self._secret = signer, secret
        self._silence_s = SILENCE_S + terms.elements / ELEMENTS_PER_S
        # Parts: the own ones, and those of others in the chunks that this peer owns.
        self._own = own
        self._own_digests = [strong_digest(part) for part in own]
        self._copies = HeldParts(terms.work, self.index)
        self._held: dict[tuple[int, int], U8] = {}
        self._held_digests: dict[tuple[int, int], bytes] = {}
        self._numbers = Numbers(terms.work, own, self._held)
        self.disclosure = PartDisclosure(terms, self.index, self._shown, self._is_promised)
        # The result as it is here, and the inner products that it was made with.
        self._results: Sequence[U8] = ()
        self._result_digests: tuple[bytes, ...] = ()
        self._grams: dict[int, bytes] = {}
        # What others have done, or have not.
        self._voices: dict[tuple[int, bytes], dict[bytes, SignedStatement]] = {}  # who misses what
        self._since_s = self._asked_s = now_s
        self._answered_s: dict[tuple[bytes, int], float] = {}  # who has asked for a phase, when
        self._handed_on: set[StatementPhase] = set()
        self.unlinked: set[bytes] = set()  # participants to which the link has been lost
        self._suspect: tuple[bytes, str] | None = None
        self._suspect_s = 0.0
        self._in_doubt: tuple[tuple[int, int], ...] = ()  # parts that are to be opened
        self._settles = False
        self._effects: list[Effect] = []
        owners = terms.work.plan.owners
        roots = shard_roots(self._own_digests, owners, len(terms.participants)) if own else ()
        commitment = Commitment(tuple(roots), draw_of(self._id, me, secret), work if own else b"")
        self._say(StatementPhase.COMMIT, commitment, now_s)

    def take(self) -> list[Effect]:
        """Return what is to be done, in order; each effect is given once."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def is_over(self) -> bool:
        return self.step in OVER

    @property
    def is_patient(self) -> bool:
        """Return whether nothing need move for a while, up to the limits of this file.

        Then we wait for words, or for our turn to contradict. Before, bytes move, and whoever sees
        none says so.
        """
        return self._suspect is not None or self.step in PATIENT

    # ------------------------------------------------------------ the reduction

    def own_part(self, chunk: int) -> U8:
        """Return the own encoded part of a chunk; IndexError if this peer does not count."""
        return self._own[chunk]

    def keep(self, sender: int, chunk: int, part: U8) -> None:
        """Keep and hash a copy of a part of a chunk that this peer owns. Safe in any thread."""
        copy = self._copies.copy(sender, chunk, part)
        self._held_digests[sender, chunk] = strong_digest(copy)
        self._held[sender, chunk] = copy

    def came(self, chunk: int, result: U8) -> None:
        """Take a chunk of the result and compute what needs no draw. Safe in any thread."""
        self._numbers.came(chunk, result)

    def unlike_promised(self) -> list[int]:
        """Return the senders whose parts, all of which are here, are not what was committed to."""
        work, commitments = self.terms.work, self.inbox.commitments
        shard = work.shards.get(self.index, ())
        return [
            sender
            for sender in work.counted
            if sender != self.index
            and shard
            and merkle_root([self._held_digests[sender, chunk] for chunk in shard])
            != commitments[sender].roots[self.index]
        ]

    def reduced(
        self,
        results: Sequence[U8],
        digests: Sequence[bytes],
        products: InnerProducts,
        now_s: float,
    ) -> None:
        """Take the whole result, and say what we have made of it.

        ``digests``: of each chunk; ``products``: the inner products that we have
        computed with, where the rule needs them.
        """
        if self.step is AuditStep.REDUCE:
            self._results = results
            self._result_digests, self._grams = tuple(digests), dict(products.told)
            owned = self.terms.work.shards.get(self.index, ())
            self._move(Cause.REDUCED, now_s)
            mine = b"".join(digests[chunk] for chunk in owned)
            resultant = Resultant(mine, products.chunks, products.matrix)
            self._say(StatementPhase.RESULT, resultant, now_s)

    # ------------------------------------------------------------ arithmetic, when it is due

    def numbers(self) -> Check:
        """Return the own numbers, which are to be ``told``."""
        return self._numbers.check(self.inbox.seed, self._results)

    def look(self) -> tuple[Mapping[tuple[int, int], bytes], Sequence[ResultNumbers]]:
        """Return what others should tell of the parts held here; it needs nothing that they tell.

        Beside it, what all results look like (``Numbers.look``).
        """
        return self._numbers.look(self.inbox.seed, self._results)

    def verdict(self) -> tuple[dict[int, int], list[int]]:
        """Return whom this owner accuses (sender -> chunk), and the chunks in doubt for all."""
        inbox = self.inbox
        true, seen = self.look()
        accused = accusations(self.terms, inbox, true)
        return accused, doubted(self.terms.work, inbox.checks, inbox.resultants, seen)

    def settlement(self) -> list[Evidence]:
        """Return the evidence that the opened parts give."""
        return settle(self.terms, self.inbox, self.disclosure.opened, self._results)

    def told(self, check: Check, now_s: float) -> None:
        """Say our own numbers."""
        if self.step is AuditStep.CHECK:
            self._say(StatementPhase.CHECK, check, now_s)

    def judged(self, accused: Mapping[int, int], doubted: Iterable[int], now_s: float) -> None:
        """Say our verdict.

        ``accused``: whose numbers do not fit the parts that we hold (sender -> chunk). ``doubted``:
        which chunks do not fit what all have told.
        """
        if self.step is AuditStep.VERDICT:
            counted = self.terms.work.counted
            self._in_doubt = tuple((sender, chunk) for chunk in doubted for sender in counted)
            verdict = Verdict(tuple(accused), tuple(accused.values()))
            self._say(StatementPhase.VERDICT, verdict, now_s)

    def resolved(self, found: Iterable[Evidence], now_s: float) -> None:
        """End the attempt after all opened parts were judged; without a finding it passes.

        Then the doubt was unfounded.
        """
        if self.step is not AuditStep.OPEN:
            return
        evidence = list(found)
        if evidence:
            self._convict(evidence, now_s)
        else:
            self._pass(now_s)

    def mismatch(self, peer: bytes, why: str, now_s: float) -> None:
        """Suspect a peer that has sent us something else than it has signed; only we two know that.

        It has to be said, or the round is never done; but not at once (``_eliminate``).
        """
        if not self.is_over and peer != self.me and self._suspect is None:
            self._suspect, self._suspect_s = (peer, why[:100]), now_s
            if (word := self.inbox.of(StatementPhase.RESULT).get(peer)) is not None:
                self._effects.append(TellParticipants(word))  # others may have got another one

    def _eliminate(self, now_s: float) -> None:
        """Say that we and the suspect contradict each other, so that both have to go; in our turn.

        First others may prove that it is the other one who lies; and of several that it has lied to
        only one should go, so each waits for those before it.
        """
        if self._suspect is None or self.is_over:
            return
        index, count = self.terms.participants.index(self.me), len(self.terms.participants)
        if now_s - self._suspect_s >= PAIR_S + index * min(TURN_S, TURNS_S / count):
            peer, why = self._suspect
            word = self._signed(StatementPhase.ELIMINATE, Elimination(peer, why))
            self.inbox.add(word)
            self._effects.append(TellParticipants(word))
            if self.me in self.terms.jury:
                self._convict([Evidence("pair", peer, self.terms, (word,))], now_s)
            else:
                self._fail((), f"audit: {short(peer)}: {why}", now_s)

    def link_lost(self, peer: bytes) -> None:
        """Note that there is no link to the process that takes part, or was none for a while.

        It may have said what we miss, or have forgotten what it would say.
        """
        self.unlinked.add(peer)

    def banned(self, peers: Iterable[bytes], now_s: float) -> None:
        """Fail the attempt if others have evidence against participants of it."""
        ours = tuple(peer for peer in peers if peer in self.terms.participants)
        if ours and not self.is_over:
            self._fail(ours, f"audit: {', '.join(map(short, ours))} was banned meanwhile", now_s)

    # ------------------------------------------------------------ what others say

    def hear(self, message: AuditMessage, source: bytes, now_s: float) -> None:
        """Take a message of another participant: a statement may be anybody's."""
        if isinstance(message, SignedStatement):
            self._hear_statement(message, now_s)
        elif isinstance(message, AskStatement):
            self._hand_over(message, source, now_s)
        elif message.terms != self._id:
            return
        elif isinstance(message, AskPart):
            self.disclosure.asked(message, source)
        elif self.disclosure.take(message, source):
            self._settle_if_complete()

    def _hear_statement(self, each: SignedStatement, now_s: float) -> None:
        if not self._is_ours(each):
            return
        is_new = each.signer not in self.inbox.of(each.phase)
        if (evidence := self.inbox.add(each)) is not None:
            self._convict([evidence], now_s)
        elif self.step is AuditStep.FAILED:
            return
        elif each.phase is StatementPhase.WITHHELD:
            self._hear_withheld(each, now_s)
        elif each.phase is not StatementPhase.ELIMINATE:
            self._advance(now_s)
        elif is_new:
            self._hear_contradiction(each, now_s)

    def _hand_over(self, ask: AskStatement, source: bytes, now_s: float) -> None:
        """Hand on what we have; not more often than an honest one asks.

        An answer is much larger than a question.
        """
        last_s = self._answered_s.get((source, ask.phase), float("-inf"))
        ours = ask.terms == self._id and source in self.terms.participants
        if not ours or now_s - last_s < ASK_S / 2:
            return
        self._answered_s[source, ask.phase] = now_s
        have = self.inbox.of(IN_ORDER[ask.phase])
        self._effects += [TellParticipants(have[p], (source,)) for p in ask.peers if p in have]

    def _is_ours(self, each: SignedStatement) -> bool:
        ours = each.statement.terms == self._id and each.signer in self.terms.participants
        if each.phase in ANY_TIME and len(each.statement.body) > WORD_BYTES_MAX:
            return False  # padded: many of these are kept, and they make up evidence
        return ours and each.signer != self.me and each.genuine(self._signer)

    def _hear_contradiction(self, each: SignedStatement, now_s: float) -> None:
        """Hand on a contradiction, and fail the attempt by it if it can be believed.

        It is handed on so that nobody contradicts one before some and another before others. Who
        has revealed its secret has seen nothing wrong in what it was sent. Who is on probation
        takes nobody along: it is left out, or new identities would empty a run.
        """
        self._effects.append(TellParticipants(each))
        body = body_of(each.statement)
        assert isinstance(body, Elimination)
        if each.signer not in self.inbox.of(StatementPhase.REVEAL) and not self.is_over:
            why = f"audit: {short(each.signer)} and {short(body.peer)} contradict each other"
            if each.signer in self.terms.jury:
                self._effects.append(Convicted(Evidence("pair", body.peer, self.terms, (each,))))
                self._fail((each.signer, body.peer), why, now_s)
            else:
                self._fail((each.signer,), why, now_s)

    def _hear_withheld(self, each: SignedStatement, now_s: float) -> None:
        body = body_of(each.statement)
        if isinstance(body, Withholding) and body.peer in self.terms.participants:
            self._voices.setdefault((body.phase, body.peer), {})[each.signer] = each
            self._count_voices(body.phase, body.peer, now_s)

    # ------------------------------------------------------------ moving on

    def _advance(self, now_s: float) -> None:
        """Go on as far as what was said allows."""
        while (phase := WAITS_FOR.get(self.step)) is not None:
            if self.inbox.differing(phase):
                self._hand_on(IN_ORDER[phase - 1])
                return
            if not self.inbox.is_complete(phase):
                return
            evidence = None
            if phase is StatementPhase.REVEAL:
                evidence = self.inbox.broken_draw()
            elif phase is StatementPhase.CHECK:
                evidence = self.inbox.wrong_seed()
            if evidence is not None:
                self._convict([evidence], now_s)
            elif phase is StatementPhase.RESULT and (liar := self._other_result()):
                self.mismatch(liar, "its result is not what it has signed", now_s)
                return
            elif phase is StatementPhase.VERDICT:
                self._close(now_s)
            else:
                self._move(Cause.ALL_SAID, now_s)
                if self.step is AuditStep.REVEAL:
                    self._say(StatementPhase.REVEAL, Reveal(self._secret), now_s)
                else:
                    self._effects.append(Need(self.step))

    def _other_result(self) -> bytes:
        """Return an owner that has sent us other bytes than it has signed, or b"" if there is none.

        Only we two know that.
        """
        signed, owners = self.inbox.result_digests(), self.terms.work.plan.owners
        wrong = [owners[c] for c, digest in enumerate(self._result_digests) if signed[c] != digest]
        work, told = self.terms.work, self.inbox.resultants
        wrong += [o for o, gram in self._grams.items() if shard_gram(work, told[o]) != gram]
        return self.terms.participants[wrong[0]] if wrong else b""

    def _hand_on(self, phase: StatementPhase) -> None:
        """Hand on all statements of a phase in which somebody has said two things; once.

        So everybody sees which.
        """
        if phase not in self._handed_on:
            self._handed_on.add(phase)
            self._effects += [TellParticipants(each) for each in self.inbox.of(phase).values()]

    def _close(self, now_s: float) -> None:
        """Pass the attempt, or open what is in doubt; all verdicts are here.

        Who passes while others doubt has got another verdict than they: they hand theirs on, and
        see who has signed two.
        """
        self._in_doubt = tuple(sorted(self.inbox.accused().union(self._in_doubt)))
        if not self._in_doubt:
            self._pass(now_s)
            return
        work = self.terms.work
        part_bytes = work.part_codec.encoded_bytes(work.grid.size(0))
        self._silence_s += len(self._in_doubt) * part_bytes / OPEN_BYTES_PER_S
        self._move(Cause.DOUBT, now_s)
        self._hand_on(StatementPhase.VERDICT)
        self.disclosure.want(self._in_doubt)
        self._settle_if_complete()

    def _settle_if_complete(self) -> None:
        """Have the parts in doubt judged, once, when all of them are here."""
        complete = set(self._in_doubt) <= self.disclosure.opened.keys()
        if self.step is AuditStep.OPEN and complete and not self._settles:
            self._settles = True
            self._effects.append(Need(AuditStep.OPEN))

    def _signed(self, phase: StatementPhase, body: object) -> SignedStatement:
        heard = self.inbox.heard(phase) if phase in IN_ORDER else b""
        return sign_statement(self._id, phase, heard, body, self.me, self._signer)

    def _say(self, phase: StatementPhase, body: object, now_s: float) -> None:
        word = self._signed(phase, body)
        self.inbox.add(word)
        self._effects.append(TellParticipants(word))
        self._advance(now_s)

    def _move(self, cause: Cause, now_s: float) -> None:
        self.step = TRANSITIONS[self.step, cause]
        self._since_s = self._asked_s = now_s

    def _pass(self, now_s: float) -> None:
        self._move(Cause.CLEAN, now_s)
        self._effects.append(Passed())

    def _convict(self, evidence: list[Evidence], now_s: float) -> None:
        self._effects += [Convicted(each) for each in evidence]
        if not self.is_over:
            guilty = tuple(dict.fromkeys(each.culprit for each in evidence))
            kinds = ", ".join(f"{short(each.culprit)} ({each.kind})" for each in evidence)
            self._fail(guilty, f"audit: there is evidence against {kinds}", now_s)

    def _fail(self, peers: tuple[bytes, ...], why: str, now_s: float) -> None:
        self._move(Cause.BROKEN, now_s)
        self._effects.append(AuditFailed(peers, why))

    # ------------------------------------------------------------ time

    def owing(self) -> dict[bytes, int]:
        """Return who owes something now: participant -> phase (OPENED for an opened part)."""
        if self.step is AuditStep.OPEN:
            lacking = {sender for sender, _ in {*self._in_doubt} - self.disclosure.opened.keys()}
            return {self.terms.participants[sender]: OPENED for sender in sorted(lacking)}
        phase = WAITS_FOR.get(self.step)
        if phase is None:
            return {}
        late = [*self.inbox.silent(phase), *self.inbox.differing(phase)]
        return {peer: int(phase) for peer in late if peer != self.me}

    def tick(self, now_s: float) -> None:
        """Ask for what is missing, and say so when nobody has it."""
        self._eliminate(now_s)
        owing, waited_s = self.owing(), now_s - self._since_s
        if not owing:
            return
        phase = WAITS_FOR.get(self.step)
        if phase is not None and now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            if silent := tuple(p for p in self.inbox.silent(phase) if p != self.me):
                self._effects.append(TellParticipants(AskStatement(self._id, int(phase), silent)))
        if waited_s >= self._silence_s:
            for peer, owed in owing.items():
                self._miss(owed, peer, now_s)
        if waited_s >= self._silence_s + GRACE_S and not self.is_over:
            names = ", ".join(map(short, owing))
            what = f"has nothing from {names} in step {self.step.value} for {waited_s:.0f} s"
            self._fail(tuple(owing), f"audit: {what}", now_s)

    def _miss(self, phase: int, peer: bytes, now_s: float) -> None:
        voices = self._voices.setdefault((phase, peer), {})
        if self.me not in voices and not self.is_over and peer not in self.unlinked:
            word = voices[self.me] = self._signed(StatementPhase.WITHHELD, Withholding(phase, peer))
            self._effects.append(TellParticipants(word))
            self._count_voices(phase, peer, now_s)

    def _count_voices(self, phase: int, peer: bytes, now_s: float) -> None:
        """Convict a peer, or fail the attempt because of it, if a majority misses what it owes.

        Only where we miss it ourselves: what others miss we may be able to hand on.
        """
        voices, jury = self._voices[phase, peer], set(self.terms.jury) - {peer}
        told = {signer: each for signer, each in voices.items() if signer in jury}
        if self.me not in voices or len(told) < self.terms.majority or self.is_over:
            return
        if phase >= StatementPhase.REVEAL:
            words = tuple(told.values())
            self._convict([Evidence("withheld", peer, self.terms, words)], now_s)
        else:
            self._fail((peer,), f"audit: {short(peer)} has not committed to anything", now_s)

    # ------------------------------------------------------------ opened parts

    @property
    def doubted_parts(self) -> int:
        """Return how many parts had to be opened."""
        return len(self._in_doubt)

    def asks(self, now_s: float) -> list[tuple[bytes, AskPart]]:
        """Return whom to ask now for which pieces of parts that are in doubt."""
        return self.disclosure.asks(now_s) if self.step is AuditStep.OPEN else []

    def answers(self) -> list[tuple[bytes, DisclosedPiece]]:
        """Return which pieces of our parts to send to whom; none before all verdicts are here."""
        is_time = self.inbox.is_complete(StatementPhase.VERDICT)
        return self.disclosure.answers() if is_time else []

    def _shown(self, sender: int, chunk: int) -> Shown | None:
        """Return a part with its proof, if we have all that proves it; else None.

        This is so for our own parts, and for those of chunks that we own.
        """
        owners = self.terms.work.plan.owners
        if chunk >= len(owners):
            return None
        if sender == self.index and self._own:
            proof = opening(self._own_digests, owners, chunk)
            return Shown(sender, chunk, self._own[chunk].tobytes(), proof)
        if (sender, chunk) not in self._held or owners[chunk] != self.index:
            return None
        # Of what a sender has sent us; of other chunks nothing, and nothing is asked for.
        digests = [self._held_digests.get((sender, other), b"") for other in range(len(owners))]
        proof = opening(digests, owners, chunk)
        return Shown(sender, chunk, self._held[sender, chunk].tobytes(), proof)

    def _is_promised(self, shown: Shown) -> bool:
        owners = self.terms.work.plan.owners
        root = self.inbox.commitments[shown.sender].roots[owners[shown.chunk]]
        digest = strong_digest(shown.data)
        return opens(digest, shown.chunk, owners, shown.proof, root)
