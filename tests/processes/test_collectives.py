"""A session's own collectives over real daemons."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.callers import callers
from harness.processes import fleet

from atoll.collectives.errors import ConfigError
from atoll.peer.client.session import Session
from atoll.peer.daemon.trainer_service import EXCHANGES_MAX
from atoll.peer.membership.operations import OBJECT_BYTES_MAX


def test_all_gather_and_barrier_of_three(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            trainers.meet()
            names, before = trainers.names, run.peers["a"].status()
            for turn in range(5):
                mine = {n: f"{n} says {turn}".encode() * turn for n in "abc"}
                found = trainers.each_own(
                    {n: lambda s, data=mine[n]: s.all_gather(data) for n in "abc"}
                )
                assert len({tuple(pairs) for pairs in found.values()}) == 1
                assert dict(found["a"]) == {names[n]: mine[n] for n in "abc"}
            here = trainers.each(lambda session: session.barrier())
            assert set(here["b"]) == set(names.values())
            after = run.peers["a"].reaches(before["round"] + 6)
            assert after["digests"][str(after["round"])] == before["digest"]  # nothing was stepped
            assert run.agree("abc") >= 6


def test_the_same_object_may_be_given_again_and_again(tmp_path: Path) -> None:
    """It goes to the coordinator each time: nothing waits for a repetition."""
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()

            def gather(session: Session) -> float:
                began_s = time.monotonic()
                for _ in range(50):
                    assert session.all_gather(b"same")[1][1] == b"same"
                return time.monotonic() - began_s

            assert max(trainers.each(gather).values()) < 15.0  # repeated, it would take 25 s


def test_objects_that_do_not_fit_are_refused_alike(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            with pytest.raises(ConfigError, match=r"json\.dumps"):
                trainers.sessions["a"].gather("text")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="one trainer may give 65,536"):
                trainers.sessions["a"].all_gather(bytes(OBJECT_BYTES_MAX + 1))
            found = trainers.each(lambda session: session.all_gather(bytes(OBJECT_BYTES_MAX)))
            assert [len(data) for _, data in found["a"]] == [OBJECT_BYTES_MAX] * 2


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_buffers_are_reduced_where_they_lie(codec: str, tmp_path: Path) -> None:
    shape, other = (300, 1000), (7,)

    def work(session: Session, mine: float) -> list[float]:
        large, small = session.buffer(*shape), session.buffer(*other)
        assert large.shape == shape
        assert not large.any()
        means, places = [], set()
        for turn in range(6):
            large.fill_(mine + turn)
            small.fill_(-mine)
            found = session.all_reduce(large, codec=codec).value
            copied = session.all_reduce(large[:150] * 2, codec=codec).value
            assert session.all_reduce(small, "sum").value.unique().item() == -3.0
            means += [found.unique().item(), copied.unique().item()]
            half = session.all_reduce(large.view(-1)[: large.numel() // 2], "max").value
            means.append(half.unique().item())
            places |= {found.data_ptr(), half.data_ptr()}  # found is overwritten by now
            assert large.unique().item() == mine + turn  # what goes in is left alone
        assert len(places) < 12
        return means

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            found = trainers.each_own(
                {n: lambda s, m=float(m): work(s, m) for m, n in enumerate("ab", start=1)}
            )
            assert found["a"] == found["b"]
            for turn in range(6):
                mean, twice, most = found["a"][3 * turn : 3 * turn + 3]
                assert twice == pytest.approx(2 * (1.5 + turn), rel=0.01)
                assert most == pytest.approx(2.0 + turn, rel=0.01)
                assert mean == pytest.approx(1.5 + turn, rel=0.01)


def test_buffers_are_let_go_and_bounded(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            session = trainers.sessions["a"]
            with pytest.raises(ConfigError, match="how many elements"):
                session.buffer(3, 0)
            for _ in range(2 * EXCHANGES_MAX):
                session.buffer(10)  # which nobody keeps
            kept = [session.buffer(10) for _ in range(EXCHANGES_MAX - 1)]
            with pytest.raises(ConfigError, match="16 buffers"):
                kept += [session.buffer(10) for _ in range(2)]
            del kept
            assert session.buffer(10).numel() == 10


def test_collectives_are_right_after_ctrl_c_while_memory_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where the session is used on."""

    def is_interrupted(session: Session) -> None:
        client = session.channel._client
        ask = client.ask

        def interrupted(command: str, *about: Any) -> Any:
            answer = ask(command, *about)
            if command == "exchange":
                monkeypatch.setattr(client, "ask", ask)
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(client, "ask", interrupted)
        session.all_reduce(np.full(1000, 3, np.float32))

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            kept = trainers.each_own({"a": lambda session: session.buffer(300)})["a"]
            with pytest.raises(KeyboardInterrupt):
                trainers.each_own({"a": is_interrupted})
            trainers.meet()  # attached anew: until then the others go on without it
            kept.fill_(4.0)
            for turn, mine in enumerate([kept, *np.full((2, 500), 4, np.float32)]):
                given = {"a": mine, "b": np.full(len(mine), 6 + 2 * turn, np.float32)}
                found = trainers.each_own(
                    {n: lambda s, n=n, g=given: s.all_reduce(g[n]) for n in "ab"}
                )
                assert {float(v) for n in "ab" for v in found[n].value} == {5.0 + turn}


def test_the_call_after_one_that_was_given_up_has_its_own_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round of the first is committed, and takes a while to be written, when it is called."""
    large = np.ones(8_000_000, np.float32)

    def is_given_up(session: Session) -> None:
        channel = session.channel

        def interrupted(call: int) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(channel, "_outcome", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.all_reduce(large, codec="int8")

    with fleet(tmp_path) as run:
        run.form("a")
        with callers(run, "a") as trainers:
            trainers.meet()
            for turn in range(2, 8):
                trainers.each_own({"a": is_given_up})
                mine = np.full(10, turn, np.float32)
                found = trainers.each_own({"a": lambda s, mine=mine: s.all_reduce(mine)})["a"]
                assert found.value.tolist() == [float(turn)] * 10


OPS = {
    "mean": lambda parts: np.mean(parts, axis=0),
    "sum": lambda parts: np.sum(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
}


def test_all_reduce_of_arrays_and_tensors(tmp_path: Path) -> None:
    """In every op, several sizes and kinds, the same bits everywhere."""
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            trainers.meet()
            for turn, (op, shape) in enumerate(
                itertools.product(OPS, [(), (3, 5), (70_000,), (2, 100, 3)])
            ):
                dice = np.random.default_rng(turn)
                parts = {name: dice.standard_normal(shape, np.float32) for name in "abc"}
                if turn % 2:  # tensors, which their trainers know nothing special of
                    given = {name: torch.from_numpy(np.asarray(p)) for name, p in parts.items()}
                else:
                    given = {name: np.asarray(part) for name, part in parts.items()}
                found = trainers.each_own(
                    {n: lambda s, n=n, g=given, op=op: s.all_reduce(g[n], op) for n in "abc"}
                )
                values = {name: np.asarray(done.value) for name, done in found.items()}
                assert len({value.tobytes() for value in values.values()}) == 1
                assert type(found["a"].value) is type(given["a"])
                expected = OPS[op](np.stack(list(parts.values())))
                assert values["a"].shape == shape
                np.testing.assert_allclose(values["a"], expected, rtol=1e-5, atol=1e-6)
                assert set(found["b"].peers) == set(trainers.names.values())
            assert run.agree("abc") >= 16
