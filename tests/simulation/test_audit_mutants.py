"""Faults that are planted in the protocol of audits: seeds must find every one."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.peer.verify import arithmetic, auditor, inbox, judge, machine
from simulation.audits import run

SEEDS = 200

PLANTED: dict[str, tuple[Any, str, Any]] = {
    "owners accuse nobody": (auditor, "accusations", lambda *given: {}),
    "nothing is ever in doubt": (auditor, "doubted", lambda *given: []),
    "wrong results are forgiven": (judge, "_wrong_result", lambda *given: []),
    "wrong inner products are forgiven": (judge, "_wrong_gram", lambda *given: []),
    "nobody looks at inner products": (arithmetic, "implausible_grams", lambda *given: []),
    "wrong numbers are forgiven": (judge, "_wrong_numbers", lambda *given: []),
    "parts need not be what was promised": (
        auditor.Auditor,
        "unlike_promised",
        lambda self: [],
    ),
    "opened parts need not be either": (auditor.Auditor, "_is_promised", lambda self, shown: True),
    "any secret may be revealed": (inbox.Inbox, "broken_draw", lambda self: None),
    "results need not be what was signed": (machine.Audit, "_other_result", lambda self: b""),
    "nobody compares what was heard": (inbox.Inbox, "differing", lambda self, phase: []),
    "the first statement stands": (
        inbox.Inbox,
        "add",
        lambda self, each: self._said.get(each.phase, {}).setdefault(each.signer, each) and None,
    ),
    "nobody asks for what is missing": (machine, "ASK_S", 1e9),
    "no turns among those who contradict": (machine, "TURN_S", 0.0),
    "nobody hands on what it has heard": (machine.Audit, "_hand_on", lambda self, phase: None),
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
