"""ZerothOrder in a swarm: one byte for a sample, the same bits on all peers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from harness.zeroth_order import OPTIONS, WORKERS, all_equal, flat, loss_of, model, sampled, train

from atoll.collectives.errors import (
    CodecError,
    ConfigError,
    IncompatibleRunError,
    RemoteProtocolError,
)
from atoll.optim import Swarm, ZerothOrder
from atoll.optim.every_step import zeroth_order
from atoll.optim.every_step.log import EveryStepLog, Record
from atoll.optim.swarm import SwarmSession

# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("seeds", [(0, 0, 0), (1, 2, 3)], ids=["alike", "different"])
def test_all_peers_have_the_same_bits_and_so_has_the_next_run(seeds):
    found = Swarm(WORKERS).run(lambda s: train(s, seed=seeds[s.number]))
    again = Swarm(WORKERS).run(lambda s: train(s, seed=seeds[s.number]))
    assert all_equal([*found, *again])


def test_steps_are_those_of_the_formula():
    """With numpy, from the definition: the first step is the first peer's alone."""
    steps, lr = 3, 0.02
    found = Swarm(2).run(lambda session: train(session, steps))
    net = model()
    theta = flat(net).numpy()
    for step in range(steps):
        total, count = np.zeros_like(theta), 0
        for difference, z in sampled(net, theta, step, 2):
            total += np.float32(difference) * z
            count += 1
        theta = theta - np.float32(np.float32(lr) / math.sqrt(count)) * total
    assert found[0][0].numpy().tobytes() == theta.tobytes()


def test_evaluating_leaves_every_bit_of_the_parameters():
    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = ZerothOrder(net, session, 0.0, **{**OPTIONS, "epsilon": 0.3})
        before = flat(net)
        for step in range(5):
            loss = optimizer.step(loss_of(net, 0, step))
            assert math.isfinite(loss)
        assert torch.equal(flat(net), before)
        assert all(p.grad is None for p in net.parameters())

    Swarm(1).run(each)


def test_pieces_are_no_part_of_the_result(monkeypatch):
    whole = Swarm(2).run(train)
    monkeypatch.setattr(zeroth_order, "PIECE_ELEMENTS", 7)
    assert all_equal([*whole, *Swarm(2).run(train)])


def test_10_the_order_of_arrival_changes_nothing():
    """What step() makes of parts in any order, as parameters and as log."""

    class Reversing(ZerothOrder):
        def _gather_step(self, data: bytes) -> list[tuple[str, bytes]]:
            return super()._gather_step(data)[::-1]

    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        net = model()
        kind = Reversing if session.number == 1 else ZerothOrder
        optimizer = kind(net, session, 0.02, **OPTIONS)
        for step in range(5):
            optimizer.step(loss_of(net, session.number, step))
        return flat(net), optimizer

    assert all_equal(Swarm(WORKERS).run(each))


def test_10_a_replay_of_the_log_reproduces_the_hash():
    (_, optimizer), *_ = Swarm(WORKERS).run(train)
    log = optimizer._log.since(0)

    def replay(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        net = model()
        again = ZerothOrder(net, session, 0.02, **OPTIONS)
        for record, data in Record.split(log):
            again._add(record, data)
        assert again._digest() == optimizer._digest()
        return flat(net), again

    found = Swarm(1).run(replay)
    assert found[0][1]._log.chain == optimizer._log.chain
    swapped = Record.split(log)
    swapped[2], swapped[3] = swapped[3], swapped[2]
    log = b"".join(data for _, data in swapped)
    with pytest.raises(AssertionError):
        Swarm(1).run(replay)


def test_it_learns():
    losses: list[float] = []

    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, samples=3)
        for step in range(90):
            losses.append(optimizer.step(loss_of(net, session.number, step)))

    Swarm(2).run(each)
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])


def test_a_parameter_of_bfloat16():
    def each(session: SwarmSession) -> torch.Tensor:
        net = model().bfloat16()
        optimizer = ZerothOrder(net, session, 0.5, **{**OPTIONS, "epsilon": 0.1})
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(session.number)).bfloat16()
        for _ in range(3):
            optimizer.step(lambda: net(x).float().square().mean())
        assert all(p.dtype == torch.bfloat16 for p in net.parameters())
        return flat(net)

    first, second = Swarm(2).run(each)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(model().bfloat16()))


