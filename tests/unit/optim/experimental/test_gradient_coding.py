"""Test sequential gradient coding: sums are exact whoever is late, and late ones repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError, StateError
from atoll.optim import Swarm
from atoll.optim.experimental import CodedGradients
from atoll.optim.experimental.gradient_coding import WholeGradient, code_of, decoding

SIZE = 7
NAMES = [f"worker-{n}" for n in range(5)]
NINE = [f"worker-{n}" for n in range(9)]
# A shard takes one second in four pieces; of who is late a piece takes as long as a round.
DEADLINE_S = 2.5


@pytest.mark.parametrize(
    ("peers", "late"), [(2, 1), (3, 1), (4, 0), (5, 2), (6, 5), (8, 2), (8, 3), (9, 2)]
)
def test_any_that_are_enough_decode_and_fewer_do_not(peers: int, late: int) -> None:
    code = code_of(peers, late, seed=1)
    for own in range(peers):
        assert np.count_nonzero(code[own]) == np.count_nonzero(code[:, own]) == late + 1
    for count in range(peers + 1):
        for came in combinations(range(peers), count):
            weights = decoding(code, came)
            if count >= peers - late:
                assert weights is not None
                np.testing.assert_allclose(code.T @ weights, np.ones(peers), atol=1e-9)
                assert set(np.flatnonzero(weights)) <= set(came)
            elif count < peers / (late + 1):  # else shards are all there, and may be enough
                assert weights is None


def gradient(point: F32, job: int, shard: int) -> F32:
    numbers = np.random.default_rng((job, shard)).standard_normal(SIZE)
    return (numbers + (shard + 1) * point).astype(np.float32)


PIECES = 4


def whole(point: F32, job: int, shard: int) -> list[F32]:
    """Return the gradient in one piece."""
    return [gradient(point, job, shard)]


class Clock:
    """Tell the time of one worker, of which a piece takes the whole round while it is late."""

    def __init__(self, is_late: Callable[[int], bool]) -> None:
        self.now_s, self.calls, self._is_late = 0.0, 0, is_late
        self.rounds, self.steps_s = 0, list[float]()

    def __call__(self) -> float:
        return self.now_s

    def gradient(self, point: F32, job: int, shard: int) -> Iterator[F32]:
        for _ in range(PIECES):
            self.calls += 1
            self.now_s += 1.2 * DEADLINE_S if self._is_late(self.rounds) else 1.0 / PIECES
            yield gradient(point, job, shard) / PIECES


def point_of(job: int) -> F32:
    return np.random.default_rng((7, job)).standard_normal(SIZE).astype(np.float32)


def run(
    jobs: int, late: int, is_late: Callable[[int, int], bool], peers: int = 5
) -> list[tuple[list[list[WholeGradient]], CodedGradients, Clock]]:
    """Return what each step came to, the last of which begins nothing, for each worker."""

    def work(session: Any) -> Any:
        clock = Clock(lambda step: is_late(session.number, step))
        made = CodedGradients(
            session,
            NAMES[:peers],
            clock.gradient,
            late=late,
            deadline_s=DEADLINE_S,
            clock=clock,
        )
        found, took_s = [], clock.steps_s
        for job in range(jobs + 1):
            clock.rounds, began_s = job, clock.now_s
            found.append(made.step(point_of(job) if job < jobs else None))
            took_s.append(clock.now_s - began_s)
        return found, made, clock

    return Swarm(peers).run(work)


def expected(job: int, peers: int = 5) -> Any:
    parts = [gradient(point_of(job), job, shard).astype(np.float64) for shard in range(peers)]
    return np.sum(parts, axis=0)


def check(found: list[Any], jobs: int, peers: int = 5) -> None:
    whole = [one for steps, _, _ in found[:1] for step in steps for one in step]
    assert [one.job for one in whole] == list(range(jobs))
    for one in whole:
        np.testing.assert_allclose(one.total, expected(one.job, peers), atol=2e-5)
    for steps, _, _ in found[1:]:
        others = [one.total.tobytes() for step in steps for one in step]
        assert others == [one.total.tobytes() for one in whole]


def test_who_is_late_is_not_waited_for() -> None:
    """Let another one be late in each round: its step ends with the others' and is exact."""
    found = run(6, 1, lambda peer, step: peer == step % 5)
    check(found, 6)
    for steps, made, clock in found:
        assert [len(step) for step in steps] == [1] * 6 + [0]
        assert made.repeated == made.waited == 0
        assert max(clock.steps_s) < 1.3 * DEADLINE_S  # one piece, and not a shard of four


