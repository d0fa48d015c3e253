"""Test what the page's script computes by itself, by Node.js; skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def function(name: str) -> str:
    """Return the text of one function of the script."""
    script = resources.files("atoll.peer.telemetry.page").joinpath("page.js").read_text("utf-8")
    found = re.search(rf"^function {name}\(.*?^}}", script, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[0]


def grown(rows: list[dict[str, Any]]) -> float:
    """Return what ``grown`` says of these rows of a peer."""
    text = f"const rowsOf = () => {json.dumps(rows)}; {function('grown')}"
    line = [str(NODE), "-e", f"{text} console.log(grown('a', 'steps'))"]
    return float(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


@needs_node
@pytest.mark.parametrize(
    ("totals", "per_s"),
    [
        ([100, 110, 120], 5.0),
        ([100, 110, 10, 20], 5.0),  # its trainer was started again: it counts from 0 then
        ([10, 20, 10, 40], 25 / 3),
        ([None, 100, 110], 5.0),  # told from the second row on
        ([100], 0.0),
        ([], 0.0),
    ],
)
def test_totals_of_a_trainer_that_was_started_again_go_on(
    totals: list[int | None], per_s: float
) -> None:
    rows = [
        {"unix_s": 2.0 * place} | ({} if total is None else {"steps": total})
        for place, total in enumerate(totals)
    ]
    assert grown(rows) == pytest.approx(per_s)
