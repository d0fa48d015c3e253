"""Examples for other libraries, as people start them: a daemon, and two rounds of each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import WAIT_S, fleet, until
from harness.supervised import supervise

pytest.importorskip("transformers", reason="run by `make test-integrations`")

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {
    "train_sft.py": "--steps 4 --sync-every 2 --output sft",
    "train_lora.py": "--steps 4 --sync-every 2 --output lora",
    "train_grpo.py": "--steps 4 --sync-every 2 --output grpo",
    "train_lightning.py": "--steps 4 --sync-every 2",
    "train_fsdp2.py": "--steps 4 --sync-every 2",
}
SAVED = {
    "train_sft.py": ["sft/model.safetensors", "sft/checkpoint-4/atoll"],
    "train_lora.py": ["lora/adapter_model.safetensors"],
    "train_grpo.py": ["grpo/model.safetensors"],
}
pytestmark = pytest.mark.timeout(900)  # libraries are loaded in ten seconds of a core, or minutes


@pytest.mark.parametrize("name", LINES)
def test_an_example_trains_two_rounds_and_ends(tmp_path: Path, name: str) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(32):
        (text / f"{number}.txt").write_text(f"{number} is a number. " * 200)
    with fleet(tmp_path) as run:
        peer = run.up("a")
        program = [sys.executable]
        if name == "train_fsdp2.py":
            program += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        line = [*program, str(EXAMPLES / name), "--home", str(peer.home), *LINES[name].split()]
        if "--data" in (EXAMPLES / name).read_text():
            line += ["--data", str(text)]
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(
            line, cwd=tmp_path, env=os.environ | environment, check=True, timeout=4 * WAIT_S
        )
        status = peer.status()
    assert status["round"] == 3  # with the one that has the first parameters
    assert all((tmp_path / path).exists() for path in SAVED.get(name, ()))


@pytest.mark.parametrize("name", ["train_sft.py", "train_lightning.py"])
def test_a_script_in_atoll_run_hands_its_steps_in_when_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Lightning has a handler of its own for SIGTERM, HF Trainer has none."""
    monkeypatch.chdir(tmp_path)
    line = [sys.executable, str(EXAMPLES / name), "--steps", "100000", "--sync-every", "20"]
    with fleet(tmp_path) as run:
        peer = supervise(run, "a", "--run", "demo", command=tuple(line), OMP_NUM_THREADS="1")
        until(lambda: "trains from now on" in peer.text, "it trains", peer, timeout_s=4 * WAIT_S)
        until(lambda: peer.status()["round"] >= 2, "steps", peer, timeout_s=4 * WAIT_S)
        peer.kill(signal.SIGTERM)
        assert peer.ends() == 0
        # In Lightning the signal may also come right after a step that has ended a round.
        became = r"its last \d+ local steps? counted in round|it had nothing to hand in"
        assert re.search(rf"(SIGTERM|the end of training): ({became})", peer.text)
