"""Show that a wait that fails, as by Ctrl+C, leaves a trainer that can be saved and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.every_method import EVERY_METHOD, SYNC_EVERY
from torch import nn

from atoll.collectives.errors import TooFewPeersError
from atoll.optim import StreamingDiLoCo, Swarm
from atoll.optim.swarm import SwarmSession


def eager(model: Any, inner: Any, peer: Any) -> Any:
    return StreamingDiLoCo(model, inner, SYNC_EVERY, peer, eager=True, codec="int8")


METHODS = {
    name: EVERY_METHOD[name]
    for name in ("DiLoCo", "LocalSGD", "SparseLoCo", "AsyncDiLoCo", "CO2", "StreamingDiLoCo")
}
METHODS["eager"] = eager


class Interrupted:
    """Fail in waits, and then forget the submission, as a channel does."""

    def __init__(self, session: SwarmSession) -> None:
        self._session, self.wait = session, session.wait

    def fail(self, error: BaseException) -> None:
        def fails(fragment: int = 0) -> Any:
            del self._session._submitted[fragment]
            raise error

        self._session.wait = fails  # type: ignore[method-assign]

    def mend(self) -> None:
        self._session.wait = self.wait  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TooFewPeersError("nobody is there")])
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_is_saved_and_goes_on_after_a_wait_that_failed(
    method: str, error: BaseException, tmp_path: Path
) -> None:
    def work(session: SwarmSession) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = METHODS[method](model, inner, session)
        waits = Interrupted(session)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(2, 3)).square().mean().backward()
                inner.step()
                inner.zero_grad()

        waits.fail(error)
        with pytest.raises((KeyboardInterrupt, TooFewPeersError)):
            train(4 * SYNC_EVERY)
        outer.state_dict()
        outer.save(tmp_path)
        assert outer.load(tmp_path)
        waits.mend()
        taken = outer.metrics()["steps"]
        train(4 * SYNC_EVERY)
        outer.finish()
        now = outer.metrics()
        assert now["steps"] == taken + 4 * SYNC_EVERY
        assert now["rounds"] >= 2
        outer.save(tmp_path)

    Swarm(1).run(work)


@pytest.mark.parametrize("method", ["StreamingDiLoCo", "CO2", "eager"])
def test_what_is_under_way_when_a_save_or_the_end_is_interrupted(
    method: str, tmp_path: Path
) -> None:
    def work(session: SwarmSession) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = METHODS[method](model, inner, session)
        if method == "StreamingDiLoCo":
            outer._delay = 1
        waits = Interrupted(session)

        def train(until: int) -> None:
            while outer.metrics()["steps"] < until:
                model(torch.ones(2, 3)).square().mean().backward()
                inner.step()
                inner.zero_grad()
                if outer._submitted:
                    return

        for until, call in ((9, lambda: outer.save(tmp_path)), (19, outer.finish)):
            train(until)
            assert outer._submitted
            waits.fail(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                call()
            assert not outer._submitted
            outer.save(tmp_path)
            waits.mend()
        for _ in range(2 * SYNC_EVERY):
            train(100)
        outer.finish()

    Swarm(1).run(work)