def test_a_job_with_too_many_late_is_repeated_by_them_alone_where_they_left_it() -> None:
    """Let two be late in round 1, with one that may be: the job is whole a round later."""
    found = run(4, 1, lambda peer, step: step == 1 and peer in (0, 2))
    check(found, 4)
    for number, (steps, made, clock) in enumerate(found):
        assert [[one.job for one in step] for step in steps] == [[0], [], [1], [2], [3]]
        assert (made.repeated, made.waited) == (3, 0)
        # Two shards for each of four jobs, in pieces, none twice. The late ones had one piece of
        # job 1 and go on behind the others, by less in each round.
        assert clock.calls == 4 * 2 * PIECES, number


def test_what_is_still_late_then_is_waited_for() -> None:
    found = run(3, 2, lambda peer, step: step in (1, 2) and peer in (0, 1, 2))
    check(found, 3)
    assert all(made.waited > 0 for _, made, _ in found)


def said(made: CodedGradients, peer: str, data: bytes) -> None:
    """Let a peer give ``data`` in place of what a ``CodedGradients`` says."""

    class Liar:
        peer_name = NAMES[0]

        def all_gather(self, own: bytes) -> list[tuple[str, bytes]]:
            return [(NAMES[0], own), (peer, data)]

    made._session = Liar()  # type: ignore[assignment]
    made.step(point_of(0))


@pytest.mark.parametrize("change", ["short", "other seed", "other step", "other flag"])
def test_what_does_not_fit_names_its_giver(change: str) -> None:
    def make(seed: int = 0, begin_at: int = 0) -> CodedGradients:
        session = Swarm(1).sessions[0]
        return CodedGradients(
            session, NAMES[:2], whole, late=0, deadline_s=9.0, seed=seed, begin_at=begin_at
        )

    other = make(seed=change == "other seed", begin_at=change == "other step")
    heard: list[bytes] = []

    class Ear:
        def all_gather(self, own: bytes) -> list[tuple[str, bytes]]:
            heard.append(own)
            raise StopIteration

    other._session = Ear()  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        other.step(point_of(0))
    data = heard[0]
    if change == "short":
        data = data[:-1]
    if change == "other flag":
        data = data[:-1] + b"\7"
    with pytest.raises(RemoteProtocolError, match=f"what {NAMES[1]} said"):
        said(make(), NAMES[1], data)


def test_who_comes_back_begins_where_the_others_are() -> None:
    """Let two be late with job 1, of which one then has lost what it had, and its place."""

    def work(session: Any) -> list[WholeGradient]:
        clock = Clock(lambda step: step == 1 and session.number != 1)
        how: Any = {"late": 1, "deadline_s": DEADLINE_S, "clock": clock}
        made = CodedGradients(session, NAMES[:3], clock.gradient, **how)
        found: list[WholeGradient] = []
        for job in range(4):
            if session.number == 2 and job == 2:
                made = CodedGradients(session, NAMES[:3], clock.gradient, begin_at=2, **how)
            clock.rounds = job
            found += made.step(point_of(job) if job < 3 else None)
        return found

    found = Swarm(3).run(work)
    assert [one.job for one in found[0]] == [0, 1, 2]
    assert [one.job for one in found[2]] == [0, 1, 2]  # though the new object had no job 1
    for one in [*found[0], *found[2]]:
        np.testing.assert_allclose(one.total, expected(one.job, 3), atol=2e-5)


@given(st.integers(0, 2), st.integers(0, 2**15 - 1))
def test_sums_are_exact_whoever_is_late(late: int, pattern: int) -> None:
    check(run(3, late, lambda peer, step: bool(pattern >> (5 * step + peer) & 1)), 3)


def test_nobody_waits_for_ever_for_who_is_gone() -> None:
    def work(session: Any) -> None:
        made = CodedGradients(session, NAMES[:3], whole, late=0, deadline_s=60)
        for job in range(2):
            if session.number == 2 and job == 1:
                return
            made.step(point_of(job))

    with pytest.raises(StateError, match="job 1 has the results of 2 of 3 peers"):
        Swarm(3).run(work)


@pytest.mark.parametrize(
    "wrong",
    [{"late": 5}, {"late": -1}, {"deadline_s": 0.0}, {"peers": NAMES[:1] * 2}, {"peers": NINE}],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"peers": NAMES, "late": 1, "deadline_s": 1.0, **wrong}
    session = Swarm(1).sessions[0]
    with pytest.raises(ConfigError):
        CodedGradients(session, options.pop("peers"), whole, **options)
