"""Two processes that are the ranks of one trainer, joined by gloo and by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.processes import WAIT_S

__all__ = ["two_ranks"]

# A hang ends before the test does: of a collective that the other rank does not make.
SCRIPT = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from {module} import {function}

rank, arguments = int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], world_size=2, rank=rank,
    timeout=timedelta(seconds=60),
)
print(json.dumps({function}(rank, *arguments)), flush=True)
dist.destroy_process_group()
"""


def two_ranks(folder: Path, module: str, function: str, *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` of a module of tests/harness returns in either process.
    All of it must fit into JSON."""
    script = folder / "rank.py"
    script.write_text(SCRIPT.format(module=f"harness.{module}", function=function))
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            command = [sys.executable, str(script), str(folder / "store"), str(rank)]
            command.append(json.dumps(arguments))
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            processes.append(stack.enter_context(process))
        for process in processes:
            stack.callback(process.kill)
        return [json.loads(process.communicate(timeout=WAIT_S)[0]) for process in processes]
