"""Real peers that come into a run with probation: what their submissions change, and when."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from harness.callers import Callers, callers
from harness.movers import Mover, honest
from harness.processes import WAIT_S, Fleet, fleet, until

from atoll.peer.client.session import Session
from atoll.peer.daemon.status import render

K = 3
ALONE = 3  # rounds of the founders before c comes
ELEMENTS = 600_000  # three chunks
POISON = -500.0
Trace = dict[int, torch.Tensor]  # the run's parameters after each round


def mover(session: Session, **terms: str) -> Mover:
    return Mover(session, ELEMENTS, probation=K, **terms)


def together(trainers: Callers, movers: Mapping[str, Mover]) -> dict[str, Mover]:
    """All are attached before anybody goes on."""
    start = threading.Barrier(len(movers))
    for call in [trainers.start(name, lambda: start.wait(WAIT_S)) for name in movers]:
        call.result(WAIT_S)
    return dict(movers)


def rounds(
    trainers: Callers, movers: Mapping[str, Mover], until_round: int, moves: Mapping[str, float]
) -> dict[str, Trace]:
    """Everybody moves in every round until that one; whatever is late moves once more."""

    def go(name: str) -> Trace:
        mover, trace = movers[name], Trace()
        while mover.session.round < until_round:
            mover.move(moves[name])
            trace[mover.session.round] = mover.run
        return trace

    calls = {name: trainers.start(name, lambda name=name: go(name)) for name in movers}
    return {name: call.result(WAIT_S) for name, call in calls.items()}


def founded(run: Fleet, trainers: Callers, **terms: str) -> dict[str, Mover]:
    sessions = trainers.sessions
    calls = {n: trainers.start(n, lambda n=n: mover(sessions[n], **terms)) for n in sessions}
    movers = {name: call.result(WAIT_S) for name, call in calls.items()}
    a = run.peers["a"]
    until(lambda: all(m.get("attached") for m in a.status()["members"]), "all are attached", a)
    return together(trainers, movers)


def come(run: Fleet, trainers: Callers, name: str, **terms: str) -> Mover:
    """A peer joins, and its trainer."""
    run.join(name)
    session = trainers.add(name)
    made = trainers.start(name, lambda: mover(session, **terms)).result(WAIT_S)
    a = run.peers["a"]
    until(lambda: member(run, name).get("attached"), f"{name} is attached", a)
    return made


def member(run: Fleet, name: str) -> dict[str, object]:
    known = run.peers[name].status()["peer"]
    found = [x for x in run.peers["a"].status()["members"] if x["peer"] == known]
    return found[0] if found else {}


HONEST = {name: honest(name) for name in "abc"}


def test_what_a_newcomer_submits_changes_nothing_until_it_counts(tmp_path: Path) -> None:
    """Of two founders: of more, the order of their ids would decide how their sum is rounded."""
    last = 1 + ALONE + K
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with fleet(tmp_path / "without") as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            expected = rounds(trainers, founded(run, trainers), last, HONEST)["a"]
    with fleet(tmp_path / "with") as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            movers = founded(run, trainers)
            seen = rounds(trainers, movers, 1 + ALONE, HONEST)["a"]
            movers["c"] = come(run, trainers, "c")
            assert member(run, "c")["probation"] == K
            shown = render(run.peers["b"].status())
            assert shown.count(f"on probation for {K} more rounds") == 1
            moves = HONEST | {"c": POISON}
            found = rounds(trainers, movers, last, moves)
            seen |= found["a"]
            assert seen.keys() == expected.keys() == set(range(2, last + 1))
            for number, theta in expected.items():
                assert torch.equal(seen[number], theta)
            assert torch.equal(found["c"][last], expected[last])  # it has the same as all others
            after = rounds(trainers, movers, last + 1, moves)
            assert float(after["a"][last + 1].max()) < float(expected[last].min()) + POISON / 5
            assert "probation" not in member(run, "c")
            assert "on probation" not in render(run.peers["b"].status())


@pytest.mark.slow
def test_a_rule_of_whole_vectors_does_not_see_a_newcomer(tmp_path: Path) -> None:
    """Its vector is compared with nobody's, and it owns nothing for which others wait."""
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            movers = founded(run, trainers, aggregate="gm(f=1)")
            traces = rounds(trainers, movers, 1 + ALONE, HONEST)["a"]
            movers["d"] = come(run, trainers, "d", aggregate="gm(f=1)")
            moves = HONEST | {"d": POISON}
            traces |= rounds(trainers, movers, 2 + ALONE + K, moves)["a"]
            assert not any(run.peers[name].said("retry") for name in "abcd")
    steps = [float((traces[n + 1] - traces[n]).mean()) for n in range(2, 2 + ALONE + K)]
    assert all(abs(step - steps[0]) < 1e-4 for step in steps[:-1])
    assert abs(steps[-1] - steps[0]) > 1e-4  # a liar moves the result of four a little


def test_newcomers_alone_train_nothing_until_a_founder_is_back(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("a")
        with callers(run, "a") as trainers:
            movers = {
                "a": trainers.start("a", lambda: mover(trainers.sessions["a"])).result(WAIT_S)
            }
            rounds(trainers, movers, 3, HONEST)
            for name in "bc":
                movers[name] = come(run, trainers, name)
            rounds(trainers, movers, 4, HONEST)
            trainers.end("a")
            reached = {n: trainers.start(n, lambda n=n: until_round(movers[n], n)) for n in "bc"}
            a = run.peers["a"]
            until(lambda: a.said("held"), "it is held", a)
            text = "round 5 is held: it needs a peer that counts, none is here (2 on probation)"
            until(lambda: run.peers["c"].status()["waiting"] == text, "all say so", a)
            run.peers["a"].kill()
            run.peers["a"].ends()
            until(lambda: any(run.peers[n].said("held") for n in "bc"), "they hold it", a)
            assert run.peers["b"].status()["round"] == 4
            run.restart("a")
            session = trainers.add("a")
            back = trainers.start("a", lambda: until_round(mover(session), "a"))
            assert back.result(WAIT_S) == 5
            assert all(call.result(WAIT_S) == 5 for call in reached.values())
            eligibility = run.peers["a"].status()["members"]
            assert [m["you"] for m in eligibility if "probation" not in m] == [True]


def until_round(mover: Mover, name: str) -> int:
    while mover.session.round < 5:
        mover.move(honest(name))
    return mover.session.round


def test_an_address_that_has_as_many_members_as_it_may_is_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.options = lambda name: ("--per-address", "1")
        run.form("ab")
        refused = run.join("c")
        assert refused.ends() == 11
        assert "ATOLL-E41" in refused.text
        assert "1 of the 1 peers that may come from the address 127.0.0.1" in refused.text
        run.peers["b"].kill()
        run.peers["b"].ends()
        run.restart("b")  # whoever was in finds its own place free
        run.sees("b", 2)
