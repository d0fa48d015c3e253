"""Buffers, shared by the participants of each round."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.troubled_swarm import TroubledSession, TroubledSwarm
from torch import nn

from atoll.collectives.errors import IncompatibleRunError
from atoll.optim import (
    AsyncDiLoCo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    NoLoCo,
    Population,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.buffer_sync import STALE_ROUNDS
from atoll.optim.experimental import CO2
from atoll.optim.methods.gossip import groups
from atoll.optim.model_io import ModelBuffers
from atoll.optim.swarm import SwarmSession

H = 3


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
METHODS: dict[str, Make] = {
    "diloco": lambda m, i, s: DiLoCo(m, i, H, s),
    "local sgd": lambda m, i, s: LocalSGD(m, i, H, s),
    "co2": lambda m, i, s: CO2(m, i, H, s),
    "streaming": lambda m, i, s: StreamingDiLoCo(m, i, H, s, delay=1),
}
BLOCKING = ("diloco", "local sgd")
Stats = list[torch.Tensor]


def stats(model: nn.Module) -> Stats:
    return [b.detach().clone() for b in model.buffers()]


def step(model: nn.Module, inner: torch.optim.Optimizer, worker: int, number: int) -> None:
    random = torch.Generator().manual_seed(100 * worker + number)
    features = worker + torch.randn(16, 8, generator=random)
    model(features).square().mean().backward()
    inner.step()
    inner.zero_grad()


def test_after_a_round_all_have_the_mean_of_all() -> None:
    before: dict[int, list[Stats]] = {n: [] for n in range(3)}
    after: dict[int, list[Stats]] = {n: [] for n in range(3)}

    def each(session: SwarmSession) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = DiLoCo(model, inner, H, session)
        for number in range(4 * H):
            outer.count(1 + session.number)
            if session.number == 2 and number == 4:  # a forward pass that is no step
                model(torch.randn(4, 8))
            hook = inner.register_step_pre_hook(
                lambda *_: before[session.number].append(stats(model))
            )
            step(model, inner, session.number, number)
            hook.remove()
            after[session.number].append(stats(model))

    Swarm(3).run(each)
    for number in range(H - 1, 4 * H, H):
        was = [before[n][number] for n in range(3)]
        for place in range(3):
            is_now = [after[n][number][place] for n in range(3)]
            assert all(torch.equal(one, is_now[0]) for one in is_now)
            if is_now[0].is_floating_point():
                mean = sum((n + 1) / 6 * was[n][place] for n in range(3))
                torch.testing.assert_close(is_now[0], mean, rtol=1e-5, atol=1e-6)
            else:
                assert int(is_now[0]) == max(int(one[place]) for one in was)
    assert int(after[0][-1][2]) == 4 * H + 1


@pytest.mark.parametrize("ends", [False, True])
def test_peers_that_come_in_turn_have_the_newest_mean_of_all(ends: bool) -> None:
    """Each after a round of its own; ``ends``: the last worker's loop does so, early."""
    newest: dict[int, Stats] = {}
    rounds: list[tuple[list[int], bool]] = []

    def each(session: SwarmSession) -> None:
        session._local_steps = session.number  # so nobody comes together with another one
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = AsyncDiLoCo(model, inner, H, session, outer_delay=3)
        inner.register_step_pre_hook(lambda *_: before.__setitem__(slice(None), stats(model)))
        before: Stats = []
        for number in range((2 if ends and session.number == 2 else 16) * H):
            outer.count(1 + session.number)
            step(model, inner, session.number, number)
            if (number + 1) % H == 0:
                newest[session.number] = before.copy()
                mean = [
                    sum((n + 1) * values[place] for n, values in newest.items())
                    / sum(n + 1 for n in newest)
                    for place in range(2)
                ]
                is_mean = all(
                    torch.allclose(one, expected, rtol=1e-5, atol=1e-6)
                    for one, expected in zip(stats(model), mean, strict=False)
                )
                assert int(stats(model)[2]) == max(int(one[2]) for one in newest.values())
                rounds.append((sorted(newest), is_mean))

    swarm = Swarm(3)
    swarm.run(each)
    assert swarm.state.round == len(rounds) + 1
    assert [who for who, _ in rounds[:3]] == [[0], [0, 1], [0, 1, 2]]
    alike = [is_mean for _, is_mean in rounds]
    if not ends:
        assert len(alike) == 3 * 16
        assert all(alike)
    else:  # it is left out once eight rounds of three have passed since
        assert all(alike[: 6 + 3 * STALE_ROUNDS])
        assert not any(alike[6 + 3 * STALE_ROUNDS :])


