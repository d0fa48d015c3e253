"""Save what a trainer has in a folder, and load it in another process.

    FOLDER/save-000042/rank-0.json            what this is, for which model, with digests of files
    FOLDER/save-000042/rank-0.safetensors     inner optimizers, the method, what else was given
    FOLDER/save-000042/model.safetensors      trained parameters, persistent buffers

A save is complete or not there: it is written as ``.saving``, synced, and then renamed; only then
the one before it is removed. Of several ranks each writes its own files, and its rows of a model
that is sharded; a model that is whole in all of them is rank 0's. Nothing is pickled
(saved_values.py). Parameters that are not trained stay with the script: all peers have the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.collectives.errors import (
    AtollError,
    CheckpointError,
    ConfigError,
    ProtocolError,
    SessionError,
)
from atoll.optim.model_io import ModelVector, canonical, persistent, trainable
from atoll.optim.replay.checkpoint import Array, Tensors, decode, header
from atoll.optim.run_spec import UNSAID, RunSpec
from atoll.optim.saved_values import (
    DTYPES,
    Shard,
    Stateful,
    apart,
    array_of,
    tensor_of,
    together,
)
from atoll.optim.sessions import LeadingRank, every_rank

FORMAT, VERSION = "atoll trainer", 1
BEGUN = ".saving"
SAVES = re.compile(r"save-(\d{6,})")
VALUES = "values"  # in the metadata of a rank's tensors
DESCRIPTION_BYTES_MAX = 1 << 20  # a description has a specification, and digests of two files
# What peers of a run may change, or each for itself: nothing that is saved depends on it.
FREE = ("min_trainers", "round_deadline_s")


@dataclass(frozen=True)
class Trainer:
    """Hold the parts of a trainer that belong together.

    ``method`` is loaded last, because it compares the run with what is in the model by then.
    """

    method: Any
    vector: ModelVector
    inners: tuple[Optimizer, ...]
    spec: RunSpec
    channel: object
    more: Mapping[str, Stateful]

    @property
    def rank(self) -> int:
        return self.channel.rank if isinstance(self.channel, LeadingRank) else 0

    @property
    def ranks(self) -> int:
        return self.channel.ranks if isinstance(self.channel, LeadingRank) else 1

    @property
    def model_file(self) -> str:
        sharded = self.vector.ranks > 1
        return f"model-{self.rank}.safetensors" if sharded else "model.safetensors"

    @property
    def name(self) -> str:
        return type(self.method).__name__


def save(trainer: Trainer, folder: Path) -> Path:
    """Save the trainer in ``folder``, and remove what was saved there before; return where it is.

    All ranks call it. ConfigError for a state that cannot be saved, CheckpointError if the disk
    does not take it, SessionError if another rank has failed: then the last save is still there.
    """
    trainer.vector.reshard()
    state = {
        "inner": [inner.state_dict() for inner in trainer.inners],
        "more": {name: one.state_dict() for name, one in trainer.more.items()},
        "method": trainer.method.state_dict(),
    }
    begun, leads = folder / BEGUN, trainer.rank == 0

    def begin() -> None:
        shutil.rmtree(begun, ignore_errors=True)  # of a process that was killed while it saved
        begun.mkdir(mode=0o700, parents=True)  # it is the model: for its user alone

    def end() -> Path:
        _sync(begun)
        older = _saves(folder)
        number = 1 + max(older, default=0)
        there = begun.rename(folder / f"save-{number:06d}")
        _sync(folder)
        for path in older.values():
            shutil.rmtree(path, ignore_errors=True)
        return there

    _in_all_ranks(trainer, lambda: begin() if leads else None)
    _in_all_ranks(trainer, lambda: _write(trainer, state, begun))
    there = _in_all_ranks(trainer, lambda: end() if leads else folder)
    return there if leads else _saves(folder)[max(_saves(folder))]


def load(trainer: Trainer, folder: Path) -> Path | None:
    """Load what was saved in ``folder`` last; return where it is, None if nothing was saved.

    All ranks call it. Everything is read and compared before anything is changed. ConfigError,
    which names the parameter, for another model, optimizer or method; CheckpointError for files
    that are damaged, or none of these.
    """
    saves = _saves(folder)
    if not every_rank(trainer.channel, bool(saves)):
        return None
    trainer.vector.reshard()
    there = saves[max(saves)]
    read = _in_all_ranks(trainer, lambda: _read(trainer, there))
    with torch.no_grad():
        for name, tensor in _model(trainer.vector.model).items():
            tensor.copy_(read.model[name])
    trainer.vector.reshard()
    for inner, state in zip(trainer.inners, read.inner, strict=True):
        _load_inner(inner, state)
    for name, one in trainer.more.items():
        one.load_state_dict(read.more[name])
    trainer.method.load_state_dict(read.method)
    return there


# ---------------------------------------------------------------- what is in the files


@dataclass(frozen=True)
class _Read:
    model: dict[str, Tensor]
    inner: list[dict[str, Any]]
    more: dict[str, Any]
    method: dict[str, Any]


def _write(trainer: Trainer, state: Mapping[str, Any], folder: Path) -> None:
    digests = {}
    if trainer.vector.ranks > 1 or trainer.rank == 0:
        model = {n: array_of(t, n) for n, t in _model(trainer.vector.model).items()}
        digests[trainer.model_file] = _write_tensors(folder / trainer.model_file, model, {})
    tensors: dict[str, Array] = {}
    values = {name: apart(part, name, tensors) for name, part in state.items()}
    own = f"rank-{trainer.rank}.safetensors"
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    digests[own] = _write_tensors(folder / own, tensors, {VALUES: text})
    description = {
        "format": FORMAT,
        "version": VERSION,
        "method": trainer.name,
        "spec": trainer.spec.to_wire(),
        "ranks": trainer.ranks,
        "inner": [_names(trainer, inner) for inner in trainer.inners],
        "files": digests,
    }
    _write_bytes(folder / f"rank-{trainer.rank}.json", [json.dumps(description, indent=1).encode()])


def _read(trainer: Trainer, folder: Path) -> _Read:
    own = _description(trainer, folder, trainer.rank)
    with_model = own if trainer.vector.ranks > 1 else _description(trainer, folder, 0)
    arrays, _ = _read_tensors(folder, trainer.model_file, with_model)
    _check_model(trainer, folder, arrays)
    _check_method(trainer, folder, own)
    tensors, metadata = _read_tensors(folder, f"rank-{trainer.rank}.safetensors", own)
    try:
        values = json.loads(metadata[VALUES])
        found = {name: together(values[name], tensors) for name in ("inner", "more", "method")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {str(error)[:200]}") from error
    if found["more"].keys() != trainer.more.keys():
        raise ConfigError(
            f"{folder} was saved with {sorted(found['more'])}, and is loaded with "
            f"{sorted(trainer.more)}",
            fix="give load() the keyword arguments that save() was given",
        )
    _check_inner(trainer, folder, own["inner"])
    return _Read({name: tensor_of(array) for name, array in arrays.items()}, **found)


def _description(trainer: Trainer, folder: Path, rank: int) -> dict[str, Any]:
    """Return what the save says of itself; ConfigError if it was of another number of ranks."""
    path = folder / f"rank-{rank}.json"
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(DESCRIPTION_BYTES_MAX))
        what = said["format"], said["version"]
        ranks = int(said["ranks"])
        str(said["method"]), dict(said["spec"]), dict(said["files"]), list(said["inner"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} lacks {path.name}: it was not saved by atoll") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}") from error
    if what != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is {str(what)[:80]}; this version reads {(FORMAT, VERSION)}",
            fix="load it with the version of atoll that has saved it",
        )
    if ranks != trainer.ranks:
        raise ConfigError(
            f"{folder} was saved by {ranks} ranks, and is loaded by {trainer.ranks}",
            fix="start as many processes as saved it, or begin with the run's parameters",
        )
    return dict(said)


def _check_method(trainer: Trainer, folder: Path, said: Mapping[str, Any]) -> None:
    """Raise ConfigError, which lists the differences, for another method or other numbers of it."""
    spec, mine = UNSAID | said["spec"], UNSAID | trainer.spec.to_wire()
    keys = [k for k in {**spec, **mine} if k not in FREE and spec.get(k) != mine.get(k)]
    lines = [f"{key}: saved {spec.get(key)}, here {mine.get(key)}" for key in keys]
    if said["method"] != trainer.name or lines:
        differs = f"was saved by a {said['method']}, this is a {trainer.name}"
        if said["method"] == trainer.name:
            differs = f"was saved by a {trainer.name} with other numbers"
        raise ConfigError(
            "\n    ".join([f"{folder} {differs}", *lines]),
            fix="make the method with the numbers that it was saved with",
        )


def _model(model: nn.Module) -> dict[str, Tensor]:
    """Return what is saved of a model: its own tensors, of a shard the rows that are here.

    These are the parameters that are trained, and the buffers that a state_dict has too.
    """
    found: dict[str, Tensor] = {}
    for name, p in trainable(model).items():
        there: Any = p.detach()
        found[f"parameter {name}"] = there.to_local() if hasattr(there, "to_local") else there
    for name, (module, key) in persistent(model).items():
        tensor = module._buffers[key]
        assert tensor is not None
        found[f"buffer {name}"] = tensor.detach()
    return found


def unsaveable(model: nn.Module) -> list[str]:
    """Return the names of the persistent buffers, with dtypes, that files do not take."""
    buffers = {name: module._buffers[key] for name, (module, key) in persistent(model).items()}
    dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in buffers.items() if t is not None}
    return [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in DTYPES]


def _check_model(trainer: Trainer, folder: Path, saved: Tensors) -> None:
    """Raise ConfigError, which names the first parameters that differ, for another model."""
    mine = {
        name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in _model(trainer.vector.model).items()
    }
    theirs = {name: f"{array.shape} {array.dtype}" for name, array in saved.items()}
    wrong = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if wrong:
        lines = [
            f"{name}: saved {theirs.get(name, 'none')}, here {mine.get(name, 'none')}"
            for name in wrong[:5]
        ]
        count = f"{len(wrong)} tensors differ" if len(wrong) > 1 else "a tensor differs"
        raise ConfigError(
            "\n    ".join([f"{folder} is of another model; {count}:", *lines]),
            fix="make the model as it was made when this was saved, or give another folder",
        )


# ---------------------------------------------------------------- inner optimizers


def _held(inner: Optimizer) -> list[nn.Parameter]:
    return [p for group in inner.param_groups for p in group["params"]]


def _names(trainer: Trainer, inner: Optimizer) -> list[Any]:
    """Return the class of an optimizer and its parameters' names, by group."""
    named = {id(p): n for n, p in canonical(trainer.vector.model.named_parameters()).items()}
    groups = [[named.get(id(p), "") for p in group["params"]] for group in inner.param_groups]
    return [type(inner).__name__, groups]


