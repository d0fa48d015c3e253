"""Try every method, collectives, audits and archives where peers can only dial out.

That is one of three; or two, which reach each other through a witness that relays, and do not meet
directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.every_method import EVERY_METHOD, WITH_OPTIMIZER
from harness.labnet import LabNet
from harness.processes import WAIT_S, Fleet, fleet, until
from torch import nn

from atoll.optim import DiLoCo
from atoll.peer.checkpoint.reader import candidates
from atoll.peer.client.session import Session
from atoll.peer.lab.lab import Lab

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

NAMES, OUTBOUND = "abc", "c"
OVER_A_RELAY = "two over a relay"
FULL_ROUNDS = 3  # with everybody, as each of them sees it
GROUPS = {"NoLoCo": 2}  # how many are in a step of those methods where it is not everybody


@pytest.fixture(
    scope="module",
    params=[{2: "restricted"}, {1: "symmetric", 2: "symmetric"}],
    ids=["one", OVER_A_RELAY],
)
def lab(routers: None, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(3, rate_mbit=100.0, rtt_ms=10.0, nat=request.param) as made:
        yield made


def relays(name: str) -> tuple[str, ...]:
    """Return the options of a daemon: who can be dialled relays."""
    return ("--relay", "100") if name == "a" else ()


def are_linked(run: Fleet, name: str) -> bool:
    """Return whether a peer has a link to every other one."""
    others = [one for one in run.peers[name].status()["members"] if not one["you"]]
    return len(others) == len(NAMES) - 1 and all(one["state"] == "connected" for one in others)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> str:
    """Return who trains."""
    return "bc" if OVER_A_RELAY in request.node.name else NAMES


@pytest.fixture
def run(lab: Lab, names: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleet(tmp_path, LabNet(lab)) as made:  # type: ignore[arg-type]  # as much as needed
        made.options = lambda name: (
            (*relays(name), "--witness") if name not in names else relays(name)
        )
        made.form(NAMES)
        if OVER_A_RELAY in request.node.name:
            until(lambda: all(are_linked(made, n) for n in names), "they have met at the relay")
        yield made
        if OVER_A_RELAY in request.node.name:
            circuits = made.peers["a"].status()["relay"]["circuits"]
            assert any(one["bulk"] for one in circuits), "data of the two have gone through it"


def model(seed: int = 1) -> nn.Module:
    """Make a model without the global generators: real trainers share a process here."""
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 8)
    return net


def loop(method: str, session: Session) -> tuple[Any, Callable[[], object]]:
    """Return a method and its training step."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    outer = EVERY_METHOD[method](net, inner, session)
    random = torch.Generator().manual_seed(hash(session.peer_name) % 2**31)

    def loss() -> torch.Tensor:
        features = torch.randn(8, 40, generator=random)
        return (net(features) - features[:, :10]).square().mean()

    def step() -> None:
        if method == "ZerothOrder":
            outer.step(loss)
            return
        optimizer = inner if method in WITH_OPTIMIZER else outer
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return outer, step


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_trains_with_peers_that_can_only_dial_out(
    run: Fleet, names: str, method: str
) -> None:
    """Everybody sees rounds of everybody, and goes on until all have."""
    full = GROUPS.get(method, len(names))
    seen = dict.fromkeys(names, 0)
    begin_s = time.monotonic()

    def train(session: Session, name: str) -> None:
        outer, step = loop(method, session)
        counted = 0.0
        while min(seen.values()) < FULL_ROUNDS:
            assert time.monotonic() - begin_s < WAIT_S, seen
            step()
            metrics = outer.metrics()
            alike = ("rounds", "outer_steps", "outer_step", "turn", "steps")
            number = next(metrics[name] for name in alike if name in metrics)
            if number > counted and metrics["peers"] >= full:
                seen[name] += 1
            counted = number
        session.close()  # or the others would wait for it

    with callers(run, names) as trainers:
        trainers.each_own({n: lambda s, n=n: train(s, n) for n in names})


def test_collectives_of_a_session_with_peers_that_can_only_dial_out(run: Fleet, names: str) -> None:
    vector = torch.arange(200_000, dtype=torch.float32)

    def in_all(call: Callable[[str, Session], Any]) -> list[Any]:
        """Make a call in all sessions until it has been one of everybody's; return the results."""

        def call_in(name: str) -> Any:
            while True:
                found, peers = call(name, trainers.sessions[name])
                if len(peers) == len(names):
                    return found

        begun = [trainers.start_until_in(n, lambda n=n: call_in(n)) for n in names]
        return [future.result(WAIT_S) for future in begun]

    with callers(run, names) as trainers:
        values = {name: float(2**place) for place, name in enumerate(names)}

        def sums(name: str, session: Session) -> tuple[Any, Any]:
            reduced = session.all_reduce(vector * values[name], op="sum")
            return reduced.value, reduced.peers

        def gathered(name: str, session: Session) -> tuple[Any, Any]:
            parts = session.all_gather(name.encode())
            return sorted(data for _, data in parts), parts

        in_all(lambda name, session: (None, session.barrier()))
        for found in in_all(sums):
            assert torch.equal(found, sum(values.values()) * vector)
        assert in_all(gathered) == len(names) * [[name.encode() for name in names]]


def test_audited_rounds_with_peers_that_can_only_dial_out(run: Fleet, names: str) -> None:
    start = threading.Barrier(len(names))

    def train(session: Session) -> torch.Tensor:
        net = nn.Linear(200, 400, bias=False)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        outer = DiLoCo(net, inner, 1, session, audit=True)
        while not all(member.get("attached", True) for member in session.status()["members"]):
            time.sleep(0.05)
        start.wait(WAIT_S)
        while session.round < 1 + FULL_ROUNDS:
            net.weight.grad = torch.ones_like(net.weight)
            inner.step()
        with outer.outer_parameters():
            return net.weight.detach().clone()

    with callers(run, names) as trainers:
        found = trainers.each(train)
    assert all(torch.equal(found[OUTBOUND], other) for other in found.values())
    for peer in run.peers.values():
        assert not peer.status()["admission"].get("banned")
    assert f"{len(names)} peers" in run.peers[OUTBOUND].text


def test_an_archive_that_can_only_dial_out_keeps_checkpoints_and_serves(
    lab: Lab, tmp_path: Path
) -> None:
    """Let a peer that comes back load what it lacks while the archive follows."""
    with fleet(tmp_path, LabNet(lab)) as run:  # type: ignore[arg-type]  # as much as needed
        run.options = relays
        run.form("ab")
        folder = tmp_path / "kept"
        archive = run.start(
            OUTBOUND, "follow", run.invite, "--checkpoint", str(folder), "--every", "2"
        )
        for name in "ab":
            run.train(name, inner_s=0.2)
        archive.reaches(3)
        until(lambda: folder.is_dir() and candidates(folder), "it keeps a checkpoint", archive)
        run.peers["b"].kill()
        run.sees("a", 1)
        run.restart("b")
        run.sees("b", 2)
        number = run.peers["b"].reaches(run.peers["a"].status()["round"])["round"]
        archive.reaches(number)
        assert run.agree("abc") >= 1