@pytest.mark.parametrize("name", METHODS)
def test_buffers_stay_near_each_other(name: str) -> None:
    """Each worker has data of its own, so without it they would be three apart."""

    def each(session: SwarmSession, **options: Any) -> torch.Tensor:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        options_of = METHODS[name](model, inner, session)
        for number in range(12 * H):
            step(model, inner, session.number, number)
        assert options_of.metrics()["rounds"] >= 10
        running = model[1].running_mean
        assert isinstance(running, torch.Tensor)
        return running.clone()

    found = Swarm(3).run(each)
    spread = max(float((one - found[0]).abs().max()) for one in found)
    own = net()
    expected = torch.stack([own[0](torch.full((1, 8), float(n))).detach() for n in range(3)])
    apart = float((expected - expected[0]).abs().max())
    assert spread < 0.6 * apart
    if name in BLOCKING:
        assert spread == 0.0


def with_table() -> tuple[nn.Module, torch.Tensor]:
    """Have a table, whose values a mean of three would round, in two precisions."""
    model = net()
    table = torch.randn(500, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model.register_buffer("table", table.float())
    model.register_buffer("fine", table.clone())
    return model, table


@pytest.mark.parametrize("method", ["diloco", "streaming", "every step"])
def test_a_table_that_all_have_keeps_its_bits(method: str) -> None:
    def each(session: SwarmSession) -> None:
        model, table = with_table()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        if method == "every step":
            GradientAverage(model, inner, session, check_every=H)
        else:
            METHODS[method](model, inner, session)
        for number in range(4 * H + 1):
            step(model, inner, session.number, number)
            if number >= H:
                assert torch.equal(model.get_buffer("table"), table.float())
        assert torch.equal(model.get_buffer("fine"), table)

    Swarm(3).run(each)


def test_where_one_has_another_table_all_get_the_mean_at_every_step() -> None:
    def each(session: SwarmSession) -> torch.Tensor:
        model, table = with_table()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = GradientAverage(model, inner, session, check_every=H)
        while outer.steps < 3 * H:
            if outer.steps == 2 and session.number == 2:
                model.get_buffer("table").add_(3.0)
            step(model, inner, session.number, outer.steps)
        assert torch.equal(model.get_buffer("fine"), table)
        torch.testing.assert_close(model.get_buffer("table"), table.float() + 1)
        return model.get_buffer("table").clone()

    found = Swarm(3).run(each)
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_newcomer_begins_with_those_of_a_member() -> None:
    def each(session: TroubledSession) -> Stats:
        if session.number == 2:
            session.away(until=5)
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = DiLoCo(model, inner, H, session)
        begun = stats(model)
        while outer.global_step < 8 * H:
            step(model, inner, session.number, outer.global_step)
        return begun if session.number == 2 else stats(model)

    found = TroubledSwarm(3).run(each)
    assert int(found[2][2]) >= 3 * H
    assert float(found[2][0].abs().max()) > 0.1
    assert all(map(torch.equal, found[0], found[1]))


def test_methods_of_every_step_share_them_now_and_then() -> None:
    """A newcomer takes them over with the state, and so does everybody then."""
    every = 5
    seen: dict[int, dict[int, Stats]] = {n: {} for n in range(3)}

    def each(session: TroubledSession) -> None:
        if session.number == 2:
            session.away(until=9)
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = GradientAverage(model, inner, session, check_every=every)
        while outer.steps < 40:
            before = outer.steps
            random = torch.Generator().manual_seed(100 * session.number + before)
            model(session.number + torch.randn(16, 8, generator=random)).square().mean().backward()
            inner.step()
            inner.zero_grad()
            seen[session.number][outer.steps] = stats(model)

    TroubledSwarm(3).run(each)
    common = [s for s in sorted(seen[2]) if all(s in seen[n] for n in range(3))]
    alike = [s for s in common if torch.equal(seen[0][s][0], seen[2][s][0])]
    assert len(alike) >= (40 - common[0]) // every - 1
    assert alike[0] == common[0] > 2  # its first step, with all that it has taken over
    for number in alike:
        for place in range(3):
            assert torch.equal(seen[0][number][place], seen[1][number][place])
            assert torch.equal(seen[0][number][place], seen[2][number][place])
    assert int(seen[2][common[-1]][2]) > len(seen[2])


def test_members_of_a_population_copy_them() -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        Population(model, inner, session, lambda: float(session.number), 4, {"lr": (1e-3, 1.0)})
        for number in range(4):
            step(model, inner, session.number, number)
        return stats(model)

    found = Swarm(2).run(each)
    assert all(map(torch.equal, found[0], found[1]))


def test_replicas_average_them_in_their_groups() -> None:
    before: dict[int, list[Stats]] = {n: [] for n in range(4)}
    after: dict[int, list[Stats]] = {n: [] for n in range(4)}

    def each(session: SwarmSession) -> dict[str, float]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = NoLoCo(model, inner, H, session, codec="float32")
        session.barrier()  # all have begun
        inner.register_step_pre_hook(lambda *_: before[session.number].append(stats(model)))
        for number in range(4 * H):
            step(model, inner, session.number, number)
            after[session.number].append(stats(model))
        session.barrier()
        was = stats(model)
        running = model[1].running_mean
        assert isinstance(running, torch.Tensor)
        found = outer.replica_losses(lambda: float(running.sum()))
        assert all(map(torch.equal, stats(model), was))
        with outer.consensus():
            shown = stats(model)
        assert all(map(torch.equal, stats(model), was))
        # What others have published is as it was before they shared it.
        last = [before[n][-1] for n in range(4)]
        last[session.number] = was
        for place in range(2):
            mean = sum(one[place] for one in last) / 4
            torch.testing.assert_close(shown[place], mean, rtol=1e-5, atol=1e-6)
        assert list(found) == [f"worker-{n}" for n in range(4)]
        for n, value in enumerate(found.values()):
            assert value == pytest.approx(float(last[n][0].sum()), abs=1e-5)
        session.barrier()
        return outer.metrics()

    assert [metrics["solo"] for metrics in Swarm(4).run(each)] == [0] * 4
    for number in range(1, 5):
        for group in groups(4, 2, number):
            for place in range(3):
                was = [before[n][number * H - 1][place] for n in group]
                one, other = (after[n][number * H - 1][place] for n in group)
                assert torch.equal(one, other)
                if one.is_floating_point():
                    torch.testing.assert_close(one, (was[0] + was[1]) / 2, rtol=1e-5, atol=1e-6)
                else:
                    assert one == max(was)


def test_a_new_replica_begins_with_those_of_another() -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        if session.number == 2:
            for _ in range(40):
                session.newest("worker-0", "phi")  # lets the others go on
        outer = NoLoCo(model, inner, H, session)
        begun = stats(model)
        for number in range(19 * H if session.number < 2 else H):
            step(model, inner, session.number, number)
        assert outer.metrics()["outer_step"] > 1
        return begun

    *_, late = Swarm(3).run(each)
    assert int(late[2]) >= H
    assert float(late[0].abs().max()) > 0.1


def test_replicas_leave_them_alone_if_that_is_wanted() -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = NoLoCo(model, inner, H, session, buffers=False)
        session.barrier()
        for number in range(H):
            step(model, inner, session.number, number)
        assert outer.metrics()["solo"] == 0
        return stats(model)

    first, second = Swarm(2).run(each)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("name", METHODS)
def test_who_comes_back_has_its_own(name: str) -> None:
    def each(session: SwarmSession, at: int) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = METHODS[name](model, inner, session)
        for number in range(4 * H):
            if number == at and session.number == 1:
                saved = [copy.deepcopy(x.state_dict()) for x in (model, inner, outer)]
                outer.close()
                session = session._swarm.sessions[1] = SwarmSession(session._swarm, 1)
                inner = torch.optim.SGD((model := net()).parameters(), lr=0.01)
                outer = METHODS[name](model, inner, session)
                for thing, state in zip((model, inner, outer), saved, strict=True):
                    thing.load_state_dict(state)
            step(model, inner, session.number, number)
        return [*stats(model), *(p.detach().clone() for p in model.parameters())]

    expected, found = (Swarm(3).run(lambda s, at=at: each(s, at)) for at in (-1, H + 1))
    for one, other in zip(expected, found, strict=True):
        for mine, theirs in list(zip(one, other, strict=True))[0 if name in BLOCKING else 3 :]:
            assert torch.equal(mine, theirs)


def test_buffers_are_left_alone_if_that_is_wanted_and_all_must_want_it() -> None:
    def each(session: SwarmSession, *shares: bool) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        DiLoCo(model, inner, H, session, buffers=shares[session.number])
        for number in range(H):
            step(model, inner, session.number, number)
        return stats(model)

    first, second = Swarm(2).run(lambda session: each(session, False, False))
    assert not torch.equal(first[0], second[0])
    with pytest.raises(IncompatibleRunError, match="buffers: yours , run 3 of 13 values"):
        Swarm(2).run(lambda session: each(session, True, False))


def test_a_mask_of_infinities_is_a_constant_and_the_others_are_shared() -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)

    def each(session: SwarmSession) -> Stats:
        model = net()
        model.register_buffer("mask", mask.clone())
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = DiLoCo(model, inner, H, session)
        assert outer.spec.buffers.startswith("3 of 13 values")
        for number in range(H):
            step(model, inner, session.number, number)
        return stats(model)

    first, second = Swarm(2).run(each)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], mask)
    assert first[1].any()


