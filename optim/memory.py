"""Print how much host memory each method takes, at the start and before it is taken.

``trainer_bytes``: bytes of a trainer for each parameter, as the methods have it.
"""

from __future__ import annotations

from atoll.collectives.units import memory
from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import LeadingRank
from atoll.optim.trainer import say

# For each parameter, shared by the ranks of a trainer: their submission, and θ (ranks.py).
RANKS_BYTES = 8
# For each parameter in a vector of all trainers: what goes in, and what comes out.
EXCHANGED_BYTES = 8
# For each parameter in a checkpoint of local steps: itself, and what AdamW keeps of it.
CHECKPOINT_BYTES = 12


def say_of_rounds(spec: RunSpec, manifest: Manifest, trainer_bytes: float, peer: object) -> None:
    """Print the memory of a method where daemons step the run's parameters."""
    daemon, trainer = host_bytes(spec, manifest), memory(trainer_bytes * manifest.elements)
    if isinstance(peer, LeadingRank):
        trainer += f" in each process and {memory(RANKS_BYTES * manifest.elements)} in all"
    _say(manifest.elements, f"daemon {memory(daemon)}, trainer {trainer}, GPU 0.")


def say_of_steps(elements: int, trainer_bytes: float) -> None:
    """Print the memory of a method where trainers exchange something at every step."""
    exchanged = memory(EXCHANGED_BYTES * elements)
    _say(
        elements,
        f"daemon {exchanged}, trainer {memory(trainer_bytes * elements)}. While a newcomer gets the"
        f" parameters, both take {exchanged} more, and as much for each number that the optimizer"
        " keeps of a parameter (AdamW: 2).",
    )


def say_of_replicas(elements: int, daemon_bytes: float, trainer_bytes: float) -> None:
    """Print the memory of a method where each trainer has a replica of its own.

    Its daemon hands that out.
    """
    daemon, trainer = memory(daemon_bytes), memory(trainer_bytes * elements)
    _say(elements, f"daemon {daemon}, trainer {trainer}, GPU 0.")


def say_of_copies(elements: int) -> None:
    """Print the memory where nothing but copies of a whole trainer is ever handed over."""
    copied = memory(EXCHANGED_BYTES * elements)
    _say(
        elements,
        f"daemon 0, trainer 0; while a member is copied, both take {copied}, and as much for each"
        " number that the optimizer keeps of a parameter (AdamW: 2).",
    )


def say_of_replay(manifest: Manifest, checkpoints: int, folder: object) -> None:
    """Print the memory of local steps that are kept, so that others can take them again."""
    each = CHECKPOINT_BYTES * manifest.elements
    where = f"in {folder}" if folder is not None else "of this trainer's memory"
    say(
        f"{checkpoints} checkpoints are kept for replays: {memory(each)} each with AdamW,"
        f" {memory(checkpoints * each)} {where}"
    )


def _say(elements: int, extra: str) -> None:
    say(f"{elements:,} parameters. Extra memory: {extra}")
