"""Two FSDP2 ranks whose clocks differ: both take as many steps, and submit one pseudo-gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness.processes import WAIT_S
from harness.rank_model import BATCH, SYNC_EVERY, loss_of, model

from atoll.optim import AsyncDiLoCo, Swarm

STEPS = 14  # a round of 4 steps, then of 5 and of 5: five seconds at one step per second
RANK = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from atoll.optim import Swarm, RankSession
from harness.rank_model import model
sys.path.insert(0, sys.argv[3])
from test_rank_clocks import train

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], world_size=2, rank=rank)
net = model()
for layer in net:
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
if rank == 0:  # the run of a single peer, in this process
    (ends,) = Swarm(1).run(lambda session: train(net, RankSession(session), rank, 1.0))
else:
    ends = train(net, RankSession(None), rank, 3.0)
own = torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])
print(json.dumps([ends, own.tolist()]), flush=True)
dist.destroy_process_group()
"""


def train(net: torch.nn.Module, session: Any, rank: int | None, step_s: float) -> list[int]:
    """After which steps rounds ended. ``step_s``: of a step, by this rank's clock."""
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    now_s, ends = [0.0], []
    options = {"outer_delay": 2, "codec": "float32", "round_s": 5.0, "clock": lambda: now_s[0]}
    outer = AsyncDiLoCo(net, inner, SYNC_EVERY, session, **options)
    for step in range(STEPS):
        outer.count(BATCH)
        loss_of(net, 0, step, rank).backward()
        now_s[0] += step_s
        before = outer.metrics()["rounds"]
        inner.step()
        inner.zero_grad()
        if outer.metrics()["rounds"] > before:
            ends.append(step + 1)
    return ends


def test_the_first_rank_decides_how_many_steps_a_round_has(tmp_path: Path) -> None:
    script, here = tmp_path / "rank.py", Path(__file__).parent
    script.write_text(RANK)
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), str(here)], stdout=subprocess.PIPE, text=True, env=env
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        found = [json.loads(rank.communicate(timeout=WAIT_S)[0]) for rank in ranks]
    assert [ends for ends, _ in found] == [[4, 9, 14]] * 2
    net = model()
    Swarm(1).run(lambda session: train(net, session, None, 1.0))
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for _, values in found:
        torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=2e-6)
