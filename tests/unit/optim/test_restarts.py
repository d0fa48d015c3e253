"""Who ends, is started again and loads its files goes on with the bits that it would have had."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.troubled_swarm import TroubledSession, TroubledSwarm
from torch import nn

from atoll.optim import (
    DGC,
    QSDP,
    QSR,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    ErrorFeedback,
    GradientAverage,
    LayerBits,
    LGreCo,
    LocalSGD,
    NoLoCo,
    Population,
    PowerSGD,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
    TernGrad,
    ZerothOrder,
)
from atoll.optim.experimental import CO2, EF21, EControl
from atoll.optim.swarm import SwarmSession

H, STEPS, WORKERS = 4, 25, 3


class Loop:
    """What one process has. ``take_step(n)`` is the n-th of the run."""

    outer: Any
    inner: torch.optim.Optimizer | None = None

    def __init__(self, session: SwarmSession, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.worker = session.number
        self.model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 4))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=random) / 8)

    def loss(self, step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * self.worker + step)
        features = torch.randn(8, 40, generator=random)
        return (self.model(features) - features[:, :4]).square().mean()

    @property
    def steps(self) -> int:
        return int(self.outer.metrics()["steps"])

    def take_step(self) -> None:
        assert self.inner is not None
        self.loss(self.steps).backward()
        self.inner.step()
        self.inner.zero_grad()

    def save(self) -> bytes:
        state = {"model": self.model.state_dict(), "outer": self.outer.state_dict()}
        if self.inner is not None:
            state["inner"] = self.inner.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])
        self.outer.load_state_dict(state["outer"])


Make = Callable[[SwarmSession, int], Loop]


def hooked(make: Callable[[nn.Module, torch.optim.Optimizer, Any], Any], momentum: float) -> Make:
    def loop(session: SwarmSession, seed: int) -> Loop:
        one = Loop(session, seed)
        one.inner = (
            torch.optim.SGD(one.model.parameters(), lr=0.05)
            if momentum == 0
            else torch.optim.AdamW(one.model.parameters(), lr=0.01)
        )
        one.outer = make(one.model, one.inner, session)
        return one

    return loop


def demo(session: SwarmSession, seed: int) -> Loop:
    one = Loop(session, seed)
    one.outer = DeMo(one.model, session, lr=0.01, topk=8, decay=0.9)

    def take_step() -> None:
        one.loss(one.steps).backward()
        one.outer.step()
        one.outer.zero_grad()

    one.take_step = take_step  # type: ignore[method-assign]
    return one


def zeroth(session: SwarmSession, seed: int) -> Loop:
    one = Loop(session, seed)
    one.outer = ZerothOrder(one.model, session, 0.01, samples=3)

    def take_step() -> None:
        number = one.steps
        one.outer.step(lambda: one.loss(number))

    one.take_step = take_step  # type: ignore[method-assign]
    return one


def population(session: SwarmSession, seed: int) -> Loop:
    one = Loop(session, seed)
    one.inner = torch.optim.AdamW(one.model.parameters(), lr=0.001 * (1 + 5 * session.number))
    own = {"scale": 1.0 + session.number}
    bounds = {"lr": (1e-5, 0.1), "scale": (0.1, 10.0)}
    one.outer = Population(
        one.model, one.inner, session, lambda: one.loss(10**6), H, bounds, values=own
    )
    plain = one.loss

    def loss(step: int) -> torch.Tensor:
        decay = sum(p.square().sum() for p in one.model.parameters())
        return plain(step) + 0.01 * own["scale"] * decay

    one.loss = loss  # type: ignore[method-assign]
    return one


def averaged(make: Callable[[], Any], momentum: float = 0.9) -> Make:
    return hooked(lambda m, i, s: GradientAverage(m, i, s, compressor=make()), momentum)


class Growing:
    """A penalty that remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, gap: float, moved: float) -> float:
        self.asked += 1
        return 1.0 + self.asked / 4

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = int(state["asked"])


MAKERS: dict[str, Make] = {
    "diloco": hooked(lambda m, i, s: DiLoCo(m, i, H, s), 0.9),
    "local sgd": hooked(lambda m, i, s: LocalSGD(m, i, H, s, codec="bfloat16"), 0.9),
    "qsr": hooked(lambda m, i, s: LocalSGD(m, i, QSR(a=0.02, peak_lr=0.01, base=2), s), 0.9),
    "sparse": hooked(lambda m, i, s: SparseLoCo(m, i, H, s), 0.9),
    "async": hooked(lambda m, i, s: AsyncDiLoCo(m, i, H, s, outer_delay=2), 0.9),
    "co2": hooked(lambda m, i, s: CO2(m, i, H, s, outer_momentum=0.5, clip=0.01), 0.9),
    "co2, another penalty": hooked(
        lambda m, i, s: CO2(m, i, H, s, outer_momentum=0.5, penalty=Growing()), 0.9
    ),
    "streaming": hooked(
        lambda m, i, s: StreamingDiLoCo(m, i, H, s, blocks_per_fragment=1, delay=1), 0.9
    ),
    "streaming, two under way": hooked(
        lambda m, i, s: StreamingDiLoCo(m, i, H, s, blocks_per_fragment=1, delay=3), 0.9
    ),
    "eager": hooked(
        lambda m, i, s: StreamingDiLoCo(m, i, H, s, blocks_per_fragment=1, eager=True), 0.9
    ),
    "noloco": hooked(lambda m, i, s: NoLoCo(m, i, H, s), 0.9),
    "noloco int8": hooked(lambda m, i, s: NoLoCo(m, i, H, s, codec="int8"), 0.9),
    "gradients": averaged(lambda: None),
    "power sgd": averaged(lambda: PowerSGD(rank=2, start=3)),
    "dgc": averaged(lambda: DGC(density=0.05, clip=1.0), 0.0),
    "ef21": averaged(EF21),
    "ef21 of averages": averaged(lambda: EF21(eta=0.5)),
    "weighted ef21": hooked(
        lambda m, i, s: GradientAverage(m, i, s, compressor=EF21(smoothness=1.0 + s.number)), 0.9
    ),
    "econtrol": averaged(EControl),
    "error feedback": averaged(ErrorFeedback),
    "bits": averaged(LayerBits),
    "bits chosen": averaged(lambda: LayerBits(choice=LGreCo(every=4))),
    "ranks chosen": averaged(lambda: PowerSGD(rank=2, start=3, choice=LGreCo(every=4))),
    "terngrad": averaged(TernGrad),
    "qsdp": averaged(lambda: QSDP(bits=4)),
    "demo": demo,
    "zeroth order": zeroth,
    "population": population,
}


