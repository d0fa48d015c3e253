"""Who joins ZerothOrder late, or misses rounds: by the log, or with the parameters."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.losing import Losing
from harness.troubled_swarm import TroubledSwarm
from harness.zeroth_order import OPTIONS, WORKERS, all_equal, flat, loss_of, model, train

from atoll.collectives.errors import (
    ConfigError,
    RemoteProtocolError,
)
from atoll.optim import Swarm, ZerothOrder
from atoll.optim.every_step.log import Record, ScalarPart
from atoll.optim.swarm import SwarmSession

# ---------------------------------------------------------------- newcomers


def joins(
    session: SwarmSession, seed: int, taken: list[str], **options: Any
) -> tuple[torch.Tensor, ZerothOrder]:
    """Worker 1 begins anew before step 4, with the parameters of ``seed``."""
    net = model()
    optimizer = ZerothOrder(net, session, 0.02, **{**OPTIONS, **options})
    while optimizer.steps < 8:
        if session.number == 1 and optimizer.steps == 4:
            net = model(seed)
            optimizer = ZerothOrder(net, session, 0.02, **{**OPTIONS, **options})
            optimizer._vector.read = spied(optimizer._vector.read, "parameters", taken)
            optimizer._replay = spied(optimizer._replay, "log", taken)
        optimizer.step(loss_of(net, session.number, optimizer.steps))
    return flat(net), optimizer


def spied(call: Callable[..., Any], name: str, taken: list[str]) -> Any:
    def noted(*arguments: Any) -> Any:
        taken.append(name)
        return call(*arguments)

    return noted


def test_10_a_joiner_with_the_first_parameters_replays_the_log():
    taken: list[str] = []
    swarm = Swarm(WORKERS)
    found = swarm.run(lambda session: joins(session, 0, taken))
    assert all_equal(found)
    assert taken == ["log"]
    assert found[1][1]._log.since(0) == found[0][1]._log.since(0)  # so it can hand it on


@pytest.mark.parametrize(("seed", "log_bytes"), [(9, 256 * 1024), (0, 40), (0, 0)])
def test_any_other_joiner_takes_the_parameters(seed, log_bytes):
    """Other ones than the run began with, or a log that does not reach back to them."""
    taken: list[str] = []
    found = Swarm(WORKERS).run(lambda session: joins(session, seed, taken, log_bytes=log_bytes))
    assert all_equal(found)
    assert taken == ["parameters"]
    assert {optimizer._log.begin for _, optimizer in found if log_bytes > 1000} <= {4}


def test_a_long_log_comes_in_pieces(monkeypatch):
    monkeypatch.setattr("atoll.optim.every_step.gather.GATHERED_BYTES_MAX", 17)
    taken: list[str] = []
    assert all_equal(Swarm(WORKERS).run(lambda session: joins(session, 0, taken)))
    assert taken == ["log"]


@pytest.mark.parametrize(
    "lost", [(4,), (5,), (5, 6), (5, 7), (5, 8), (5, 9), (5, 10), (5, 7, 10, 13)], ids=str
)
def test_who_misses_rounds_replays_them(lost):
    """Those of the replay among them: 5 is step 2; then come a flag, places, an offer, a piece."""

    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        lossy: Any = Losing(session, lost if session.number == 2 else ())
        return train(lossy, steps=8)

    found = Swarm(WORKERS).run(each)
    assert all_equal(found)
    assert {optimizer._log.begin for _, optimizer in found} == {0}  # nobody took parameters


@pytest.mark.parametrize("first", range(1, 13))
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_whatever_calls_are_missed_all_come_together(first, gap):
    """Two of them, in the beginning and within a replay too."""
    missed = {(2, first), (2, first + gap)}
    found = TroubledSwarm(WORKERS, missed).run(lambda session: train(session, steps=8))
    assert all_equal(found)


def test_who_differs_takes_the_parameters():
    """Its log is that of the others; its parameters are not."""

    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, **OPTIONS, check_every=2)
        while optimizer.steps < 8:
            if session.number == 1 and optimizer.steps == 4:
                with torch.no_grad():
                    net[0].bias[0] += 1e-3
            optimizer.step(loss_of(net, session.number, optimizer.steps))
        return flat(net), optimizer

    found = Swarm(WORKERS).run(each)
    assert all_equal(found)
    assert {optimizer._log.begin for _, optimizer in found} == {4}


def test_who_comes_back_with_its_files_gets_what_it_has_missed():
    saved: dict[str, Any] = {}

    def each(session: SwarmSession) -> tuple[torch.Tensor, ZerothOrder]:
        net = model()
        optimizer = ZerothOrder(net, session, 0.02, **OPTIONS)
        while optimizer.steps < 9:
            if session.number == 1 and optimizer.steps == 3:
                file = io.BytesIO()
                torch.save({"model": net.state_dict(), "outer": optimizer.state_dict()}, file)
                file.seek(0)
                saved.update(torch.load(file, weights_only=True))
            if session.number == 1 and optimizer.steps == 6:
                net = model(77)
                optimizer = ZerothOrder(net, session, 0.02, **OPTIONS)
                with pytest.raises(ConfigError, match="not those that this state was saved with"):
                    optimizer.load_state_dict(saved["outer"])
                net.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["outer"])
                assert optimizer.steps == 3
                optimizer._vector.read = None  # it would fail
                with pytest.raises(ConfigError, match="not a ZerothOrder state"):
                    optimizer.load_state_dict({"version": 0})
            optimizer.step(loss_of(net, session.number, optimizer.steps))
        return flat(net), optimizer

    assert all_equal(Swarm(WORKERS).run(each))


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("_place", lambda data: data[:-1], "no place in the log"),
        ("_offer", lambda data: data[:8], "offers nothing"),
        ("_offer", lambda data: data[:1] + b"\xff" * 8 + data[9:], "offers nothing"),
        ("_offer", lambda data: b"\0" + data[1:], "offers nothing"),
        ("_offer", lambda data: data + b"x", "cut off"),
        ("_offer", lambda data: data[:9], "sent 0 steps from step 0 on"),
        ("_offer", lambda data: data[:-1] + b"\x01", "is not that of its parameters"),
        ("_offer", lambda data: data[:-1] + b"\x80", "minus zero"),
        ("_offer", lambda data: data[:9] + b"\xff" + data[10:], "rate|that of its parameters"),
    ],
)
def test_a_donor_is_not_trusted(name, spoil, why):
    """Worker 0 hands the log to worker 1, which begins anew at step 2. What it gives for each of
    these the first time is of the beginning of the run, when no log is needed."""
    tag, number = {"_place": (b"l", 1), "_offer": (b"o", 1)}[name]

    class Spoiled:
        def __init__(self, session: SwarmSession) -> None:
            self._session, self._such = session, -1

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._session, attribute)

        def all_gather(self, data: bytes) -> Any:
            self._such += data[:1] == tag
            is_wrong = data[:1] == tag and self._such == number
            return self._session.all_gather(data[:6] + spoil(data[6:]) if is_wrong else data)

    def each(session: Any) -> None:
        net = model()
        given = Spoiled(session) if session.number == 0 else session
        optimizer = ZerothOrder(net, given, 0.02, **OPTIONS)
        while optimizer.steps < 5:
            if session.number == 1 and optimizer.steps == 2:
                net = model()
                optimizer = ZerothOrder(net, session, 0.02, **OPTIONS)
            optimizer.step(loss_of(net, session.number, optimizer.steps))

    with pytest.raises(RemoteProtocolError, match=why):
        Swarm(2).run(each)


def test_a_log_of_other_length_is_refused():
    def each(session: SwarmSession) -> None:
        optimizer = ZerothOrder(model(), session, 0.02, **OPTIONS)
        record = Record.of(0.5, [ScalarPart(0, b"\x40")]).to_bytes()
        with pytest.raises(RemoteProtocolError, match="donor sent 2 steps from step 0 on"):
            optimizer._replay("donor", 0, record * 2, (3, bytes(32)))

    Swarm(1).run(each)
