"""Run codecs on the native kernels, where there are any (collectives/native.py).

The numpy form stays the reference, and says what is wrong with values or bytes that a kernel does
not take. Both give the same bits for every input.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from atoll.collectives.codecs.base import F32, U8, Codec
from atoll.collectives.native import KERNEL_CODECS, KERNELS


def accelerated(codec: Codec) -> Codec:
    """Return the same codec on kernels; itself where there is none for it."""
    if KERNELS is None or codec.name not in KERNEL_CODECS:
        return codec
    native = copy.copy(codec)
    native.__class__ = type(f"Native{type(codec).__name__}", (_OnKernels, type(codec)), {})
    return native


class _OnKernels(Codec):
    """Run a codec on kernels; where one says no, hand over to numpy.

    It goes before the class of a numpy codec.
    """

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        assert KERNELS is not None
        self._check_length(out, values.size)
        if not KERNELS.encode(self.name, values, key, out):
            super().encode(values, out, key)  # type: ignore[safe-super]

    def check(self, data: U8, count: int) -> None:
        assert KERNELS is not None
        self._check_length(data, count)
        if not KERNELS.check(self.name, data, count):
            super().check(data, count)  # type: ignore[safe-super]

    def decode(self, data: U8, out: F32) -> None:
        assert KERNELS is not None
        self._check_length(data, out.size)
        if not KERNELS.decode(self.name, data, out):
            super().decode(data, out)  # type: ignore[safe-super]

    def decode_columns(self, parts: Sequence[U8], count: int, lo: int, out: F32) -> bool:
        assert KERNELS is not None
        KERNELS.decode_columns(self.name, parts, count, lo, out.reshape(-1))
        return True

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        assert KERNELS is not None
        self._check_length(data, into.size)
        if not KERNELS.decode_add(self.name, data, factor, into):
            super().decode_add(data, factor, into)  # type: ignore[safe-super]
