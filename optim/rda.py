"""Average by RDA, which keeps the mean length of its parts (Decoupled DiLoCo, arXiv 2604.21428).

Pseudo-gradients of different peers are nearly orthogonal, so the norm of their mean falls with the
root of their number, and steps change when peers come and go. For each tensor, with weights w::

    rda = (sum w |v| / sum w) unit(sum w v / |v|)         the mean length, the mean direction

Embeddings are averaged plainly, and so is a tensor whose directions cancel. The factor of the
length is printed with another dimension in the paper; this is what its text says.

It needs norms of whole tensors. Rounds that gather (collectives/codecs/gathered.py) decode chunk by
chunk, and newcomers replay chunks by themselves, so it is no ``aggregate`` of a run, but a
collective for loops of one's own. It is made of sums, so it sends what a mean does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.codecs.scales import fold
from atoll.collectives.errors import ConfigError, StateError
from atoll.optim.sessions import OperationsSession

# Part of the sum of weights: a sum of unit vectors that is shorter has no direction. That of a
# thousand orthogonal ones has 0.03; what float32 leaves of two opposite ones is 1e-7.
CANCELLED = 1e-3
NORM_MIN = 1e-30  # the least norm of a tensor that has a direction; float32 ends at 1e-45
TRIES_MAX = 10  # peers go now and then; one that sees so many go in a row has another trouble


def rda(parts: Sequence[F32], weights: Sequence[float]) -> F32:
    """Return the RDA of one tensor, whose parts of all peers are here; added in their order.

    ConfigError for weights that are negative, not finite or all zero.
    """
    total = math.fsum(_checked(weight) for weight in weights)
    directions: F32 = np.zeros_like(parts[0])
    lengths = 0.0
    for part, weight in zip(parts, weights, strict=True):
        norm = _norm(part)
        lengths += weight * norm
        directions += _direction(part, weight, norm)
    found = _scaled(directions, lengths, _positive(total))
    if found is not None:
        return found
    mean: F32 = np.zeros_like(directions)
    for part, weight in zip(parts, weights, strict=True):
        mean += np.float32(weight / total) * part
    return mean


def rda_all_reduce(
    session: OperationsSession,
    tensors: Mapping[str, F32],
    weight: float = 1.0,
    *,
    plain: tuple[str, ...] = (),
    codec: str = "float32",
) -> dict[str, F32]:
    """Return the RDA of the tensors of all trainers, which have the same names and shapes.

    The arrays are new, and have the same bits at all trainers.

    ``plain``: the beginnings of names of embeddings. ``codec``: of the vector; lengths travel as
    float32. Two all-reduces, three where directions cancel, over one set of trainers: if somebody
    goes in between, all begin anew. Errors are those of ``session.all_reduce``; StateError if
    trainers go faster than that; ConfigError for weights as above.
    """
    names = sorted(tensors)
    norms = {name: _norm(tensors[name]) for name in names}
    heads = [_checked(weight), *(weight * norms[name] for name in names)]
    is_plain = {name: name.startswith(plain) for name in names}
    given = {
        name: np.float32(weight) * tensors[name]
        if is_plain[name]
        else _direction(tensors[name], weight, norms[name])
        for name in names
    }
    for _ in range(TRIES_MAX):
        first = session.all_reduce(np.array(heads, np.float32), "sum")
        total = _positive(float(first.value[0]))
        lengths = dict(zip(names, map(float, first.value[1:]), strict=True))
        summed, peers = _summed(session, given, codec)
        found = {
            name: summed[name] / np.float32(total)
            if is_plain[name]
            else _scaled(summed[name], lengths[name], total)
            for name in names
        }
        cancelled = [name for name in names if found[name] is None]
        if peers == first.peers and cancelled:
            wholes = {name: np.float32(weight) * tensors[name] for name in cancelled}
            summed, peers = _summed(session, wholes, codec)
            found |= {name: summed[name] / np.float32(total) for name in cancelled}
        if peers == first.peers:
            return {name: value for name, value in found.items() if value is not None}
    raise StateError(
        f"trainers went in the middle of {TRIES_MAX} averages in a row",
        fix="see `atoll status` for who comes and goes",
    )


def _summed(
    session: OperationsSession, tensors: Mapping[str, F32], codec: str
) -> tuple[dict[str, F32], tuple[str, ...]]:
    flat = np.concatenate([np.ravel(value) for value in tensors.values()])
    reduced = session.all_reduce(flat, "sum", codec=codec)
    ends = np.cumsum([value.size for value in tensors.values()])[:-1]
    parts = np.split(reduced.value, ends)
    shaped = zip(tensors.items(), parts, strict=True)
    return {name: part.reshape(value.shape) for (name, value), part in shaped}, reduced.peers


def _direction(values: F32, weight: float, norm: float) -> F32:
    """Return ``w v / |v|`` times the root of the number of elements.

    So tensors of all sizes may share the blocks of a codec. Zeros where there is no direction.
    """
    factor = weight * math.sqrt(values.size) / norm if norm >= NORM_MIN else 0.0
    direction: F32 = (values * np.float64(factor)).astype(np.float32)
    return direction


def _scaled(directions: F32, lengths: float, total: float) -> F32 | None:
    """Return ``directions`` brought to the mean length; None where they cancel."""
    norm = _norm(directions)
    if norm <= CANCELLED * math.sqrt(directions.size) * total:
        return None
    scaled: F32 = (directions * np.float64(lengths / total / norm)).astype(np.float32)
    return scaled


def _norm(values: F32) -> float:
    """Return the norm, in float64, added in an order that does not depend on the processor."""
    squares: NDArray[np.float64] = np.ravel(values).astype(np.float64)
    np.square(squares, out=squares)
    return math.sqrt(float(fold(squares[None, :])[0])) if squares.size else 0.0


def _checked(weight: float) -> float:
    if not 0 <= weight < math.inf:
        raise ConfigError(f"a weight of {weight}", fix="weights are finite and not negative")
    return weight


def _positive(total: float) -> float:
    if not total > 0:
        raise ConfigError("all weights are 0", fix="give at least one trainer a positive weight")
    return total
