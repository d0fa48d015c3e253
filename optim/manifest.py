"""Describe a run's parameters: their names, their shapes, and where each lies in θ.

A run's state is one flat float32 vector θ: the trainable parameters in order of name, each in C
order, end to end. The manifest is that list. Peers compare it when a trainer attaches, and it is
the only thing a daemon knows of the model. Text on the wire, one parameter per line::

    blocks.0.attention.weight<TAB>bfloat16<TAB>384x128

A run with fragments, parts of the vector that are reduced in rounds of their own, has them in order
of fragment, and the fragment's number in a fourth column. Each is a contiguous range of the
vector's chunks, so it has a grid, a layout and a reduction like a whole vector. It begins with a
chunk of its own, so the one before it ends with padding: a parameter of zeros that no trainer has.

After an empty line come the tensors that are not trained, if the trainer has looked at them
(frozen.py): what they are, and a digest of their values. No daemon has their values::

    blocks.0.attention.base.weight<TAB>384x128 bfloat16<TAB>9f86d081884c7d65

(Plain lines, because a decoder that builds objects out of untrusted bytes can be made to spend
sixty bytes of memory for each byte received.)
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from atoll.collectives.chunks import ChunkGrid, grid_for
from atoll.collectives.errors import ConfigError, RemoteProtocolError

DTYPES = ("bfloat16", "float16", "float32", "float64")  # working dtypes; the run itself is float32
PARAMETERS_MAX = 65_536  # a 100-layer mixture of experts has about 40,000
ELEMENTS_MAX = 2**40  # 4 TiB of θ: a larger figure is nonsense, not a model
NAME_BYTES_MAX = 512  # the longest names of published models have about 120
DIMENSIONS_MAX = 16  # tensors of real models have at most 6
FRAGMENTS_MAX = 64  # Streaming DiLoCo (arXiv 2501.18512) uses 2 to 24
PADDING = "~padding."  # no attribute of a module is called so; it sorts behind letters
OUTLINE = "~method."
DIFFERENCES_MAX = 20  # lines that still fit on one screen
# Lines for tensors that are not trained: Llama 3.1 405B has 1,138. With names and digests they pack
# to some 80 KB of a blob (run_spec.py) of 512 KiB. With more, a line stands for a whole module.
FROZEN_LINES_MAX = 4096
FROZEN_OUTLINE_CHARACTERS_MAX = 256  # 16 dimensions of 2**40 elements
FROZEN_DIGEST = re.compile(r"([0-9a-f]{16})?")
Named: TypeAlias = "Parameter | FrozenTensor"


@dataclass(frozen=True)
class Parameter:
    """Describe one trainable tensor: canonical name, shape and working dtype (of ``DTYPES``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    fragment: int = 0

    def __post_init__(self) -> None:
        name = self.name[:NAME_BYTES_MAX]
        if not self.name.isprintable() or not 0 < len(self.name.encode()) <= NAME_BYTES_MAX:
            raise ConfigError(
                f"parameter name {name!r} is empty, unprintable or over {NAME_BYTES_MAX} bytes"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"parameter {name} has dtype {self.dtype[:32]!r}",
                fix=f"use one of {', '.join(DTYPES)}, or freeze it (requires_grad=False)",
            )
        if not 0 <= self.fragment < FRAGMENTS_MAX:
            raise ConfigError(f"parameter {name} is of fragment {self.fragment}")
        if len(self.shape) > DIMENSIONS_MAX or not all(0 <= n <= ELEMENTS_MAX for n in self.shape):
            shape = repr(self.shape)[:80]
            raise ConfigError(f"parameter {name} has an impossible shape {shape}")

    def __str__(self) -> str:
        which = f", fragment {self.fragment}" if self.fragment else ""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}{which}"

    @property
    def is_padding(self) -> bool:
        return self.name.startswith(PADDING)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FrozenTensor:
    """Describe one tensor that is not trained: a frozen parameter, or a buffer.

    ``outline``: shape and dtype, for people. ``digest``: that of its values; "" for a buffer, whose
    values differ between peers by right.
    """

    name: str
    outline: str
    digest: str = ""

    def __post_init__(self) -> None:
        name, outline = self.name[:NAME_BYTES_MAX], self.outline
        if not self.name.isprintable() or not 0 < len(self.name.encode()) <= NAME_BYTES_MAX:
            raise ConfigError(
                f"tensor name {name!r} is empty, unprintable or over {NAME_BYTES_MAX} bytes"
            )
        if not outline.isprintable() or len(outline) > FROZEN_OUTLINE_CHARACTERS_MAX:
            raise ConfigError(f"tensor {name} is described as {outline[:80]!r}")
        if not FROZEN_DIGEST.fullmatch(self.digest):
            raise ConfigError(f"tensor {name} has the digest {self.digest[:80]!r}")

    def __str__(self) -> str:
        return f"{self.outline} with values {self.digest}" if self.digest else self.outline