def _check_inner(trainer: Trainer, folder: Path, saved: Sequence[Any]) -> None:
    """Raise ConfigError, which names the first difference, for other inner optimizers."""
    mine = [_names(trainer, inner) for inner in trainer.inners]
    if mine == saved:
        return
    kinds, theirs = [kind for kind, _ in mine], [kind for kind, _ in saved]
    what = f"the inner optimizers are {kinds}, saved were {theirs}"
    if kinds == theirs:
        pairs = zip(_flat(mine), _flat(saved), strict=False)
        one = next((f"{a or 'none'} here and {b or 'none'} saved" for a, b in pairs if a != b), "")
        what = "the inner optimizers hold other parameters" + (f": {one}" if one else "")
    raise ConfigError(
        f"{folder} does not fit: {what}", fix="make them from the same parameters, in one order"
    )


def _flat(named: Sequence[Any]) -> list[str]:
    """Return the names of parameters, with the ends of groups between them."""
    return [name for _, groups in named for group in groups for name in [*group, ""]]


def _load_inner(inner: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state with the bits, and the dtypes, that were saved."""
    held = dict(enumerate(_held(inner)))
    # Optimizers may keep values of their own beside those of parameters, under other keys.
    entries = [(held[n], kept) for n, kept in state.get("state", {}).items() if n in held]
    for parameter, kept in entries:
        for key, value in kept.items():
            if isinstance(value, Shard):
                kept[key] = _sharded(value.rows, parameter)
    inner.load_state_dict(state)
    for parameter, kept in entries:  # torch rounds moments to the dtype of the parameter
        there = inner.state.get(parameter, {})
        for key, value in kept.items():
            now = there.get(key)
            if isinstance(now, Tensor) and now.dtype != value.dtype:
                there[key] = value.to(now.device)


def _sharded(rows: Tensor, like: Any) -> Tensor:
    """Return the rows of this rank as a tensor that is sharded as the parameter is."""
    made: Tensor = type(like.data).from_local(
        rows.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


# ---------------------------------------------------------------- files


def _in_all_ranks(trainer: Trainer, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns once it is done in all ranks; raise its error.

    CheckpointError for one of the disk, SessionError if another rank has failed.
    """
    failed: AtollError | None = None
    found = None
    try:
        found = work()
    except AtollError as error:
        failed = error
    except OSError as error:
        failed = CheckpointError(
            f"a trainer cannot be saved or loaded: {error}",
            fix="free some space there, or give another folder",
        )
        failed.__cause__ = error
    if not every_rank(trainer.channel, failed is None):
        raise failed or SessionError(
            "another rank could not save or load", fix="see what it has printed"
        )
    if failed is not None:
        raise failed
    return found


def _saves(folder: Path) -> dict[int, Path]:
    """Return the complete saves in the folder, by number."""
    with contextlib.suppress(FileNotFoundError):
        named = ((SAVES.fullmatch(path.name), path) for path in folder.iterdir())
        return {int(match[1]): path for match, path in named if match}
    return {}


def _write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> str:
    begin, arrays = header(tensors, metadata)
    return _write_bytes(path, _each(begin, arrays))


def _each(begin: bytes, arrays: Sequence[Array]) -> Iterator[Any]:
    yield begin
    for array in arrays:
        yield array.data.data


def _write_bytes(path: Path, parts: Any) -> str:
    """Write the parts to a file and sync it; return the SHA-256, in hex."""
    text = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            text.update(part)
        file.flush()
        os.fsync(file.fileno())
    return text.hexdigest()


def _read_tensors(
    folder: Path, name: str, said: Mapping[str, Any]
) -> tuple[Tensors, dict[str, str]]:
    """Return tensors and metadata of a file; CheckpointError if it is not as it was written."""
    path = folder / name
    damaged = CheckpointError(
        f"{path} is not as it was written", fix="remove that folder, and begin without it"
    )
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if hashlib.sha256(data).hexdigest() != said["files"].get(name):
            raise damaged
        return decode(memoryview(data))
    except (OSError, ValueError, ProtocolError) as error:
        raise damaged from error


def _sync(folder: Path) -> None:
    """Sync a folder itself: names in it, and not what the files contain."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
