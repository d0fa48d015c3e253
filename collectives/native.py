"""Load the kernels in C: the hot codecs and the outer step, some ten times as fast as in numpy.

They are an optional extension module (sources in collectives/native/), which is built when atoll
is installed, if there is a C compiler. ``KERNELS`` is that module, or None; then numpy does the
work, and ``say_once`` says why. The numpy forms stay the reference: for every finite input each
kernel gives the same bits, with each instruction set, and the tests compare them.

``ATOLL_KERNELS=numpy`` in the environment leaves the kernels unused, to look for the cause of a
difference.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
U8: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]

Rule: TypeAlias = Literal["nesterov", "heavy_ball", "sgd"]

KERNEL_CODECS: Final = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int8_sr",
    "int8_shift",
    "int4",
    "int4_sr",
    "int4_shift",
    "fp4_e3m0",
    "fp8_e4m3",
    "fp8_e5m2",
    "dynamic8",
    "int2",
    "sign",
    "topk",
)

ROWS_MAX: Final = 256  # for `mix`, `order` and `gram`; columns stay in the first-level cache
PIECE: Final = 4_096  # elements in which there are whole blocks of every codec
# INTERFACE of the sources that belong to this file (native/module.c).
_INTERFACE: Final = 6
_VARIABLE: Final = "ATOLL_KERNELS"


class Kernels(Protocol):
    """Describe the functions of ``atoll._kernels``; all arguments are positional.

    Arrays are one-dimensional, C-contiguous and aligned; encoded bytes may lie at any address.
    Nothing that is written may share memory with another argument, except where it is said. What
    breaks these rules, and every wrong length, raises ValueError before anything is written. The
    GIL is released during the work. False means that the values or bytes are not allowed: NaN or
    infinity in values, a key that does not fit into 64 bits, or bytes that encoding never writes.
    """

    def encode(self, codec: str, values: F32, key: int, out: U8, /) -> bool:
        """Encode float32[n] into its bytes.

        ``codec`` is one of ``KERNEL_CODECS``, as are all codecs below. The key is for those that
        round at random. If False is returned, ``out`` holds anything.
        """

    def check(self, codec: str, data: U8, count: int, /) -> bool:
        """Return whether bytes encode ``count`` elements that are all finite."""

    def decode(self, codec: str, data: U8, out: F32, /) -> bool:
        """Decode bytes into float32[n]. If False is returned, nothing is written."""

    def decode_columns(
        self, codec: str, parts: Sequence[U8], count: int, lo: int, out: F32, /
    ) -> None:
        """Decode some columns of several parts.

        Of parts that encode ``count`` elements each, those from ``lo`` on are decoded into ``out``:
        as many of each part, one part after the other. They begin with a PIECE, and end with one or
        with the part. What ``check`` does not allow gives any numbers.
        """

    def decode_add(self, codec: str, data: U8, factor: float, into: F32, /) -> bool:
        """Add ``float32(factor) * decode(data)`` to ``into``, both steps rounded.

        If False is returned, nothing is written. With codec "float32" it is the sum of plain
        arrays: ``values.view(np.uint8)``.
        """

    def weigh(self, data: U8, factor: float, into: F32, first: bool, /) -> bool:
        """Add ``float32(factor) * values`` to ``into`` in one pass, for codec "float32".

        For the ``first`` it gives what it would if ``into`` was 0. False is returned if a value or
        a sum is NaN or infinite, and ``into`` then holds anything.
        """

    def outer_step(
        self,
        rule: Rule,
        theta: Floats,
        momentum: Floats,
        delta: Floats,
        lr: float,
        mu: float,
        out_theta: Floats,
        out_momentum: Floats,
        /,
    ) -> None:
        """Take an outer step as in ``atoll.optim.outer_step``.

        All arrays are of one length and one dtype, float32 or float64::

            nesterov    b' = mu b + delta    theta' = theta - lr (delta + mu b')
            heavy_ball  b' = mu b + delta    theta' = theta - lr b'
            sgd         b' = b               theta' = theta - lr delta

        ``out_theta`` may be ``theta`` itself, and ``out_momentum`` may be ``momentum``.
        """

    def mix(self, rows: F32, count: int, coefficients: F32, out: F32, /) -> None:
        """Compute ``out = coefficients @ rows``.

        There are ``count`` rows, one after the other in one flat array, as are the coefficients,
        ``count`` for each row of ``out``. Every product and sum is rounded, in the order of the
        rows; where a coefficient is zero there is no product.
        """

    def order(
        self,
        rows: F32,
        count: int,
        coefficients: F32 | None,
        network: U8,
        first: int,
        keep: int,
        around: bool,
        out: F32,
        /,
    ) -> None:
        """Sort each column of ``count`` rows, and fill ``out`` with the mean of some of its values.

        With coefficients, the rows that are sorted are what ``mix`` makes of them. The network that
        sorts is pairs of rows, flat. The mean is that of ``keep`` values from the ``first`` on, or,
        ``around`` the median, of those that are closest to it; ``first`` is 0 then. The values are
        finite, and there are at most ROWS_MAX rows, mixed ones too.
        """

    def gram(self, rows: F32, count: int, total: F64, /) -> None:
        """Add ``rows @ rows.T`` to ``total``, float64[count * count].

        Bucket b of a pair is the sum of the products at k = b mod 8, in ascending k, and the
        buckets are added up in their order.
        """

    def sketch(self, values: F32, bits: U8, out: F64, /) -> None:
        """Fill ``out``, float64[8], with the signed sums of a sketch.

        Bucket b is the sum of the values at k = b mod 8, in ascending k, negated where bit k % 8 of
        byte k // 8 is 1. There are just as many bytes as it takes.
        """

    def squares(self, values: F32, other: F32, out: F64, /) -> None:
        """Fill ``out``, float64[8], with sums of the squares of differences.

        Bucket b is the sum of the squares at k = b mod 8, in ascending k; both steps are rounded.
        ``other`` may be ``values``.
        """

    def peaks(self, values: F32, block: int, out: F32, /) -> None:
        """Fill ``out`` with the largest magnitude of each block of ``block`` values.

        The last block may be shorter. The values are finite.
        """

    def level(self) -> str:
        """Return the instruction set in use; "base" is that of every processor of the kind."""

    def levels(self) -> tuple[str, ...]:
        """Return the instruction sets that this processor has kernels for, the fastest last.

        The fastest is in use from the start.
        """

    def use(self, level: str, /) -> None:
        """Use another of ``levels()`` in the whole process, for tests and measurements."""


def _load() -> tuple[Kernels | None, str]:
    """Return the kernels and "", or None and why numpy is used."""
    if os.environ.get(_VARIABLE) == "numpy":
        return None, f"{_VARIABLE}=numpy is set"
    try:
        # By name, because it may not be there, and a type checker has nothing to look into.
        module = importlib.import_module("atoll._kernels")
    except ImportError as error:
        return None, str(error)
    if getattr(module, "INTERFACE", None) != _INTERFACE:
        return None, "they were built from other sources; install atoll again"
    return cast(Kernels, module), ""


_kernels, _reason = _load()
KERNELS: Final = _kernels
NUMPY_REASON: Final = _reason  # "" where the kernels are used
_said: list[str] = []


def say_once(say: Callable[[str], None]) -> None:
    """Hand ``say`` one line that says so if numpy does the work of the kernels.

    The first call in a process does, later ones do nothing.
    """
    if NUMPY_REASON and not _said:
        _said.append(NUMPY_REASON)
        say(f"codecs run in numpy, which is slower: no native kernels ({NUMPY_REASON})")
