"""Two FSDP2 ranks whose clocks differ decide alike, and submit one pseudo-gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rank_clocks import STEP_S, by_speed, that_waits
from harness.rank_methods import Net
from harness.rank_model import model
from harness.rank_processes import two_ranks
from torch import nn

from atoll.optim import Swarm
from atoll.optim.methods import streaming


def check(
    folder: Path, function: str, net: nn.Module, train: Callable[[nn.Module, Any], list[int]]
) -> list[int]:
    """What both ranks have found, and a single process with the clock of the first one."""
    found = two_ranks(folder, "rank_clocks", function)
    (expected,) = Swarm(1).run(lambda session: train(net, session))
    assert [decided for decided, _ in found] == [expected] * 2
    parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
    for _, values in found:
        torch.testing.assert_close(torch.tensor(values), parameters, rtol=0, atol=2e-6)
    return expected


def test_the_first_rank_decides_how_many_steps_a_round_has(tmp_path: Path) -> None:
    found = check(
        tmp_path, "ranks_by_speed", model(), lambda net, s: by_speed(net, s, None, STEP_S[0])
    )
    assert found == [4, 9, 14]  # 4 steps at first, then five seconds at one step per second


def test_the_first_rank_decides_when_fragments_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "time", streaming.time)  # put back afterwards
    found = check(tmp_path, "ranks_that_wait", Net(), lambda net, s: that_waits(net, s, STEP_S[0]))
    assert found[0] < found[-1]
