"""A script that is ended at any step and started again goes on with the bits it would have had."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from harness.grids import rest_is_slow
from harness.processes import Fleet, Process, fleet, until

SCRIPT = """
import hashlib, json, signal, sys, threading, time
import torch
import atoll
from atoll.optim.experimental import CO2

home, method, folder, steps, stops_at = sys.argv[1:4] + list(map(int, sys.argv[4:6]))
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
torch.manual_seed(int(sys.argv[6]))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
peer = atoll.connect(home)
outer = {
    "DiLoCo": lambda: atoll.DiLoCo(model, inner, 4, peer),
    "CO2": lambda: CO2(model, inner, 4, peer, outer_momentum=0.5),
    "StreamingDiLoCo": lambda: atoll.StreamingDiLoCo(model, inner, 4, peer, delay=1),
    "NoLoCo": lambda: atoll.NoLoCo(model, inner, 4, peer),
    "GradientAverage": lambda: atoll.GradientAverage(
        model, inner, peer, compressor=atoll.PowerSGD(rank=1, start=2)
    ),
}[method]()
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100)
outer.follow(schedule)
outer.load(folder)
while outer.metrics()["steps"] < steps:
    number = int(outer.metrics()["steps"])
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
    inner.step()
    inner.zero_grad()
    schedule.step()
    print(json.dumps({"step": number + 1}), flush=True)
    if number + 1 == stops_at:
        stop.wait(60)
    if stop.is_set():
        outer.save(folder)
        break
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
bits += b"".join(v.numpy().tobytes() for p in model.parameters() for v in inner.state[p].values())
digest = hashlib.sha256(bits + repr(schedule.get_last_lr()).encode()).hexdigest()
print(json.dumps({"ended": digest, "round": peer.round}), flush=True)
outer.close()
"""
METHODS = ["DiLoCo", "GradientAverage", "CO2", "StreamingDiLoCo", "NoLoCo"]
STEPS = 18


def start(run: Fleet, tmp_path: Path, method: str, stops_at: int, seed: int = 0) -> Process:
    script, log = tmp_path / "train.py", tmp_path / f"{method}.{stops_at}.{seed}.log"
    script.write_text(SCRIPT)
    words = [str(run.peers["a"].home), method, str(tmp_path / "state"), str(STEPS), str(stops_at)]
    run.trainers["a"] = Process([sys.executable, str(script), *words, str(seed)], log)
    return run.trainers["a"]


def ended(trainer: Process) -> dict[str, object]:
    assert trainer.ends() == 0, trainer.text
    return trainer.lines[-1]


@pytest.mark.parametrize("method", rest_is_slow(METHODS, 2))
def test_two_halves_are_one_whole(method: str, tmp_path: Path) -> None:
    """In two processes, of which the first is told to end by SIGTERM in the middle of a round."""
    found = []
    for stops_at in (0, 9):
        folder = tmp_path / f"stops at {stops_at}"
        folder.mkdir()
        with fleet(folder) as run:
            run.up("a")
            trainer = start(run, folder, method, stops_at)
            if stops_at:
                there = {"step": stops_at}
                until(lambda t=trainer, w=there: w in t.lines, "it is at that step", trainer)
                trainer.kill(signal.SIGTERM)
                ended(trainer)
                trainer = start(run, folder, method, 0, seed=1)
            found.append(ended(trainer))
            if stops_at:
                assert f"save-000001, and is at step {stops_at}" in trainer.text
                assert trainer.lines[0] == {"step": stops_at + 1}
    assert found[0]["ended"] == found[1]["ended"]
