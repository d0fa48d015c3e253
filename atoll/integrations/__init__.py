"""Put atoll into training loops of other libraries: one module for each of them.

    from atoll.integrations.transformers import AtollCallback   # HF Trainer, so also TRL and PEFT
    from atoll.integrations.lightning import AtollCallback
    from atoll.integrations.accelerate import attach
    from atoll.integrations.ddp import average_gradients
    from atoll.integrations.dcp import MethodState
    from atoll.integrations.torchtitan import join

``import atoll`` imports none of them, and each imports its own library alone. docs/integrations.md
has the lines that a script changes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from atoll.collectives.errors import ConfigError


def missing(library: str, error: ImportError) -> ConfigError:
    """Return the error for a library that cannot be imported: install it, or do not hide it."""
    fix = f"pip install atoll[{library}]"
    if (hiding := _hiding(library)) is not None:
        fix = f"give {hiding} another name: it hides the library"
    return ConfigError(f"{library} cannot be imported: {error}", fix=fix)


def _hiding(library: str) -> Path | None:
    """Return the script that is imported in place of a library, because it has its name.

    That is so where `atoll example lightning` was written into lightning.py.
    """
    try:
        spec = find_spec(library)
    except (ImportError, ValueError):
        return None
    path = Path(spec.origin) if spec is not None and spec.origin is not None else Path()
    return path if path.name == f"{library}.py" else None
