"""Turn float32 values into bytes on the wire, and back: the codecs.

A codec is a pure function between values and bytes (and a key, for those that round or choose at
random). Both directions are bit-deterministic (one fixed order of operations, no fused
multiply-add), because every member applies the decoded bytes and the chain of rounds is made of
their digests.

Encoded layouts are little-endian and without padding; the module of each codec has its own::

    plain.py      float32, bfloat16, float16
    integers.py   int8, int4; rounded at random (_sr) or on a shared shifted grid (_shift)
    levels.py     fp8_e4m3, fp8_e5m2, fp4_e2m1, fp4_e3m0, dynamic8, int2
    signs.py      sign, ternary
    sparse.py     topk, randk
    gathered.py   results that consist of what all participants sent
    mean.py       results in more bits than the parts that they are the mean of

No bytes that pass ``check`` decode to NaN or infinity, and where values have scales a processor
that flushes subnormal numbers to zero decodes like every other (see scales.py).

Those whose contract says ``keyed`` need a key of their own for each vector that is encoded. The
same key again would repeat the same choices, and errors of different peers would not cancel out.
"""

from __future__ import annotations

from typing import Final

from atoll.collectives.codecs.accelerated import accelerated
from atoll.collectives.codecs.base import (
    F32,
    TILE_ELEMENTS,
    U8,
    Codec,
    Contract,
    Decoder,
    Errors,
)
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.gathered import RULES, Gathered, factors_of, gathered_codec
from atoll.collectives.codecs.integers import (
    BLOCK_ELEMENTS,
    Int4Codec,
    Int4ShiftCodec,
    Int4StochasticCodec,
    Int8Codec,
    Int8ShiftCodec,
    Int8StochasticCodec,
)
from atoll.collectives.codecs.levels import LEVEL_CODECS
from atoll.collectives.codecs.mean import MeanCodec
from atoll.collectives.codecs.plain import Bfloat16Codec, Float16Codec, Float32Codec
from atoll.collectives.codecs.scales import SCALE_MAX, SCALE_MIN
from atoll.collectives.codecs.signs import SignCodec, TernaryCodec
from atoll.collectives.codecs.sparse import RandKCodec, TopKCodec
from atoll.collectives.errors import CodecError

__all__ = [
    "BLOCK_ELEMENTS",
    "CODECS",
    "F32",
    "NUMPY_CODECS",
    "RULES",
    "SCALE_MAX",
    "SCALE_MIN",
    "TILE_ELEMENTS",
    "U8",
    "BlockCodec",
    "Codec",
    "Contract",
    "Decoder",
    "Errors",
    "Float32Codec",
    "Gathered",
    "Int8Codec",
    "MeanCodec",
    "factors_of",
    "gathered_codec",
    "get_codec",
    "is_coarse",
    "mean_codec",
]

_ALL: Final[tuple[Codec, ...]] = (
    Float32Codec(),
    Bfloat16Codec(),
    Float16Codec(),
    Int8Codec(),
    Int8StochasticCodec(),
    Int8ShiftCodec(),
    Int4Codec(),
    Int4StochasticCodec(),
    Int4ShiftCodec(),
    *LEVEL_CODECS,
    SignCodec(),
    TernaryCodec(),
    TopKCodec(),
    RandKCodec(),
)

# The reference forms, and what is used: the same on kernels where there are any.
NUMPY_CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in _ALL}
CODECS: Final[dict[str, Codec]] = {codec.name: accelerated(codec) for codec in _ALL}


def get_codec(name: str) -> Codec:
    """Return the codec of that name. Raises CodecError, which lists the known names."""
    try:
        return CODECS[name]
    except KeyError:
        known = ", ".join(sorted(CODECS))
        raise CodecError(f"there is no codec {name!r}", fix=f"use one of: {known}") from None


# The largest relative squared error of a codec, for Gaussian values, where what it loses is lost:
# without error feedback, and always where a mean is encoded again. 4-bit codecs have 1 to 4 %.
CODEC_ERROR_MAX: Final = 0.1
MEAN_OF_COARSE: Final = "int4"  # in which the mean of coarser parts is encoded


def is_coarse(name: str) -> bool:
    """Return whether a codec leaves out so much that it has to be kept for later rounds."""
    return get_codec(name).contract.errors.gauss > CODEC_ERROR_MAX


def mean_codec(name: str) -> Codec:
    """Return the codec of the mean of parts that are encoded as ``name`` says.

    It is the same one, but for coarse ones. Raises CodecError for an unknown name.
    """
    codec = get_codec(name)
    return MeanCodec(codec, get_codec(MEAN_OF_COARSE)) if is_coarse(name) else codec
