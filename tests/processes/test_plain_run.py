"""Look at what daemons of a plain run load, through rounds, a newcomer and a member that leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.processes import fleet

OPTIONAL = re.compile(r"^import time:.*atoll\.peer\.(?:verify|authority)\b", re.MULTILINE)


@pytest.mark.parametrize(
    ("method", "loads"), [("diloco", set()), ("audited", {"verify"})], ids=["plain", "audited"]
)
def test_only_an_audited_run_loads_verification(
    tmp_path: Path, method: str, loads: set[str]
) -> None:
    with fleet(tmp_path) as run:
        run.environment["PYTHONPROFILEIMPORTTIME"] = "1"  # each import is a line of the log
        run.form("ab")
        for name in "ab":
            run.train(name, method=method)
        run.peers["b"].reaches(3)
        run.join("c")
        run.sees("c", 3)
        run.train("c", method=method)
        reached = run.peers["c"].reaches(run.peers["a"].status()["round"] + 2)
        assert reached["admission"]["banned"] == []
        for name in "ab" if loads else "abc":  # c may not have taken part in a round yet
            text = run.peers[name].text
            assert "import time:" in text
            assert {line.rpartition(".")[2] for line in OPTIONAL.findall(text)} == loads
