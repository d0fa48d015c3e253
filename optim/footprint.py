"""Compute the host memory that a run takes: of a daemon and of a trainer, and what is said of it.

A method prints it at the start, before it is taken. ``trainer_bytes``: bytes of a trainer for each
parameter, as the methods have it.
"""

from __future__ import annotations

from atoll.collectives.codecs import RULES, get_codec
from atoll.collectives.units import memory
from atoll.optim.manifest import Manifest, fragment_grid
from atoll.optim.outer_step import momentum_layout
from atoll.optim.pseudo_gradient import submission_floats
from atoll.optim.run_spec import RunSpec, fragment_ranges

# Each daemon keeps the last rounds (peer/rounds/log.py) for who missed some and for joiners.
# 256 MiB are 16 rounds of 16 M parameters in int8: minutes to hours, little beside the state.
LOG_BYTES_DEFAULT = 256 * 1024 * 1024
LOG_BYTES_MIN = 1024 * 1024  # so that even a toy's log has more than a few rounds
# Whoever missed more rounds than the state has bytes takes the state. The rest of the log is for
# joiners, who replay what is committed while a slow link brings them the state.
LOG_STATES = 4
LOG_ENTRIES_MIN = 2  # of any size: a peer that missed the last commit gets it without a transfer
LOG_ENTRIES_MAX = 1024  # of any size: of tiny ones the objects take more than the bytes
PINNED_FACTOR = 2  # whoever reads from the log may keep it from shrinking, up to twice its cap
SPARES_MAX = 1  # results of dropped rounds that are kept as memory for the next ones
# For each parameter, shared by the ranks of a trainer: their submission, and θ (ranks.py).
RANKS_BYTES = 8
# For each parameter in a vector of all trainers: what goes in, and what comes out.
EXCHANGED_BYTES = 8
# For each parameter in a checkpoint of local steps: itself, and what AdamW keeps of it.
CHECKPOINT_BYTES = 12


def host_bytes(spec: RunSpec, manifest: Manifest, *, keeps_rounds: bool = True) -> int:
    """Return the host memory in bytes that the daemon takes at the peak of a round.

    Its constant of at most 64 MiB is not in it. What counts is θ and momentum (8 bytes per
    parameter, or 5 where the momentum is kept in 8 bits), the submission (as it travels where it is
    encoded at once, else 4), error feedback (4 where there is any), and the encoded updates of the
    rounds in flight (1 to 4 each, of a fragment). How many trainers a gathered result will have is
    not known; it counts as float32 (4 bytes), which is used where slots take more. An audited round
    holds its encoded contribution, and those of others to its shard.
    ``keeps_rounds``: rounds go to the disk, else the log of the last ones stays in memory, and a
    result that falls out of it is kept for the next one.

    While a slow disk writes a round, or somebody reads it, its result stands beside the next one. A
    founder holds the first parameters as well until everybody has them (4 bytes), and who joins or
    falls behind a second state while it is being loaded.
    """
    held = spec.rounds_in_flight * (3 if spec.audit else 1) + (0 if keeps_rounds else SPARES_MAX)
    results = held * _result_bytes(spec, manifest)
    feedback = 4 * manifest.elements if spec.error_feedback else 0
    own_bytes = state_bytes(spec, manifest) + 4 * submission_floats(spec, manifest) + feedback
    return own_bytes + results + (0 if keeps_rounds else log_bytes(spec, manifest))


def state_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the bytes of θ and momentum: what a joiner loads, and a checkpoint holds."""
    return 4 * manifest.elements + momentum_layout(spec, manifest.grid).total_bytes


def log_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the bytes that the log of rounds takes in memory at most, if none go to the disk.

    That is when it is full, and pinned by somebody who reads it. LOG_ENTRIES_MIN stay whatever
    their size.
    """
    result = _result_bytes(spec, manifest)
    most = PINNED_FACTOR * LOG_ENTRIES_MAX * result
    return max(LOG_ENTRIES_MIN * result, min(PINNED_FACTOR * log_cap_bytes(manifest), most))


def log_cap_bytes(manifest: Manifest) -> int:
    """Return the cap in bytes of the log of rounds for this model, where nobody pins it."""
    state = 8 * manifest.elements
    return min(LOG_BYTES_DEFAULT, max(LOG_BYTES_MIN, LOG_STATES * state))


def _result_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the bytes of a round's result at most, whoever takes part."""
    codec = get_codec("float32") if spec.aggregate in RULES else spec.result_codec((1.0,))
    return max(
        codec.encoded_bytes(fragment_grid(manifest.grid, *r).total)
        for r in fragment_ranges(spec, manifest)
    )


def memory_of_rounds(
    spec: RunSpec,
    manifest: Manifest,
    trainer_bytes: float,
    *,
    has_ranks: bool,
    keeps_rounds: bool,
) -> str:
    """Return the memory of a method where daemons step the run's parameters."""
    daemon = host_bytes(spec, manifest, keeps_rounds=keeps_rounds)
    trainer = memory(trainer_bytes * manifest.elements)
    if has_ranks:
        trainer += f" in each process and {memory(RANKS_BYTES * manifest.elements)} in all"
    return _text(manifest.elements, f"daemon {memory(daemon)}, trainer {trainer}, GPU 0.")


def memory_of_steps(elements: int, trainer_bytes: float) -> str:
    """Return the memory of a method where trainers exchange something at every step."""
    exchanged = memory(EXCHANGED_BYTES * elements)
    return _text(
        elements,
        f"daemon {exchanged}, trainer {memory(trainer_bytes * elements)}. While a newcomer gets the"
        f" parameters, both take {exchanged} more, and as much for each number that the optimizer"
        " keeps of a parameter (AdamW: 2).",
    )


def memory_of_replicas(elements: int, daemon_bytes: float, trainer_bytes: float) -> str:
    """Return the memory of a method where each trainer has a replica of its own.

    Its daemon hands that out.
    """
    daemon, trainer = memory(daemon_bytes), memory(trainer_bytes * elements)
    return _text(elements, f"daemon {daemon}, trainer {trainer}, GPU 0.")


def memory_of_copies(elements: int) -> str:
    """Return the memory where nothing but copies of a whole trainer is ever handed over."""
    copied = memory(EXCHANGED_BYTES * elements)
    return _text(
        elements,
        f"daemon 0, trainer 0; while a member is copied, both take {copied}, and as much for each"
        " number that the optimizer keeps of a parameter (AdamW: 2).",
    )


def memory_of_replay(manifest: Manifest, checkpoints: int, folder: object) -> str:
    """Return the memory of local steps that are kept, so that others can take them again."""
    each = CHECKPOINT_BYTES * manifest.elements
    where = f"in {folder}" if folder is not None else "of this trainer's memory"
    return (
        f"{checkpoints} checkpoints are kept for replays: {memory(each)} each with AdamW,"
        f" {memory(checkpoints * each)} {where}"
    )


def _text(elements: int, extra: str) -> str:
    return f"{elements:,} parameters. Extra memory: {extra}"