def test_peers_may_have_samples_of_their_own():
    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        return train(session, samples=1 + session.number, epsilon=0.01 * (1 + session.number))

    found = Swarm(WORKERS).run(each)
    assert all_equal(found)
    sizes = [
        [len(part.codes) for part in record.parts]
        for record, _ in Record.split(found[0][1]._log.since(0))
    ]
    assert sizes == [[1]] + [[1, 2, 3]] * 5


def test_the_rate_is_that_of_the_first_peer_and_others_hear_of_it(capsys):
    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, **OPTIONS)
        for step in range(4):
            optimizer.lr = 0.02 / (1 + step) if session.number == 0 else 0.02
            optimizer.step(loss_of(net, session.number, step))
        return flat(net), optimizer

    found = Swarm(2).run(each)
    assert all_equal(found)
    assert capsys.readouterr().err.count("step 1 of the run has lr 0.01, not 0.02 as here") == 1
    rates = [record.lr for record, _ in Record.split(found[0][1]._log.since(0))]
    assert rates == [pytest.approx(0.02 / (1 + step)) for step in range(4)]


def test_14_bytes_of_a_step():
    swarm = Swarm(2)

    def each(session: SwarmSession) -> int:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, samples=30)
        optimizer.step(loss_of(net, session.number, 0))
        before = swarm.encoded_bytes
        optimizer.step(loss_of(net, session.number, 1))
        return swarm.encoded_bytes - before

    # a head, number and rate of the step, and one byte for each sample
    assert max(swarm.run(each)) == 2 * (6 + 6 + 30)


def test_other_numbers_are_refused():
    with pytest.raises(IncompatibleRunError, match="seed"):
        Swarm(2).run(lambda session: ZerothOrder(model(), session, 0.1, seed=session.number))


# ---------------------------------------------------------------- malformed bytes and losses


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:5], "has 5 bytes"),
        (lambda data: data + bytes(5000), "has 5008 bytes"),
        (lambda data: data[:-1] + b"\x80", "minus zero"),
        (lambda data: data[:2] + b"\x00\x00\xc0\x7f" + data[6:], "learning rate of nan"),
        (lambda data: b"\x00\x00" + data[2:], "one number"),
    ],
)
def test_malformed_bytes_are_refused_and_named(spoil, why):
    class Spoiling(ZerothOrder):
        def _gather_step(self, data: bytes) -> list[tuple[str, bytes]]:
            is_wrong = self.peer.peer_name == "worker-1" and self.steps == 2
            return super()._gather_step(spoil(data) if is_wrong else data)

    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = Spoiling(net, session, 0.02, **OPTIONS)
        for step in range(4):
            optimizer.step(loss_of(net, session.number, step))

    with pytest.raises(RemoteProtocolError, match=why):
        Swarm(2).run(each)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_not_sent(wrong):
    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, **OPTIONS)
        before = flat(net)
        with pytest.raises(CodecError, match="losses of a sample at step 0 are"):
            optimizer.step(lambda: wrong)
        assert torch.equal(flat(net), before)

    Swarm(1).run(each)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"epsilon": 0.0}, "epsilon 0.0"),
        ({"epsilon": math.inf}, "epsilon inf"),
        ({"samples": 0}, "samples 0"),
        ({"samples": 5000}, "samples 5000"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"log_bytes": -1}, "log_bytes is -1"),
    ],
)
def test_impossible_numbers_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        Swarm(1).run(lambda session: ZerothOrder(model(), session, 0.1, **options))


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_an_impossible_rate_is_refused(lr):
    def each(session: SwarmSession) -> None:
        ZerothOrder(model(), session, lr, **OPTIONS).step(lambda: 1.0)

    with pytest.raises(ConfigError, match="lr is"):
        Swarm(1).run(each)


def test_it_is_one_of_the_methods_with_a_log():
    assert issubclass(ZerothOrder, EveryStepLog)