@dataclass(frozen=True)
class Manifest:
    """Hold the parameters of a run, sorted by fragment and name.

    ``of`` sorts and pads; the wire form must be sorted and padded already.

    ``frozen``: the tensors of the model that are not trained, by name; None where nobody has
    looked, as in runs of version 0.1.
    """

    parameters: tuple[Parameter, ...]
    frozen: tuple[FrozenTensor, ...] | None = None

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> Manifest:
        """Sort and pad parameters; return their manifest.

        Raise ConfigError for parameters that make no run.
        """
        ordered = sorted(parameters, key=_place)
        if not ordered or not ordered[-1].fragment:
            return cls(tuple(ordered))
        padded: list[Parameter] = []
        chunk = _grid(ordered).chunk_elements
        for fragment in range(ordered[-1].fragment + 1):
            own = [p for p in ordered if p.fragment == fragment]
            lacking = -sum(p.size for p in own) % chunk
            padding = Parameter(f"{PADDING}{fragment}", (lacking,), fragment=fragment)
            padded += [*own, padding] if lacking and own[-1] is not ordered[-1] else own
        return cls(tuple(sorted(padded, key=_place)))

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        if len(names) > PARAMETERS_MAX:
            raise ConfigError(f"{len(names)} parameter tensors; the limit is {PARAMETERS_MAX}")
        in_order = all(_place(a) < _place(b) for a, b in pairwise(self.parameters))
        if not in_order or len(set(names)) < len(names):
            raise ConfigError("parameter names are not unique and in order")
        if not 0 < self.elements <= ELEMENTS_MAX:
            raise ConfigError(
                f"{self.elements} trainable elements; a run needs 1 to {ELEMENTS_MAX}",
                fix="set requires_grad=True on what is to be trained" if not self.elements else "",
            )
        others = [tensor.name for tensor in self.frozen or ()]
        if len(others) > FROZEN_LINES_MAX or not all(a < b for a, b in pairwise(others)):
            raise ConfigError(
                f"{len(others)} tensors that are not trained: over {FROZEN_LINES_MAX}, or unordered"
            )
        starts = self._starts
        if self.fragments > 1 and any(start % self.grid.chunk_elements for start in starts):
            raise ConfigError("a fragment does not begin with a chunk")
        if len(starts) < self.fragments or any(a >= b for a, b in pairwise(starts)):
            raise ConfigError(f"one of {self.fragments} fragments is empty")

    @cached_property
    def elements(self) -> int:
        """Return the length of θ."""
        return sum(p.size for p in self.parameters)

    def outline(self, method: str, elements: int = 1) -> Manifest:
        """Return a manifest of the same names, shapes and dtypes, without the elements.

        ``elements`` of the method's own are added. It is for runs whose trainers hold the
        parameters, so that daemons compare models and keep nothing of them.
        """
        empty = [Parameter(p.name, (0, *p.shape), p.dtype) for p in self.parameters]
        return Manifest.of([*empty, Parameter(f"{OUTLINE}{method}", (elements,))])

    @property
    def fragments(self) -> int:
        """Return how many fragments these parameters have been sorted into; 1: not at all."""
        return self.parameters[-1].fragment + 1 if self.parameters else 1

    @cached_property
    def grid(self) -> ChunkGrid:
        """Return the grid that cuts θ into chunks."""
        return _grid(self.parameters)

    def part_of(self, fragment: int, fragments: int) -> slice:
        """Return the slice of the vector where a fragment of a run lies; see ``chunks_of``."""
        first, end = self.chunks_of(fragment, fragments)
        return slice(self.grid.bounds(first)[0], self.grid.bounds(end - 1)[1])

    def chunks_of(self, fragment: int, fragments: int) -> tuple[int, int]:
        """Return the chunks [first, end) of a fragment of a run.

        Parameters that have not been sorted are cut into equal parts. Raise ConfigError if there is
        no such fragment.
        """
        if self.fragments == 1 or fragments == 1:
            return chunk_range(fragment, fragments, self.grid.count)
        if not 0 <= fragment < fragments == self.fragments:
            raise ConfigError(
                f"there is no fragment {fragment} of {fragments} in parameters that are sorted "
                f"into {self.fragments}"
            )
        ends = [*self._starts[1:], self.elements]
        size = self.grid.chunk_elements
        return self._starts[fragment] // size, -(-ends[fragment] // size)

    @cached_property
    def _starts(self) -> list[int]:
        """Return the first element of each fragment that has a parameter."""
        firsts = {p.fragment: self.offsets[p.name][0] for p in reversed(self.parameters)}
        return [firsts[fragment] for fragment in sorted(firsts)]

    @cached_property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """Return where each parameter lies in θ: name -> (lo, hi)."""
        offsets, lo = {}, 0
        for p in self.parameters:
            offsets[p.name] = (lo, lo + p.size)
            lo += p.size
        return offsets

    def segments(self, lo: int, hi: int) -> Iterator[tuple[int, int, str]]:
        """Yield the stretches of one dtype that cover ``θ[lo:hi]``, in order: (lo, hi, dtype)."""
        starts, dtypes = self._runs
        for i in range(bisect_right(starts, lo) - 1, len(dtypes)):
            start = max(lo, starts[i])
            if start >= hi:
                return
            yield start, min(hi, starts[i + 1]), dtypes[i]

    @cached_property
    def _runs(self) -> tuple[list[int], list[str]]:
        """Return the starts of all stretches of one dtype (and one end), and the dtype of each.

        Neighbours of one dtype are merged.
        """
        starts: list[int] = []
        dtypes: list[str] = []
        for p in self.parameters:
            if p.size and (not dtypes or dtypes[-1] != p.dtype):
                starts.append(self.offsets[p.name][0])
                dtypes.append(p.dtype)
        return [*starts, self.elements], dtypes

    def digest(self) -> bytes:
        """Return the SHA-256 of the wire form of the parameters: equal exactly when those are."""
        return hashlib.sha256(self._parameters_to_wire().encode()).digest()

    def to_wire(self) -> str:
        head = self._parameters_to_wire()
        if self.frozen is None:
            return head
        return f"{head}\n\n" + "\n".join(f"{t.name}\t{t.outline}\t{t.digest}" for t in self.frozen)

    def _parameters_to_wire(self) -> str:
        return "\n".join(
            f"{p.name}\t{p.dtype}\t{'x'.join(map(str, p.shape))}"
            + (f"\t{p.fragment}" if self.fragments > 1 else "")
            for p in self.parameters
        )

    @classmethod
    def from_wire(cls, text: str) -> Manifest:
        """Parse what ``to_wire`` gave; raise RemoteProtocolError for anything else."""
        head, looked, tail = text.partition("\n\n")
        if head.count("\n") >= PARAMETERS_MAX or tail.count("\n") >= FROZEN_LINES_MAX:
            raise RemoteProtocolError(
                f"manifest of over {PARAMETERS_MAX} parameters or {FROZEN_LINES_MAX} frozen tensors"
            )
        try:
            frozen = tuple(map(_parse_frozen, tail.split("\n"))) if tail else ()
            manifest = cls(tuple(map(_parse_line, head.split("\n"))), frozen if looked else None)
        except (ConfigError, ValueError) as error:
            raise RemoteProtocolError(f"malformed manifest: {str(error)[:200]}") from error
        if manifest.to_wire() != text:  # int() also takes signs, blanks and leading zeros
            raise RemoteProtocolError("malformed manifest: numbers are not in plain form")
        return manifest

    def differences(self, run: Manifest) -> list[str]:
        """Return one line for each parameter that differs from the run's.

        The lines call this manifest "yours". Of very many, the last line says how many more there
        are.
        """
        return _differences(self.parameters, run.parameters)

    def frozen_differences(self, run: Manifest) -> list[str]:
        """Return one line for each tensor that is not trained and differs from the run's.

        There are none where this trainer, or the first of the run, has not looked.
        """
        if self.frozen is None or run.frozen is None:
            return []
        return _differences(self.frozen, run.frozen)


