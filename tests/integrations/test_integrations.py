"""accelerate, HF Trainer, Lightning and PEFT, as people use them: two daemons, a trainer for each,
and at the end the bits of the plain loop with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.every_method import WITH_OPTIMIZER
from harness.processes import WAIT_S, fleet, peer_id

import atoll
from atoll.collectives.errors import ConfigError, IncompatibleRunError
from atoll.optim.inner import unwrapped
from atoll.optim.muon import outer_momentum_of

pytest.importorskip("transformers", reason="run by `make test-integrations`")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from integrations.loops import LIBRARIES, LOOPS, Net, adamw, tokens, trained, with_lora
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer

# A trainer loads its libraries in ten seconds of a core, and on shared machines in minutes.
pytestmark = [pytest.mark.filterwarnings(f"ignore:::{LIBRARIES}"), pytest.mark.timeout(900)]


@pytest.mark.usefixtures("one_thread")  # as the trainers have, of whose bits these must be
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_two_peers_end_with_the_bits_of_the_plain_loop(
    tmp_path: Path, loop: Callable[[Any, int], torch.Tensor]
) -> None:
    with fleet(tmp_path) as run, ExitStack() as stack:
        run.form("ab")
        homes = [run.peers[name].home for name in "ab"]
        processes = [
            stack.enter_context(started(tmp_path, loop.__name__, home, peer))
            for peer, home in enumerate(homes)
        ]
        for process in processes:
            assert process.stdout is not None
            heard = next((line for line in process.stdout if line == "here\n"), "it ended")
            assert heard == "here\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [parameters_of(process.communicate(timeout=4 * WAIT_S)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert run.peers["a"].status()["round"] == 4  # with the one that has the first parameters
    assert found[0] == found[1]
    order = sorted((0, 1), key=lambda peer: peer_id(homes[peer]))
    expected = atoll.Swarm(2).run(lambda session: LOOPS[loop](session, order[session.number]))
    assert found[0] == expected[0].numpy().tobytes()


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    code = "import sys; from integrations.loops import main; main(*sys.argv[1:])"
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    tests = str(Path(__file__).parents[1])
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")])),
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=folder
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def parameters_of(text: str) -> bytes:
    (line,) = [line for line in text.splitlines() if line.startswith("found ")]
    return bytes.fromhex(line.split()[1])


# ---------------------------------------------------------------- optimizers that are wrapped


def wrappers() -> dict[str, Callable[[Any], Any]]:
    accelerator = Accelerator(cpu=True)
    return {
        "accelerate": accelerator.prepare,
        "accelerate twice": lambda inner: AcceleratedOptimizer(accelerator.prepare(inner)),
        "Lightning": LightningOptimizer,
        "Lightning Fabric": lambda inner: _FabricOptimizer(inner, strategy=None),
    }


@pytest.mark.parametrize("name", wrappers())
@pytest.mark.parametrize("method", WITH_OPTIMIZER)
def test_every_method_takes_them(name: str, method: str) -> None:
    """One, or several in a sequence; steps of the wrapper count."""
    wrap = wrappers()[name]

    def work(session: Any) -> None:
        model = Net()
        inner = adamw(model)
        outer = WITH_OPTIMIZER[method](model, [wrap(inner)], session)
        model(torch.ones(4, 6)).backward()
        inner.step()
        assert outer.metrics()["steps"] == 1

    atoll.Swarm(1).run(work)


@pytest.mark.parametrize("name", wrappers())
def test_what_is_inside_decides(name: str) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    muon = torch.optim.Muon(model.parameters())
    wrapped = wrappers()[name](muon)
    assert unwrapped(wrapped) == unwrapped([wrapped]) == (muon,)
    assert outer_momentum_of(wrapped) == 0.6
    assert outer_momentum_of(wrappers()[name](torch.optim.AdamW(model.parameters()))) == 0.9


@pytest.mark.parametrize("method", ["DiLoCo", "GradientAverage"])
def test_steps_that_a_scaler_of_accelerate_skips_do_not_count(method: str) -> None:
    """As with mixed_precision="fp16", where the wrapper steps through a GradScaler."""
    Accelerator(cpu=True)

    def work(session: Any) -> None:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        wrapped = AcceleratedOptimizer(adamw(model), scaler=scaler)
        outer = WITH_OPTIMIZER[method](model, wrapped, session)
        before = trained(model).clone()
        for factor, steps in ((float("inf"), 0), (1.0, 1), (float("nan"), 1), (1.0, 2)):
            (scaler.scale(model(torch.ones(4, 6))) * factor).backward()
            wrapped.step()
            wrapped.zero_grad()
            assert outer.metrics()["steps"] == steps
            assert torch.equal(before, trained(model)) == (steps == 0)

    atoll.Swarm(1).run(work)


# ---------------------------------------------------------------- LoRA


def test_adapters_of_different_bases_are_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        first, other = with_lora(base=3), with_lora(base=5)
        with atoll.DiLoCo(first, adamw(first), 3, atoll.connect(run.peers["a"].home)) as outer:
            assert outer.manifest.elements == trained(first).numel() < 1000
            with closing(atoll.connect(run.peers["b"].home)) as session:
                with pytest.raises(IncompatibleRunError) as caught:
                    atoll.DiLoCo(other, adamw(other), 3, session)
                text = caught.value.what
                assert "layers.0.mlp.down_proj.weight: yours 16x24 float32 with values" in text
                assert "lora_A" not in text
                base = {n: p.clone() for n, p in other.named_parameters() if "lora" not in n}
                atoll.DiLoCo(other, adamw(other), 3, session, frozen="ignore")
                assert torch.equal(trained(first), trained(other))
                assert all(torch.equal(dict(other.named_parameters())[n], base[n]) for n in base)


def test_an_adapter_that_is_added_later_is_an_error_at_the_next_step() -> None:
    def work(session: Any) -> None:
        model = with_lora()
        inner = adamw(model)
        atoll.DiLoCo(model, inner, 3, session)
        with model.disable_adapter():  # for a moment, as DPO does to ask the base
            model(**tokens(torch.Generator()))
        model(**tokens(torch.Generator())).loss.backward()
        inner.step()
        model.add_adapter("later", model.peft_config["default"])
        with pytest.raises(ConfigError, match=r"new: .*lora_A\.later"):
            inner.step()

    atoll.Swarm(1).run(work)
