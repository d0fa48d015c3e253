"""Put atoll into training loops of other libraries: one module for each of them.

    from atoll.integrations.transformers import AtollCallback   # HF Trainer, so also TRL and PEFT
    from atoll.integrations.lightning import AtollCallback
    from atoll.integrations.accelerate import attach
    from atoll.integrations.ddp import average_gradients
    from atoll.integrations.dcp import MethodState
    from atoll.integrations.torchtitan import join

``import atoll`` imports none of them, and each imports its own library alone. docs/guide.md has the
lines that a script changes.
"""

from __future__ import annotations

from atoll.collectives.errors import ConfigError


def missing(library: str, error: ImportError) -> ConfigError:
    """Return the error for a library that cannot be imported: how to install it."""
    return ConfigError(
        f"{library} cannot be imported: {error}", fix=f"pip install atoll[{library}]"
    )