def train(
    session: SwarmSession,
    make: Make,
    at: set[tuple[int, int]],
    steps: int = STEPS,
    folder: Path | None = None,
) -> torch.Tensor:
    """``at``: which worker is started again before which step; ``folder``: by `save` and `load`."""
    loop, swarm, left = make(session, 7), session._swarm, set(at)
    while loop.steps < steps:
        here = (session.number, loop.steps)
        if here in left:
            left.remove(here)
            own = None if folder is None else folder / str(session.number)
            saved = loop.save() if own is None else b""
            if own is not None:
                loop.outer.save(own)
            loop.outer.close()
            steps_before = session._local_steps  # its clock goes on
            session = swarm.sessions[session.number] = SwarmSession(swarm, session.number)
            session._local_steps = steps_before
            loop = make(session, 100 + loop.steps)
            if own is None:
                loop.load(saved)
            else:
                assert loop.outer.load(own)
            assert loop.steps == here[1]
        loop.take_step()
    assert not {one for one in left if one[0] == session.number}
    return torch.cat([p.detach().flatten() for p in loop.model.parameters()])


@cache
def undisturbed(name: str) -> list[torch.Tensor]:
    return Swarm(WORKERS).run(lambda session: train(session, MAKERS[name], set()))


@pytest.mark.parametrize(
    "at",
    [
        {(1, 5)},  # in the middle of a round
        {(1, 8), (0, 10), (2, 15), (1, 18), (1, 19)},  # between two rounds, and several times
        {(0, 9), (1, 9), (2, 9)},
    ],
    ids=["one", "several", "all"],
)
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_as_if_nothing_had_happened(name: str, at: set[tuple[int, int]]) -> None:
    found = Swarm(WORKERS).run(lambda session: train(session, MAKERS[name], at))
    for mine, other in zip(found, undisturbed(name), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", MAKERS)
def test_save_and_load_keep_all_of_a_trainer(name: str, tmp_path: Path) -> None:
    at = {(1, 5), (0, 9), (1, 9), (2, 9), (0, 16)}
    found = Swarm(WORKERS).run(lambda s: train(s, MAKERS[name], at, folder=tmp_path))
    for mine, other in zip(found, undisturbed(name), strict=True):
        assert torch.equal(mine, other)
    for worker in range(WORKERS):
        names = [path.name for path in (tmp_path / str(worker)).iterdir()]
        assert names == ["save-000002" if worker < 2 else "save-000001"]


@pytest.mark.parametrize("name", MAKERS)
def test_it_trains(name: str) -> None:
    """So that the other test says something."""
    (before,) = Swarm(1).run(lambda session: train(session, MAKERS[name], set(), 0))
    assert not torch.equal(undisturbed(name)[0], before)


@pytest.mark.parametrize(
    "name", ["diloco", "qsr", "sparse", "co2", "streaming", "streaming, two under way", "eager"]
)
def test_where_the_run_has_gone_on_its_parameters_win(name: str) -> None:
    make = MAKERS[name]

    def each(session: TroubledSession) -> tuple[int, torch.Tensor]:
        loop, swarm = make(session, 7), session._swarm
        while loop.outer.global_step < STEPS:
            if (session.number, loop.steps) == (1, 7):
                saved = loop.save()
                loop.outer.close()
                session.away(until=swarm.round + 3)
                fresh = swarm.sessions[1] = TroubledSession(swarm, 1)
                loop = make(fresh, 100)
                loop.load(saved)
                ours = np.zeros_like(swarm.state.theta)  # zeros are also what is between fragments
                loop.outer._vector.write(ours)
                assert ours.tobytes() == swarm.state.theta.tobytes()
                assert loop.steps == 7
                assert loop.outer.global_step > 7
            loop.take_step()
        with loop.outer.outer_parameters():
            found = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
        return loop.outer.global_step, found

    found = TroubledSwarm(WORKERS).run(each)
    assert {one[0] for one in found} == {STEPS}
    assert all(torch.equal(one[1], found[0][1]) for one in found)
