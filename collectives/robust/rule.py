"""Read a rule of aggregation, written as a short string: ``"nnm+trimmed(f=2)"``, and apply it.

The last part is an aggregator; parts before it are pre-aggregators, applied in this order. ``f`` is
the number of faulty peers that the rule has to bear; it stands at the aggregator and holds for all
parts. With f=0 there is nothing to bear, and every rule is the plain mean, to the bit.

    trimmed meamed median krum multi_krum bulyan mda caf gm centered_clip flag mean    aggregators
    nnm bucketing arc                                                              pre-aggregators

A rule is made of at most two steps. A matrix mixes, scales or selects whole vectors; it is a
function of their Gram matrix (gram.py), so that it sees true distances where each machine holds a
part of the coordinates. Then each coordinate is aggregated by itself (coordinate.py). Peers count
alike: a weight that a peer says of itself would let it count as many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from atoll.collectives.errors import ConfigError
from atoll.collectives.robust import centres, mixing
from atoll.collectives.robust.coordinate import (
    Rows,
    around_median,
    blocks_of,
    median,
    mixed_rows,
    trimmed_mean,
)
from atoll.collectives.robust.coordinate import mean as plain_mean
from atoll.collectives.robust.gram import Matrix, combined

RULE_CHARACTERS_MAX: Final = 128
# The Gram matrix of more would not fit a frame, and MDA takes 2**f steps.
FAULTY_MAX: Final = 64
MDA_FAULTY_MAX: Final = 12
NUMBER_MAX: Final = 1_024  # for m, s and r: there are no more members
GRAM_PEERS_MAX: Final = 256  # their inner products take 256 KiB, a quarter of the largest chunk
PAIRS_PEERS_MAX: Final = 32  # for flag: it looks for eigenvectors of as many columns as pairs
_FIX: Final = "for example trimmed(f=1), nnm+trimmed(f=2), multi_krum(f=1), gm(f=1)"
_PART: Final = re.compile(r"([a-z_]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class RulePart:
    """Hold one part of the string: its name and numbers."""

    name: str
    numbers: Mapping[str, float]

    def number(self, name: str, default: float) -> float:
        return self.numbers.get(name, default)


# name -> (of how many vectors at least: a f + b, the numbers it may have)
_AGGREGATORS: Final[Mapping[str, tuple[int, int, tuple[str, ...]]]] = {
    "mean": (2, 1, ()),
    "median": (2, 1, ()),
    "trimmed": (2, 1, ()),
    "meamed": (2, 1, ()),
    "krum": (2, 3, ()),
    "multi_krum": (2, 3, ("m",)),
    "bulyan": (4, 3, ()),
    "mda": (2, 1, ()),
    "caf": (2, 1, ()),
    "gm": (2, 1, ()),
    "centered_clip": (2, 1, ("tau",)),
    "flag": (2, 1, ("r", "pairs")),
}
_PREPARING: Final[Mapping[str, tuple[str, ...]]] = {"nnm": (), "bucketing": ("s",), "arc": ()}
_BY_COORDINATE: Final = ("mean", "median", "trimmed", "meamed", "bulyan")


@dataclass(frozen=True)
class RobustRule:
    """Aggregate vectors by the rule that ``get_rule`` has read. ``parts``: the aggregator last."""

    text: str
    parts: tuple[RulePart, ...]
    f: int

    @property
    def is_mean(self) -> bool:
        return self.f == 0

    @cached_property
    def needs_gram(self) -> bool:
        """Return whether the rule depends on distances or norms of whole vectors."""
        return not self.is_mean and (
            any(part.name != "bucketing" for part in self.parts[:-1])
            or self.parts[-1].name not in ("mean", "median", "trimmed", "meamed")
        )

    @property
    def is_combination(self) -> bool:
        """Return whether the result is one combination of whole vectors.

        A single row of ``matrix`` is its coefficients.
        """
        return not self.is_mean and self.parts[-1].name not in _BY_COORDINATE

    @cached_property
    def least(self) -> int:
        """Return the smallest number of vectors that the rule can aggregate.

        It is 0 if no run has as many peers.
        """
        most = GRAM_PEERS_MAX if self.needs_gram else NUMBER_MAX
        return next((count for count in range(1, most + 1) if not self._wrong_with(count)), 0)

    def check(self, count: int) -> None:
        """Raise ConfigError if the rule cannot bear ``f`` faulty ones among so many vectors."""
        wrong = self._wrong_with(count)
        if wrong:
            raise ConfigError(
                f"{self.text} needs at least {self.least} peers, and here are {count}: {wrong}",
                fix="let more peers take part, or choose a smaller f or another rule",
            )

    def _wrong_with(self, count: int) -> str:
        if self.is_mean:
            return ""
        for part in self.parts[:-1]:
            if count < 2 * self.f + 1:
                return f"{part.name} bears less than half of them"
            if part.name == "bucketing":
                count = -(-count // int(part.number("s", 2)))
        last = self.parts[-1]
        slope, least, _ = _AGGREGATORS[last.name]
        if count < slope * self.f + least:
            return f"{last.name} needs {slope} f + {least} = {slope * self.f + least} of them"
        if last.number("m", 1) > count - self.f:
            return f"{last.name} must not keep m={last.number('m', 1):g} of them, f are faulty"
        if last.number("pairs", 0) and count > PAIRS_PEERS_MAX:
            return f"with pairs {last.name} is for at most {PAIRS_PEERS_MAX}"
        if self.needs_gram and count > GRAM_PEERS_MAX:
            return f"whole vectors of at most {GRAM_PEERS_MAX} are compared: take trimmed or median"
        return ""

    def matrix(self, gram: Matrix | None, count: int, key: int) -> Matrix | None:
        """Return how n vectors are mixed before their coordinates are aggregated, float64[k, n].

        It is None if they are not mixed at all. ``gram`` is needed where ``needs_gram`` says so;
        ``key`` is shared by all peers and drawn anew for each round.
        """
        mixed: Matrix | None = None
        for part in () if self.is_mean else self.parts:
            step = self._step(part, gram, count, key)
            if step is None:
                continue
            mixed = step if mixed is None else step @ mixed
            gram = combined(gram, step) if gram is not None else None
            count = len(step)
        return mixed

    def _step(self, part: RulePart, gram: Matrix | None, count: int, key: int) -> Matrix | None:
        if part.name == "bucketing":
            return mixing.bucketing(count, int(part.number("s", 2)), key)
        if part.name in _BY_COORDINATE and part.name != "bulyan":
            return None
        assert gram is not None
        f = self.f
        steps: Mapping[str, Callable[[], Matrix]] = {
            "nnm": lambda: mixing.nearest_neighbour_mixing(gram, f),
            "arc": lambda: mixing.adaptive_clipping(gram, f),
            "krum": lambda: mixing.krum(gram, f),
            "multi_krum": lambda: mixing.multi_krum(gram, f, int(part.number("m", count - f))),
            "bulyan": lambda: mixing.bulyan_selection(gram, f),
            "mda": lambda: mixing.minimum_diameter(gram, f),
            "caf": lambda: centres.covariance_filter(gram, f),
            "gm": lambda: centres.geometric_median(gram),
            "centered_clip": lambda: centres.centered_clipping(gram, part.numbers.get("tau")),
            "flag": lambda: centres.flag(gram, int(part.number("r", 1)), part.number("pairs", 0)),
        }
        return steps[part.name]()

    def aggregate(self, rows: Rows, matrix: Matrix | None) -> Rows:
        """Return the aggregate of n vectors, or of the same coordinates of each.

        ``rows`` are float[n, c] in the order of peer ids, the result is float[c] of the same dtype.
        ``matrix`` is what ``matrix()`` gave.
        """
        out: Rows = np.empty_like(rows[0])
        lo = 0
        for block in blocks_of(rows):
            hi = lo + block.shape[1]
            np.add(self._aggregate(block, matrix), 0.0, out=out[lo:hi])
            lo = hi
        return out

    def _aggregate(self, rows: Rows, matrix: Matrix | None) -> Rows:
        """Return the aggregate of a block of columns; its zeros may have either sign.

        Which of them was least depends on the order.
        """
        name, f = self.parts[-1].name, self.f
        count = len(rows if matrix is None else matrix)
        if count == 1:
            only: Rows = mixed_rows(rows, matrix)[0]
            return only
        if f == 0:
            return plain_mean(mixed_rows(rows, matrix))
        if name == "median":
            return median(rows, matrix)
        if name == "trimmed":
            return trimmed_mean(rows, f, matrix)
        return around_median(rows, count - (2 * f if name == "bulyan" else f), matrix)


@lru_cache(64)
def get_rule(text: str) -> RobustRule:
    """Return the rule in a string. Raises ConfigError, which says which part of it is wrong."""
    if len(text) > RULE_CHARACTERS_MAX or not text.isascii():
        raise ConfigError(f"a robust rule of {len(text)} characters", fix=_FIX)
    parts = tuple(_part(piece.strip()) for piece in text.split("+"))
    *before, last = parts
    for part in before:
        if part.name not in _PREPARING:
            raise ConfigError(f"{part.name!r} in {text!r} is no pre-aggregator", fix=_FIX)
        _check_numbers(part, _PREPARING[part.name])
    if last.name not in _AGGREGATORS:
        raise ConfigError(f"{last.name!r} in {text!r} is no aggregator", fix=_FIX)
    _check_numbers(last, ("f", *_AGGREGATORS[last.name][2]))
    if "f" not in last.numbers:
        raise ConfigError(f"{text!r} does not say how many faulty peers to bear", fix=_FIX)
    f = int(last.numbers["f"])
    faulty_max = MDA_FAULTY_MAX if last.name == "mda" else FAULTY_MAX
    if f > faulty_max:
        raise ConfigError(f"{text!r}: f is at most {faulty_max}", fix=_FIX)
    if f > 0 and last.name == "mean":
        raise ConfigError("a mean bears no faulty peer, of whatever it is", fix=_FIX)
    rule = RobustRule(text, parts, f)
    if not rule.least:
        raise ConfigError(f"{text!r} needs more peers than it can have", fix=_FIX)
    return rule


def _part(text: str) -> RulePart:
    found = _PART.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text[:40]!r} is not a part of a robust rule", fix=_FIX)
    numbers: dict[str, float] = {}
    for item in filter(None, map(str.strip, (found[2] or "").split(","))):
        name, equals, value = item.partition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(
                f"{item[:40]!r} in {text[:80]!r} is not NAME=NUMBER", fix=_FIX
            ) from None
        if not equals:
            raise ConfigError(f"{item[:40]!r} in {text[:80]!r} is not NAME=NUMBER", fix=_FIX)
    return RulePart(found[1], numbers)


def _check_numbers(part: RulePart, known: tuple[str, ...]) -> None:
    for name, value in part.numbers.items():
        if name not in known:
            raise ConfigError(f"{part.name} has no {name!r}", fix=_FIX)
        if name == "tau":
            allowed = 0 < value < np.inf
        elif name == "pairs":
            allowed = 0 <= value < np.inf
        else:
            allowed = (name == "f" or value >= 1) and 0 <= value <= NUMBER_MAX and value % 1 == 0
        if not allowed:
            raise ConfigError(f"{part.name}: {name}={value:g} is out of range", fix=_FIX)
