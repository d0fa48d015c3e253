"""Two peers of two ranks each: DDP and FSDP2 with gloo, one daemon for both ranks of a peer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import WAIT_S, fleet
from harness.rank_model import BATCH, ROUNDS, SYNC_EVERY, loss_of, model

from atoll.optim import DiLoCo, Swarm

RANK = """
import json, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
import atoll
from atoll.optim import DiLoCo, RankSession
from harness.rank_model import BATCH, ROUNDS, SYNC_EVERY, loss_of, model

kind, home, peer, port, rank = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
net = model()
if kind == "ddp":
    net = DistributedDataParallel(net)
else:
    for layer in net:
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
session = atoll.connect(home) if rank == 0 else None
outer = DiLoCo(net, inner, SYNC_EVERY, RankSession(session), codec="float32")
while session is not None and not all(
    member.get("attached", True) for member in session.status()["members"]
):
    time.sleep(0.05)
print("here", flush=True)
sys.stdin.readline()
for step in range(ROUNDS * SYNC_EVERY):
    outer.count(BATCH // 2 * (1 + peer))
    loss_of(net, peer, step, rank).backward()
    inner.step()
    inner.zero_grad()
own = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
print(json.dumps(torch.cat([p.detach().flatten() for p in own]).tolist()), flush=True)
assert outer.metrics()["missed"] == 0
dist.barrier()
outer.close()
dist.destroy_process_group()
"""


def train(session: Any, peer: int) -> torch.Tensor:
    """The same without ranks: the mean of equal halves is the mean of the batch."""
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    outer = DiLoCo(net, inner, SYNC_EVERY, session, codec="float32")
    for step in range(ROUNDS * SYNC_EVERY):
        outer.count(BATCH * (1 + peer))
        loss_of(net, peer, step).backward()
        inner.step()
        inner.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks_share_a_daemon_and_hold_the_same(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with fleet(tmp_path) as run, ExitStack() as stack:
        run.form("ab")
        homes = [str(run.peers[name].home) for name in "ab"]
        ranks = [
            stack.enter_context(started(script, kind, homes[peer], peer, port, rank))
            for peer, port in enumerate(free_ports(2))
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "here\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        found = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 4
    vectors = [torch.tensor(json.loads(line)) for line in found]
    assert all(torch.equal(vectors[0], other) for other in vectors[1:])
    expected = Swarm(2).run(lambda session: train(session, session.number))[0]
    torch.testing.assert_close(vectors[0], expected, rtol=0, atol=2e-6)


@contextmanager
def started(script: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(script), *map(str, arguments)]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def free_ports(count: int) -> list[int]:
    """For rank 0 of each peer to listen on, in a moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
