"""NoLoCo with real daemons: partners, deaths, newcomers, stragglers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.callers import Callers, callers
from harness.processes import WAIT_S, Fleet, fleet, peer_id, until
from torch import nn

from atoll.collectives.errors import ConfigError, ConnectError, DaemonLostError, RoundTimeoutError
from atoll.optim import NoLoCo, Swarm
from atoll.peer.client.session import Session

SYNC_EVERY, STEPS = 3, 8
LONG_S = 100.0  # for partners of which none is late: only a hang exceeds it


class Loop:
    """A replica and its training loop; without the global generators of random numbers, because
    real trainers share a process here."""

    def __init__(self, session: Any, worker: int, **options: Any) -> None:
        self._random = torch.Generator().manual_seed(1000 + worker)
        self.net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=self._random) / 8)
        self._inner = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.begun = self.parameters  # its own, before it takes over another's
        self.outer = NoLoCo(self.net, self._inner, SYNC_EVERY, session, **options)

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def outer_step(self) -> dict[str, float]:
        for _ in range(SYNC_EVERY):
            features = torch.randn(8, 40, generator=self._random)
            (self.net(features) - features[:, :10]).square().mean().backward()
            self._inner.step()
            self._inner.zero_grad()
        return self.outer.metrics()


def train(session: Any, worker: int, steps: int, begin: Callable[[], object]) -> torch.Tensor:
    loop = Loop(session, worker, codec="int8", partner_wait_s=LONG_S)
    begin()
    for _ in range(steps):
        assert loop.outer_step()["solo"] == 0
    return loop.parameters


def test_four_peers_and_a_swarm_of_four_agree_bit_for_bit(tmp_path: Path) -> None:
    names, here = "abcd", threading.Barrier(4)
    with fleet(tmp_path) as run:
        run.form(names)
        with callers(run, names) as trainers:
            # Who begins the run publishes its parameters as it begins; the others take them over.
            first = trainers.start("a", lambda: Loop(trainers.sessions["a"], 0, codec="int8"))
            first.result(WAIT_S).outer._unhook()
            trainers.end("a")
            trainers.add("a")
            found = trainers.each_own(
                {
                    n: lambda s, n=n: train(s, ord(n), STEPS, lambda: here.wait(WAIT_S))
                    for n in names
                }
            )
            assert run.peers["a"].status()["round"] == 1  # nothing is decided by the group
        homes = {name: run.peers[name].home for name in names}
    order = sorted(names, key=lambda name: peer_id(homes[name]))

    def one(session: Any) -> torch.Tensor:
        name = order[session.number]
        if session.number == 0:  # in the place of the first trainer of the run
            with Loop(session, 0, codec="int8").outer:
                pass
        return train(session, ord(name), STEPS, session.barrier)

    swarm = Swarm(4).run(one)
    for name, expected in zip(order, swarm, strict=True):
        assert torch.equal(found[name], expected)
    assert not torch.equal(swarm[0], swarm[1])


class Going:
    """Trainers that go on until they are told to stop; ``seen`` has the last metrics of each."""

    def __init__(self, trainers: Callers) -> None:
        self._trainers = trainers
        self.enough = threading.Event()
        self.seen: dict[str, dict[str, float]] = {}
        self.loops: dict[str, Loop] = {}
        self.futures: dict[str, Any] = {}

    def go(self, name: str, **options: Any) -> None:
        session = self._trainers.sessions[name]

        def work() -> None:
            loop = self.loops[name] = Loop(session, ord(name), **options)
            while not self.enough.is_set():
                self.seen[name] = loop.outer_step()

        self.futures[name] = self._trainers.start(name, work)

    def until(self, what: str, condition: Callable[[], object], run: Fleet) -> None:
        def there() -> object:
            for future in self.futures.values():
                if future.done() and not self.enough.is_set():
                    future.result()
            return condition()

        until(there, what, *run.peers.values())

    def steps(self, name: str) -> float:
        return self.seen[name]["outer_steps"] if name in self.seen else 0

    def exchanged(self, name: str) -> float:
        """Outer steps with a partner."""
        return self.steps(name) - self.seen[name]["solo"] if name in self.seen else 0

    def stop(self, names: str) -> None:
        self.enough.set()
        for name in names:
            self.futures[name].result(WAIT_S)


@pytest.mark.slow
def test_one_is_killed_and_the_others_find_new_partners(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abcd")
        with callers(run, "abcd") as trainers:
            going = Going(trainers)
            for name in "abcd":
                going.go(name, partner_wait_s=5.0)
            going.until("all exchange", lambda: all(going.exchanged(n) > 3 for n in "abcd"), run)
            run.peers["b"].kill()
            with pytest.raises(DaemonLostError):
                going.futures.pop("b").result(WAIT_S)
            for name in "acd":
                run.sees(name, 3)
            before = {name: going.exchanged(name) for name in "acd"}
            going.until(
                "the others exchange",
                lambda: all(going.exchanged(n) > before[n] + 3 for n in "acd"),
                run,
            )
            going.stop("acd")
            gone = trainers.names["b"]
            assert all(gone not in going.loops[name].outer._group for name in "acd")
            # Of three, one is alone at a time.
            assert all(going.seen[name]["solo"] for name in "acd")


def test_a_newcomer_takes_over_the_newest_parameters(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            going = Going(trainers)
            for name in "ab":
                going.go(name, codec="float32", partner_wait_s=2.0)
            going.until("both train", lambda: min(map(going.steps, "ab")) > 5, run)
            going.stop("ab")  # so that their parameters stay as they are
            run.join("c")
            run.sees("c", 3)
            late = trainers.add("c")
            loop = trainers.start("c", lambda: Loop(late, 7, codec="float32")).result(WAIT_S)
            newest = max("ab", key=lambda name: going.seen[name]["outer_step"])
            assert loop.outer.metrics()["outer_step"] == going.seen[newest]["outer_step"]
            others = [going.loops[name].outer.state_dict() for name in "ab"]
            mine = loop.outer.state_dict()
            assert any(torch.equal(mine["phi"], other["phi"]) for other in others)
            assert not mine["momentum"].any()
            assert not torch.equal(loop.parameters, loop.begun)

            # Also of trainers that have ended: their daemons still have what they published.
            trainers.end("a")
            trainers.end("b")
            trainers.end("c")
            again = trainers.add("c")
            loop = trainers.start("c", lambda: Loop(again, 8, codec="float32")).result(WAIT_S)
            assert loop.outer.metrics()["outer_step"] == going.seen[newest]["outer_step"]

            def evaluate() -> tuple[dict[str, float], dict[str, float], torch.Tensor]:
                losses = loop.outer.replica_losses(lambda: float(loop.parameters[0]))
                with loop.outer.consensus():
                    mean = loop.parameters.clone()
                return losses, loop.outer_step(), mean

            losses, metrics, mean = trainers.start("c", evaluate).result(WAIT_S)
            assert list(losses) == list(again.members().names)
            assert abs(sum(losses.values()) / 3 - float(mean[0])) < 1e-6
            assert metrics["solo"] == 1  # it needs nobody


def test_a_trainer_that_stalls_costs_its_partner_a_bounded_time(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            going = Going(trainers)
            going.go("a", partner_wait_s=0.2)
            session = trainers.sessions["b"]
            loop = trainers.start("b", lambda: Loop(session, 1, partner_wait_s=LONG_S)).result(
                WAIT_S
            )
            # It has begun, and does nothing.
            going.until("a goes on alone", lambda: going.steps("a") > 4, run)
            assert going.seen["a"]["solo"] >= 3

            going.until("a is ahead", lambda: going.seen["a"]["outer_step"] > 8, run)

            def wake() -> None:
                behind = loop.outer.metrics()["outer_step"]
                while True:
                    metrics = loop.outer_step()
                    exchanged = metrics["outer_steps"] - metrics["solo"]
                    # It has found the other one ahead, gone on from there, and met it.
                    if metrics["outer_step"] > behind + metrics["outer_steps"] and exchanged > 2:
                        return

            waking = trainers.start("b", wake)
            waking.result(WAIT_S)
            going.stop("a")
            assert going.exchanged("a") > 0


def test_vectors_of_sessions(tmp_path: Path) -> None:
    """What a method is made of, and what is refused."""
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            trainers.meet()
            names = trainers.names
            values = np.linspace(-1, 1, 70_000, dtype=np.float32)
            members = trainers.each(lambda session: session.members())
            assert members["a"] == members["b"]
            assert set(members["a"].names) == set(names.values())

            def give(session: Session) -> np.ndarray:
                given = values.copy()
                session.channel.publish("v", 3, given, "int8")
                return given

            def take(session: Session) -> np.ndarray:
                asked = session.channel.ask_vector(names["a"], "v", 3, values.size, "int8")
                asked.wait(LONG_S)
                taken = asked.read().copy()
                np.testing.assert_array_equal(asked.read(), taken)  # it may be read again
                asked.drop()
                return taken

            taking = trainers.start("b", lambda: take(trainers.sessions["b"]))
            seen = trainers.start("a", lambda: give(trainers.sessions["a"])).result(WAIT_S)
            np.testing.assert_array_equal(taking.result(WAIT_S), seen)
            assert 0 < np.abs(seen - values).max() < 0.01

            def refused(session: Session) -> None:
                assert session.channel.newest(names["a"], "v") == 3
                assert session.channel.newest(names["b"], "v") == 0
                with pytest.raises(RoundTimeoutError, match=f"v 4 of {names['a']} has not been"):
                    session.channel.ask_vector(names["a"], "v", 4, values.size, "int8").wait(0.1)
                with pytest.raises(ConnectError, match="nobody is not in the view"):
                    session.channel.ask_vector("nobody", "v", 4, 5, "int8")
                with pytest.raises(ConfigError, match="positive number"):
                    session.channel.publish("v", 0, values.copy())
                with pytest.raises(ConfigError, match="up to 32"):
                    session.channel.newest(names["a"], "v" * 33)
                with pytest.raises(ConfigError, match="needs a key"):
                    session.channel.publish("v", 1, values.copy(), "randk")

            trainers.start("b", lambda: refused(trainers.sessions["b"])).result(WAIT_S)
