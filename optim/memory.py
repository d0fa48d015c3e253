"""What each method says of host memory at the start, before it is taken.

``trainer_bytes``: of a trainer, for each parameter, as the methods have it.
"""

from __future__ import annotations

import sys

from atoll.optim.footprint import host_bytes, log_bytes
from atoll.optim.manifest import Manifest
from atoll.optim.sessions import LeadingRank
from atoll.optim.spec import RunSpec

__all__ = ["say_of_copies", "say_of_replay", "say_of_rounds", "say_of_steps"]

# Of a parameter, which the ranks of a trainer share: their submission, and θ (ranks.py).
RANKS_BYTES = 8
# Of a parameter in a vector of all trainers: what goes in, and what comes out.
EXCHANGED_BYTES = 8
# Of a parameter in a checkpoint of local steps: itself, and what AdamW keeps of it.
CHECKPOINT_BYTES = 12


def say_of_rounds(spec: RunSpec, manifest: Manifest, trainer_bytes: float, peer: object) -> None:
    """Where daemons step the run's parameters."""
    own, ranks = _mib(trainer_bytes * manifest.elements), ""
    if isinstance(peer, LeadingRank):
        ranks = f"each; all its ranks together {_mib(RANKS_BYTES * manifest.elements)}, "
    _say(
        manifest.elements,
        f"; the daemon takes at most {_mib(host_bytes(spec, manifest))} of host memory for them "
        f"({_mib(log_bytes(spec, manifest))} of it the log of the last rounds), this trainer {own} "
        f"beside its model, {ranks}the device nothing",
    )


def say_of_steps(elements: int, trainer_bytes: float) -> None:
    """Where trainers exchange something at every step."""
    exchanged = _mib(EXCHANGED_BYTES * elements)
    _say(
        elements,
        f", which this trainer holds; it takes {_mib(trainer_bytes * elements)} of host memory "
        f"beside them, the daemon {exchanged} for what is exchanged. While newcomers are given "
        f"all, either takes {exchanged} for it, and as much for each number that inner optimizers "
        "keep of a parameter",
    )


def say_of_copies(elements: int) -> None:
    """Where nothing but copies of a whole trainer is ever handed over."""
    _say(
        elements,
        f", which this trainer holds; where a member is copied it and the daemon take "
        f"{_mib(EXCHANGED_BYTES * elements)} of host memory each, and as much for each number that "
        "inner optimizers keep of a parameter",
    )


def say_of_replay(manifest: Manifest, checkpoints: int, folder: object) -> None:
    """Where local steps are kept, so that others can take them again."""
    each = CHECKPOINT_BYTES * manifest.elements
    where = f"in {folder}" if folder is not None else "of this trainer's memory"
    print(
        f"atoll: for replays {checkpoints} checkpoints are kept, with AdamW about {_mib(each)} "
        f"each, {_mib(checkpoints * each)} {where}",
        file=sys.stderr,
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _say(elements: int, what: str) -> None:
    print(f"atoll: {elements:,} parameters{what}", file=sys.stderr)
