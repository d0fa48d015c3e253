"""Values that independent libraries have computed, in tests/oracles; each file says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["oracle"]

FOLDER = Path(__file__).parents[1] / "oracles"


def oracle(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
