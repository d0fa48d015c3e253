from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import atoll

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_lm.py"


@pytest.mark.parametrize("muon", [False, True])
def test_the_example_trains_with_three_marked_lines(local_run, tmp_path, monkeypatch, capsys, muon):
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 500)
    run = local_run()
    session = run.sessions[0]
    monkeypatch.setattr(atoll, "connect", lambda home: session, raising=False)
    flags = ["--data", str(tmp_path), "--sync-every", "2", "--rounds", "3", "--seed", "5"]
    monkeypatch.setattr("sys.argv", ["train_lm.py", *flags, *["--muon"] * muon])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = re.findall(r"round (\d+)  step (\d+) .* held-out (\S+)", capsys.readouterr().out)
    assert [(int(k), int(step)) for k, step, _ in losses] == [(1, 2), (2, 4), (3, 6)]
    assert float(losses[2][2]) < float(losses[0][2])
    assert session.reported["heldout_loss"] == pytest.approx(float(losses[2][2]), abs=1e-3)
    assert session.closed
    assert run.spec.outer_momentum == (0.6 if muon else 0.9)
    assert re.findall(r"# \((\d)\)", EXAMPLE.read_text()) == ["1", "2", "3"]