def _differences(mine: Sequence[Named], run: Sequence[Named]) -> list[str]:
    yours, theirs = {one.name: one for one in mine}, {one.name: one for one in run}
    lines = []
    for name in sorted(yours.keys() | theirs.keys()):
        own, other = yours.get(name), theirs.get(name)
        if own != other:
            lines.append(f"{name}: yours {own or 'missing'}, run {other or 'missing'}")
    more = len(lines) - DIFFERENCES_MAX
    return [*lines[:DIFFERENCES_MAX], f"... and {more} more"] if more > 0 else lines


def _parse_frozen(line: str) -> FrozenTensor:
    name, outline, digest = line.split("\t")
    return FrozenTensor(name, outline, digest)


def _parse_line(line: str) -> Parameter:
    name, _, rest = line.partition("\t")
    dtype, _, rest = rest.partition("\t")
    dimensions, _, fragment = rest.partition("\t")
    shape = dimensions.split("x", DIMENSIONS_MAX) if dimensions else []
    return Parameter(name, tuple(map(int, shape)), dtype, int(fragment or 0))


def _place(parameter: Parameter) -> tuple[int, str]:
    return parameter.fragment, parameter.name


def _grid(parameters: Sequence[Parameter]) -> ChunkGrid:
    """Return the grid that cuts these parameters into chunks.

    Of fragments the chunks are as for a vector of their mean size: less is padded.
    """
    total = sum(p.size for p in parameters)
    fragments = parameters[-1].fragment + 1
    if fragments == 1:
        return grid_for(total)
    own = sum(p.size for p in parameters if not p.is_padding)
    return ChunkGrid(total, grid_for(max(1, own // fragments)).chunk_elements)


def chunk_range(fragment: int, fragments: int, chunks: int) -> tuple[int, int]:
    """Return the chunks [first, end) of a fragment.

    There is always at least one, and the sizes of fragments differ by one at most. Raise
    ConfigError if there are more fragments than chunks, or no such fragment.
    """
    if not 0 <= fragment < fragments <= chunks:
        raise ConfigError(
            f"there is no fragment {fragment} of {fragments} in a vector of {chunks} chunks",
            fix=f"set fragments to at most {chunks}",
        )
    return fragment * chunks // fragments, (fragment + 1) * chunks // fragments


def fragment_grid(grid: ChunkGrid, first: int, end: int) -> ChunkGrid:
    """Return the grid of the chunks [first, end) as a vector of their own, from chunk 0 on."""
    return ChunkGrid(grid.bounds(end - 1)[1] - grid.bounds(first)[0], grid.chunk_elements)
