"""The audited attempts of a daemon: what comes at the wrong time, and what is promised once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from simulation.audit_options import Key

from atoll.peer.verify.attempt_audit import ELEMENTS_PER_S, SILENCE_S
from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.manager import AuditedAttempt, AuditManager
from atoll.peer.verify.statement import (
    WHY_MAX,
    WORD_BYTES_MAX,
    AskPart,
    AskStatement,
    Elimination,
    SignedStatement,
    Statement,
    StatementPhase,
    Withholding,
    body_of,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms

rng = random.Random(3)
KEYS = sorted((Key(rng) for _ in range(3)), key=lambda key: key.me)
TERMS = AuditTerms(
    b"L" * 32, 1, 7, 1, 0, tuple(key.me for key in KEYS), (True,) * 3, (1,) * 3,
    "mean", "int8", 3 * 256, 256,
)  # fmt: skip
ME, LIAR = KEYS[0], KEYS[2]


class Site:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, object]] = []
        self.convicted: list[Evidence] = []
        self.failed: list[tuple[bytes, ...]] = []
        self.relayed: set[bytes] = set()
        self.host = AuditManager(
            ME.me,
            ME,
            SimpleNamespace(
                send=self._send,
                convict=self.convicted.append,
                note=lambda kind, text: None,
                life=lambda: 0,
                linked_life=lambda peer: 0,
                is_relayed=self.relayed.__contains__,
            ),
        )

    def _send(self, peer: bytes, message: object) -> bool:
        self.sent.append((peer, message))
        return True

    def begin(self) -> AuditedAttempt:
        work = TERMS.work
        own = [np.empty(work.part_codec.encoded_bytes(256), np.uint8) for _ in range(3)]
        for part in own:
            work.part_codec.encode(np.ones(256, np.float32), part)
        run = SimpleNamespace(
            send_parts=lambda parts: None,
            passed=lambda: None,
            failed=lambda peers, why: self.failed.append(peers),
        )
        attempt = self.host.start(run, self.host.audit_of(TERMS, own))
        attempt.pump()
        return attempt


def play(act: Callable[[Site], None]) -> None:
    async def run() -> None:
        site = Site()
        act(site)
        await asyncio.sleep(0.05)
        site.host.close()

    asyncio.run(run())


def garbage(phase: StatementPhase) -> SignedStatement:
    statement = Statement(TERMS.digest, int(phase), b"", b"\xc1")
    return SignedStatement(LIAR.me, statement, LIAR.sign(statement.digest))


def test_garbage_that_comes_before_the_attempt_is_evidence_and_ends_nothing() -> None:
    def act(site: Site) -> None:
        site.host.on_message(LIAR.me, garbage(StatementPhase.WITHHELD))
        site.begin()
        (evidence,) = site.convicted
        assert (evidence.kind, evidence.culprit) == ("malformed", LIAR.me)
        assert site.failed == [(LIAR.me,)]

    play(act)


def test_an_attempt_that_failed_still_sees_who_lies() -> None:
    def act(site: Site) -> None:
        site.begin()
        site.host.on_message(LIAR.me, garbage(StatementPhase.WITHHELD))
        site.host.on_message(LIAR.me, garbage(StatementPhase.ELIMINATE))
        assert len(site.convicted) == 2
        assert len(site.failed) == 1

    play(act)


@pytest.mark.parametrize("phase", [StatementPhase.WITHHELD, StatementPhase.ELIMINATE])
def test_a_padded_word_is_neither_kept_nor_handed_on(phase: StatementPhase) -> None:
    """Unknown fields are ignored, so a body may be as long as any other statement's."""
    about = {"phase": 3, "peer": KEYS[1].me, "why": "", "more": bytes(WORD_BYTES_MAX)}
    name = "Withholding" if phase is StatementPhase.WITHHELD else "Elimination"
    statement = Statement(TERMS.digest, int(phase), b"", msgpack.packb([name, about]))
    body_of(statement)  # it can be read
    word = SignedStatement(LIAR.me, statement, LIAR.sign(statement.digest))

    def act(site: Site) -> None:
        attempt = site.begin()
        site.sent.clear()
        site.host.on_message(LIAR.me, word)
        assert attempt.audit._voices == {}
        assert LIAR.me not in attempt.audit.inbox.of(phase)
        assert site.sent == []

    play(act)


def test_the_longest_word_of_an_honest_one_is_heard() -> None:
    body, phase = Elimination(KEYS[1].me, "x" * WHY_MAX), StatementPhase.ELIMINATE
    word = sign_statement(TERMS.digest, phase, b"", body, LIAR.me, LIAR)

    def act(site: Site) -> None:
        attempt = site.begin()
        site.host.on_message(LIAR.me, word)
        assert LIAR.me in attempt.audit.inbox.of(phase)

    play(act)


def test_who_is_heard_through_a_relay_only_is_never_said_to_withhold() -> None:
    """The relay may hold it back, from everybody."""
    late = SILENCE_S + 1 + TERMS.elements / ELEMENTS_PER_S
    through_a_relay, directly = KEYS[1].me, KEYS[2].me

    def act(site: Site) -> None:
        attempt = site.begin()
        site.relayed.add(through_a_relay)
        site.sent.clear()
        site.host._tick()
        attempt.audit.tick(site.host.now_s + late)
        attempt.pump()
        told = [each for _, each in site.sent if isinstance(each, SignedStatement)]
        bodies = [body_of(each.statement) for each in told]
        missed = {body.peer for body in bodies if isinstance(body, Withholding)}
        assert missed == {directly}

    play(act)


def test_parts_are_not_shown_to_who_may_still_choose_its_own() -> None:
    def act(site: Site) -> None:
        site.begin()
        site.sent.clear()
        site.host.on_message(LIAR.me, AskPart(TERMS.digest, 0, 1, 0))
        assert site.sent == []

    play(act)


def test_arithmetic_that_breaks_fails_the_attempt_and_not_the_daemon() -> None:
    def act(site: Site) -> None:
        attempt = site.begin()

        async def breaks() -> None:
            raise ValueError("no such vectors")

        attempt._spawn(breaks())
        attempt._spawn(breaks())

    async def run() -> None:
        site = Site()
        broken: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        act(site)
        await asyncio.sleep(0.05)
        assert site.failed == [(), ()]
        assert not broken
        site.host.close()

    asyncio.run(run())


def test_a_question_that_is_repeated_is_answered_once() -> None:
    """An answer is much larger than a question."""

    def act(site: Site) -> None:
        site.begin()
        site.sent.clear()
        for _ in range(100):
            site.host.on_message(
                LIAR.me, AskStatement(TERMS.digest, StatementPhase.COMMIT, (ME.me,))
            )
        assert len(site.sent) == 1

    play(act)
