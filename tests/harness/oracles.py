"""Values that independent libraries have computed; they lie outside the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["oracle"]

FOLDER = Path(os.environ.get("ATOLL_ORACLES", Path(__file__).parents[2] / "../shared/oracles"))


def oracle(name: str) -> Any:
    """The test is skipped where there are none."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no {path}; set ATOLL_ORACLES to the folder of the oracles")
    return json.loads(path.read_text("utf-8"))
