"""A session's own collectives when peers die, join, disagree, or train with DiLoCo as well."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet, until

from atoll.collectives.errors import (
    CodecError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    DaemonLostError,
    IncompatibleRunError,
)
from atoll.optim import DiLoCo
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.peer.client.session import Session

LARGE = 8_000_000  # takes long enough to be caught in the middle


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("b", id="member", marks=pytest.mark.slow),  # as test_kills.py has it
        pytest.param("a", id="coordinator"),
    ],
)
def test_survivors_share_one_result_when_a_daemon_is_killed(tmp_path: Path, victim: str) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            trainers.meet()
            names = trainers.names
            vectors = {n: np.full(LARGE, 1 + i, np.float32) for i, n in enumerate("abc")}
            made = {
                n: trainers.start(n, lambda n=n: trainers.sessions[n].all_reduce(vectors[n], "sum"))
                for n in "abc"
            }
            peer = run.peers[victim]
            until(lambda: peer.try_status().get("attempt"), f"{victim} reduces", peer)
            peer.kill()
            with pytest.raises(DaemonLostError):
                made[victim].result(WAIT_S)
            survivors = "abc".replace(victim, "")
            found = [made[name].result(WAIT_S) for name in survivors]
            assert found[0].value.tobytes() == found[1].value.tobytes()
            assert found[0].peers == found[1].peers
            # The dead one's vector is in every element or in none.
            expected = sum(vectors[n][0] for n in "abc" if names[n] in found[0].peers)
            assert np.unique(found[0].value).tolist() == [expected]
            here = trainers.each(lambda session: session.barrier(), survivors)
            assert set(here[survivors[0]]) == {names[n] for n in survivors}
            assert run.agree(survivors) >= 1


def test_a_different_call_is_an_error_that_names_both(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            trainers.meet()
            sizes = {"a": 1000, "b": 999, "c": 999}
            made = {
                n: trainers.start(
                    n,
                    lambda n=n: trainers.sessions[n].all_reduce(np.ones(sizes[n], np.float32)),
                )
                for n in "abc"
            }
            with pytest.raises(CollectiveMismatchError) as caught:
                made["a"].result(WAIT_S)
            assert caught.value.code == "E53"
            assert "1,000 elements" in str(caught.value)
            assert "999 elements" in str(caught.value)
            assert len(made["b"].result(WAIT_S).peers) == 2
            assert len(made["c"].result(WAIT_S).peers) == 2
            assert run.peers["a"].said("mismatch") == 1
            here = trainers.each(lambda session: session.barrier())
            assert all(len(names) == 3 for names in here.values())


def test_a_joiner_takes_part_from_the_next_call_on(tmp_path: Path) -> None:
    """Also when it attaches while the others call without a pause."""
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            enough = threading.Event()

            def call_on(session: Session) -> int:
                calls = 0
                while not enough.is_set():
                    try:
                        done = session.all_reduce(np.ones(50_000, np.float32), "sum")
                    except CollectiveMissedError:
                        continue
                    assert np.unique(done.value).tolist() == [len(done.peers)]
                    calls += 1
                session.close()  # or the other would wait for it, half a minute
                return calls

            going = [trainers.start(n, lambda n=n: call_on(trainers.sessions[n])) for n in "ab"]
            run.join("c")
            run.sees("c", 3)
            late = trainers.add("c")
            for _ in range(5):
                mine = trainers.start_until_in(
                    "c", lambda: late.all_reduce(np.ones(50_000, np.float32), "sum")
                )
                done = mine.result(WAIT_S)
                assert late.peer_name in done.peers
                assert np.unique(done.value).tolist() == [len(done.peers)]
            assert len(done.peers) == 3
            trainers.end("c")
            enough.set()
            assert all(future.result(WAIT_S) > 5 for future in going)
            assert run.agree("abc") >= 5


def test_a_run_with_an_optimizer_has_collectives_between_its_steps(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:

            def train(session: Session) -> tuple[list[float], list[float]]:
                torch.manual_seed(0)
                model = torch.nn.Linear(30, 20)
                inner = torch.optim.SGD(model.parameters(), lr=0.01)
                outer = DiLoCo(model, inner, 2, session, codec="float32")
                while len(session.barrier()) < 2:
                    """The other one may still be attaching."""
                losses = []
                for step in range(12):
                    loss = model(torch.ones(4, 30) * (step + 1)).square().mean()
                    loss.backward()
                    inner.step()
                    inner.zero_grad()
                    if step % 4 == 3:
                        losses.append(session.all_reduce(loss.detach().view(1)).value.item())
                with outer.outer_parameters():
                    weights = model.weight.detach().flatten().tolist()
                assert outer.metrics()["rounds"] == 6
                return losses, weights

            found = trainers.each(train)
            assert found["a"] == found["b"]
            assert len(found["a"][0]) == 3
            # INIT, six steps, three reductions, one barrier or more
            assert run.peers["a"].status()["round"] >= 11
            assert run.agree("ab") >= 8


def test_what_cannot_be_is_refused_before_anybody_else_hears_of_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            session = trainers.sessions["a"]
            wrong = np.ones(5, np.float32)
            for call, kind, why in [
                (lambda: session.all_reduce(np.ones(3)), ConfigError, "float64"),
                (lambda: session.all_reduce(wrong, "median"), ConfigError, "op is 'median'"),
                (lambda: session.all_reduce(wrong, codec="zip"), CodecError, "no codec 'zip'"),
                (lambda: session.all_reduce(wrong, codec="randk"), ConfigError, "needs a key"),
                (lambda: session.all_reduce(wrong * np.nan), CodecError, "NaN or Inf"),
                (lambda: session.all_reduce(wrong * 1e38, "sum"), CodecError, "at most 3.3"),
            ]:
                with pytest.raises(kind, match=why):
                    trainers.start("a", call).result(WAIT_S)
            both = trainers.each(lambda s: s.all_reduce(np.full(3, 1e38, np.float32), "mean"))
            assert both["a"].value.tolist() == pytest.approx([1e38] * 3)
            int8 = trainers.each(lambda s: s.all_reduce(np.ones((7, 9), np.float32), codec="int8"))
            np.testing.assert_allclose(int8["b"].value, np.ones((7, 9)), atol=0.01)


def test_an_optimizer_of_a_run_of_collectives_is_refused_and_says_why(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        with callers(run, "a") as trainers:
            trainers.meet()
        with callers(run, "a") as again:
            spec, manifest = RunSpec(sync_every=3), Manifest.of([Parameter("w", (5,))])
            attached = again.start(
                "a",
                lambda: again.sessions["a"].channel.attach(
                    spec, manifest, lambda flat: flat.fill(1)
                ),
            )
            with pytest.raises(IncompatibleRunError, match="before a collective"):
                attached.result(WAIT_S)


def test_a_run_with_fragments_has_no_collectives(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        with callers(run, "a") as trainers:
            session = trainers.sessions["a"]
            spec = RunSpec(sync_every=3, fragments=2, rounds_in_flight=2)
            manifest = Manifest.of([Parameter("w", (10_000,))])
            trainers.start(
                "a", lambda: session.channel.attach(spec, manifest, lambda flat: flat.fill(1))
            ).result(WAIT_S)
            with pytest.raises(ConfigError, match="this run has 2 fragments"):
                trainers.start("a", session.barrier).result(WAIT_S)
