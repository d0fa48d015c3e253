"""What tests of codecs share: bytes of values, values of bytes, errors, and vectors to try."""

from __future__ import annotations

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec, Decoder

GAUSS, LAPLACE, STUDENT = "gauss", "laplace", "student_t3"


def encoded(codec: Codec, values: F32, key: int = 0) -> U8:
    out = np.full(codec.encoded_bytes(values.size), 0xEE, np.uint8)
    codec.encode(values, out, key)
    return out


def decoded(codec: Decoder, data: U8, count: int) -> F32:
    out = np.full(count, np.nan, np.float32)
    codec.decode(data, out)
    return out


def through(codec: Codec, values: F32, key: int = 0) -> F32:
    return decoded(codec, encoded(codec, values, key), values.size)


def relative_error(values: F32, back: F32) -> float:
    """|back - values|^2 / |values|^2, in float64."""
    exact = values.astype(np.float64)
    return float(np.sum((back - exact) ** 2) / np.sum(exact**2))


def draw(kind: str, count: int, seed: int = 7) -> F32:
    rng = np.random.default_rng(seed)
    if kind == STUDENT:
        return rng.standard_t(3, count).astype(np.float32)
    if kind == LAPLACE:
        return rng.laplace(size=count).astype(np.float32)
    return rng.standard_normal(count).astype(np.float32)
