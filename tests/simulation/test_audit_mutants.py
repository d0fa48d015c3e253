"""Faults that are planted in the protocol of audits: seeds must find every one."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.peer.verify import attempt_audit, checks, inbox, promises
from simulation.audits import run

SEEDS = 200

PLANTED: dict[str, tuple[Any, str, Any]] = {
    "owners accuse nobody": (attempt_audit, "accusations", lambda *given: {}),
    "nothing is ever in doubt": (attempt_audit, "doubted", lambda *given: []),
    "wrong results are forgiven": (inbox, "_wrong_result", lambda *given: []),
    "wrong inner products are forgiven": (inbox, "_wrong_gram", lambda *given: []),
    "nobody looks at inner products": (checks, "implausible_grams", lambda *given: []),
    "wrong numbers are forgiven": (inbox, "_wrong_numbers", lambda *given: []),
    "parts need not be what was promised": (
        attempt_audit.AttemptAudit,
        "unlike_promised",
        lambda self: [],
    ),
    "opened parts need not be either": (
        attempt_audit.AttemptAudit,
        "_is_promised",
        lambda self, shown: True,
    ),
    "any secret may be revealed": (inbox.Inbox, "broken_draw", lambda self: None),
    "results need not be what was signed": (
        attempt_audit.AttemptAudit,
        "_other_result",
        lambda self: b"",
    ),
    "nobody compares what was heard": (inbox.Inbox, "differing", lambda self, phase: []),
    "the first statement stands": (
        inbox.Inbox,
        "add",
        lambda self, each: self._said.get(each.phase, {}).setdefault(each.signer, each) and None,
    ),
    "nobody asks for what is missing": (attempt_audit, "ASK_S", 1e9),
    "no turns among those who contradict": (attempt_audit, "TURN_S", 0.0),
    "second audit commitment after a restart": (
        promises.Promises,
        "is_named",
        lambda self, terms: True,
    ),
    "who was started again withholds": (
        attempt_audit.AttemptAudit,
        "link_lost",
        lambda self, peer: None,
    ),
    "nobody hands on what it has heard": (
        attempt_audit.AttemptAudit,
        "_hand_on",
        lambda self, phase: None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead = PLANTED[fault]
    monkeypatch.setattr(where, name, instead)
    for seed in range(SEEDS):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} seeds, and none has found: {fault}")
