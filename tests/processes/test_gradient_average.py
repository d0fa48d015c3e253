"""Trainers that exchange gradients through real daemons: equal to a swarm, and to each other after
one has come late and another has died."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.gradients import flat, loss_of, model, state_of
from harness.processes import WAIT_S, fleet, peer_id, until

from atoll.collectives.errors import DaemonLostError
from atoll.optim import DGC, GradientAverage, PowerSGD, Swarm
from atoll.optim.compressors import Compressor
from atoll.optim.experimental import EF21
from atoll.peer.client.session import Session

STEPS = 12
MAKERS: dict[str, Callable[[], Compressor | None]] = {
    "none": lambda: None,
    "power_sgd": lambda: PowerSGD(rank=2, start=3),
    "dgc": lambda: DGC(density=0.05, momentum=0.5),
    "ef21": EF21,
}
Found = tuple[torch.Tensor, torch.Tensor]


def train(
    session: Any, worker: int, name: str, goes_on: Callable[[int], bool], together: int = 0
) -> Found:
    """Parameters and inner state when ``goes_on(steps)`` is over; ``together``: wait for as many
    trainers before the first step."""
    net = model()
    momentum = 0.0 if name == "dgc" else 0.9  # which has its own
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(momentum, 0.999))
    outer = GradientAverage(net, inner, session, compressor=MAKERS[name]())
    while together and len(session.barrier()) < together:
        """The others are still attaching."""
    while goes_on(int(outer.steps)):
        inner.zero_grad()
        loss_of(net, worker, outer.steps).backward()
        inner.step()
    return flat(net), state_of(inner)


@pytest.mark.parametrize(
    "name", ["none", pytest.param("power_sgd", marks=pytest.mark.slow), "ef21"]
)
def test_three_peers_and_a_swarm_of_three_agree_bit_for_bit(tmp_path: Path, name: str) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            found = trainers.each_own(
                {n: lambda s, n=n: train(s, ord(n), name, STEPS.__gt__, 3) for n in "abc"}
            )
        homes = {n: run.peers[n].home for n in "abc"}
    order = sorted("abc", key=lambda n: peer_id(homes[n]))
    swarm = Swarm(3).run(lambda s: train(s, ord(order[s.number]), name, STEPS.__gt__))
    for n, expected in zip(order, swarm, strict=True):
        assert all(map(torch.equal, found[n], expected))


@pytest.mark.parametrize(
    "name",
    ["none", *(pytest.param(n, marks=pytest.mark.slow) for n in ("power_sgd", "dgc", "ef21"))],
)
def test_who_comes_late_and_who_comes_back_have_what_the_others_have(
    tmp_path: Path, name: str
) -> None:
    """c comes when a and b have made some steps; then b's daemon is killed, and started again with
    another trainer. All end with the same step."""
    steps: dict[str, int] = {}
    last = {"step": 10**9}

    def work(n: str, session: Session) -> Found:
        def goes_on(number: int) -> bool:
            steps[n] = number
            return number < last["step"]

        return train(session, ord(n), name, goes_on)

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:

            def start(n: str) -> Future[Found]:
                session = trainers.sessions[n]
                return trainers.start(n, lambda: work(n, session))

            def come_to(n: str, step: int) -> None:
                """It fails where a trainer has."""

                def there() -> bool:
                    for future in made.values():
                        if future.done():
                            future.result()
                    return steps.get(n, 0) > step

                until(there, f"{n} trains beyond step {step}", run.peers[n])

            made = {n: start(n) for n in "ab"}
            try:
                come_to("a", 5)
                run.join("c")
                run.sees("c", 3)
                trainers.add("c")
                made["c"] = start("c")
                come_to("c", 5)
                run.peers["b"].kill()
                with pytest.raises(DaemonLostError):
                    made.pop("b").result(WAIT_S)
                trainers.end("b")
                come_to("a", steps["b"] + 3)
                run.restart("b")
                run.sees("b", 3)
                trainers.add("b")
                steps["b"], before = 0, steps["a"]
                made["b"] = start("b")
                come_to("b", before)
                last["step"] = max(steps.values()) + 200  # which nobody has passed meanwhile
                found = {n: future.result(WAIT_S) for n, future in made.items()}
            finally:
                last["step"] = 0
    for n in "bc":
        assert all(map(torch.equal, found["a"], found[n])), n
