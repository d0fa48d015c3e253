"""What a training script meets first: nothing is attached, and no run founded, before all that can
be checked on this machine is right; and another base model is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.every_method import EVERY_METHOD, WITH_OPTIMIZER
from harness.processes import WAIT_S, fleet
from torch import nn

import atoll
from atoll.collectives.errors import ConfigError, IncompatibleRunError, NoDaemonError


class ByName(torch.optim.Optimizer):
    """As wrappers of some libraries are: of the class, and never initialised."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside

    @property
    def param_groups(self) -> Any:
        return self.inside.param_groups


def test_what_cannot_train_founds_no_run(tmp_path: Path) -> None:
    """In every method: an optimizer without hooks, and what is none."""
    with fleet(tmp_path) as run:
        home = run.up("a").home
        for name, make in WITH_OPTIMIZER.items():
            for kind in (ByName, Wrapped, lambda inner: [inner, ByName(inner)]):
                model = nn.Linear(2, 2)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                with closing(atoll.connect(home)) as session:
                    with pytest.raises(ConfigError, match="Optimizer") as caught:
                        make(model, kind(inner), session)
                assert "give the torch.optim.Optimizer" in caught.value.fix, name
                assert hooks(inner) == 0, name
        for make in EVERY_METHOD.values():
            model = nn.Linear(2, 2)
            model.bias = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
            inner = torch.optim.SGD([model.weight], lr=0.1)
            with closing(atoll.connect(home)) as session:
                with pytest.raises(ConfigError, match="frozen parameter bias"):
                    make(model, inner, session)
            assert hooks(inner) == 0
        status = run.peers["a"].status()
        assert status["round"] == 0
        assert status["trainer"] is None


class Wrapped:
    """A wrapper of a library that nobody has heard of."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optimizer = inside


def hooks(inner: torch.optim.Optimizer) -> int:
    return len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks)


@pytest.mark.parametrize("method", ["DiLoCo", "GradientAverage", "Population", "NoLoCo"])
def test_no_hook_stays_where_attaching_fails(tmp_path: Path, method: str) -> None:
    with fleet(tmp_path) as run:
        home = run.up("a").home
        first, other = nn.Linear(2, 2), nn.Linear(2, 2)
        first.register_buffer("table", torch.zeros(3))
        with EVERY_METHOD[method](first, sgd(first), atoll.connect(home)):
            pass
        inner = sgd(other)
        with closing(atoll.connect(home)) as session:
            with pytest.raises(IncompatibleRunError, match="table: yours missing, run buffer 3"):
                EVERY_METHOD[method](other, inner, session)
            assert run.peers["a"].status()["trainer"] is None
        assert hooks(inner) == 0
        assert not hasattr(inner, "_step_supports_amp_scaling")
        other(torch.ones(2)).sum().backward()
        inner.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def adapted(base: int) -> nn.Module:
    """A frozen layer, and one that is trained."""
    torch.manual_seed(base)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def test_peers_with_different_bases_do_not_train_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        homes = [run.peers[name].home for name in "ab"]
        first, second = adapted(1), adapted(2)
        with atoll.DiLoCo(first, sgd(first), 2, atoll.connect(homes[0])):
            with closing(atoll.connect(homes[1])) as session:
                with pytest.raises(IncompatibleRunError) as caught:
                    atoll.DiLoCo(second, sgd(second), 2, session)
                assert "0.bias: yours 4 float32 with values" in caught.value.what
                assert "0.weight: yours 4x4 float32 with values" in caught.value.what
                assert "1." not in caught.value.what.replace("demo:", "")
                same = adapted(1)
                atoll.DiLoCo(same, sgd(same), 2, session)
            capsys.readouterr()
            with closing(atoll.connect(homes[1])) as session:
                atoll.DiLoCo(second, sgd(second), 2, session, frozen="warn")
                assert torch.equal(first[1].weight, second[1].weight)
                assert not torch.equal(first[0].weight, second[0].weight)
            assert "0.weight: yours 4x4 float32 with values" in capsys.readouterr().err


# ---------------------------------------------------------------- atoll.attach

SCRIPT = """
import sys
from contextlib import closing
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import atoll

home, *groups = sys.argv[1:]
if groups:
    dist.init_process_group(groups[0])
peer = atoll.attach(home)
ranks = dist.get_world_size() if dist.is_initialized() else 1
net = torch.nn.Linear(4, 4)
if ranks > 1:
    net = DistributedDataParallel(net)
inner = torch.optim.SGD(net.parameters(), lr=0.1)
with atoll.DiLoCo(net, inner, 2, peer, round_s=1e-6, clock=iter(range(10**6)).__next__) as outer:
    for step in range(8):
        net(torch.ones(3, 4)).square().mean().backward()
        inner.step()
        inner.zero_grad()
    assert outer.metrics()["steps"] == 8
    print(f"{type(peer).__name__} of {ranks}, round {peer.round}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def start(folder: Path, ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``SCRIPT`` under torchrun, or without it where there is one rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(script), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, env=env)


@pytest.mark.parametrize("arguments", [(), ("gloo",)], ids=["group-made", "group-given"])
def test_ranks_of_torchrun_attach_with_one_call(tmp_path: Path, arguments: tuple[str]) -> None:
    with fleet(tmp_path) as run:
        done = start(tmp_path, 2, run.up("a").home, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("RankSession of 2, round 8") == 2, done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith("atoll: ")]
        assert len(lines) == len(set(lines)), lines  # for people: once, not by each rank
        assert any("16 parameters" in line or "20 parameters" in line for line in lines)
        assert any("local steps here" in line for line in lines)


def test_one_process_attaches_with_the_same_call(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        home = run.up("a").home
        done = start(tmp_path, 1, home)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Session of 1, round ")
        with pytest.raises(NoDaemonError):
            atoll.attach(tmp_path / "none", timeout_s=0.1)


def test_all_ranks_end_where_there_is_no_daemon(tmp_path: Path) -> None:
    done = start(tmp_path, 2, tmp_path / "none")
    assert done.returncode == 1
    assert "ATOLL-E81" in done.stderr