def test_a_model_with_nothing_but_a_mask_shares_nothing() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    model.register_buffer("large", torch.full((3,), 1e300, dtype=torch.float64))
    buffers = ModelBuffers(model)
    assert buffers.outline == ""
    assert buffers.constants == ["large", "mask"]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_which_buffers_are_shared_does_not_depend_on_their_health(value: float) -> None:
    """Peers compare it: whoever comes back with statistics that went wrong is to be healed."""
    well, ill = net(), net()
    ill[1].running_var.fill_(value)  # type: ignore[union-attr, operator]
    assert ModelBuffers(ill).outline == ModelBuffers(well).outline
    assert ModelBuffers(ill).constants == []
    observed = nn.Sequential(torch.ao.quantization.MinMaxObserver())  # from infinity to -infinity
    assert ModelBuffers(observed).constants == []


def test_those_of_a_peer_that_have_gone_mad_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        DiLoCo(model, inner, H, session)
        for number in range(H):
            if session.number == 1 and number == H - 1:
                model.train(False)
                model[1].running_var.fill_(torch.inf)  # type: ignore[union-attr, operator]
            step(model, inner, session.number, number)
        return stats(model)

    found = Swarm(3).run(each)
    for one in found:
        assert all(bool(tensor.isfinite().all()) for tensor in one)
    assert all(map(torch.equal, found[0], found[2]))
    assert "not published: NaN or Inf in 1.running_var" in capsys.readouterr().err
