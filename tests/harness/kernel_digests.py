"""Print a digest of what each kernel makes of fixed inputs, and of what numpy makes of them.

It needs the wheel and no torch, so that a machine of another kind, or an emulator of one, can run
it: ``python kernel_digests.py``. Each line has a kernel, the instruction set ("numpy" for the numpy
form) and a digest. Inputs are made of integers: a logarithm may differ between machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from atoll.collectives import native
from atoll.collectives.codecs import CODECS, NUMPY_CODECS
from atoll.collectives.native import KERNEL_CODECS, KERNELS
from atoll.optim import outer_step

SIZES = (1, 63, 64, 65, 4_095, 4_097, 20_011)  # blocks, pieces, and what is left of them
ROWS, COLUMNS = 7, 1_031


def values(count: int, seed: int) -> Any:
    """Return any finite float32 for odd seeds, and values within -1 and 1 for even ones."""
    words = np.random.Generator(np.random.Philox(seed)).integers(0, 2**32, count, np.uint32)
    if seed % 2:
        return np.where(words >> 23 & 255 == 255, words & 0xBFFF_FFFF, words).view(np.float32)
    return words.astype(np.int32).astype(np.float32) * np.float32(2.0**-31)


def of_codec(name: str, codecs: Any) -> Iterator[bytes]:
    """Yield what a codec encodes, decodes and adds."""
    codec = codecs[name]
    for seed, size in enumerate(SIZES * 2):
        vector = values(size, seed)
        data = np.empty(codec.encoded_bytes(size), np.uint8)
        keyed = (seed * 2**59 + 17,) if codec.contract.keyed else ()
        codec.encode(vector, data, *keyed)
        out = np.empty(size, np.float32)
        codec.decode(data, out)
        total = values(size, 2 * seed)
        with np.errstate(over="ignore", invalid="ignore"):
            codec.decode_add(data, 1 / 3, total)
        yield data.tobytes() + out.tobytes() + np.nan_to_num(total).tobytes()


def of_rule(rule: Any, dtype: type[Any]) -> Iterator[bytes]:
    """Yield parameters and momentum after an outer step."""
    for seed, size in enumerate(SIZES):
        theta, momentum, delta = (values(size, 2 * (seed + n)).astype(dtype) for n in range(3))
        outer_step.outer_step(
            rule, theta, momentum, delta, lr=0.7, mu=0.9, out_theta=theta, out_momentum=momentum,
            scratch=np.empty(size, dtype), clip=0.0,
        )  # fmt: skip
        yield theta.tobytes() + momentum.tobytes()


def of_rows(kernels: native.Kernels) -> Iterator[bytes]:
    """Yield what the kernels of robust rules and audits give; these have no codec."""
    rows, coefficients = values(ROWS * COLUMNS, 2), values(3 * ROWS, 4)
    narrow, kept = np.empty(3 * COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    gram, sums = np.zeros(ROWS * ROWS), np.zeros(8)
    network = np.array([[i, j] for i in range(ROWS) for j in range(i + 1, ROWS)], np.uint8)
    kernels.mix(rows, ROWS, coefficients, narrow)
    kernels.order(rows, ROWS, None, network.reshape(-1), 2, 3, False, kept)
    kernels.gram(rows, ROWS, gram)
    yield narrow.tobytes() + kept.tobytes() + gram.tobytes()
    kernels.sketch(rows, np.arange((rows.size + 7) // 8).astype(np.uint8), sums)
    yield sums.tobytes()
    kernels.squares(rows, values(rows.size, 6), sums)
    yield sums.tobytes()
    peaks = np.empty(-(-rows.size // 64), np.float32)
    kernels.peaks(rows, 64, peaks)
    yield peaks.tobytes()


def digest(parts: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def all_lines(level: str) -> Iterator[str]:
    """Yield a line for each kernel; ``level`` is an instruction set, or "numpy"."""
    codecs = NUMPY_CODECS if level == "numpy" else CODECS
    for name in KERNEL_CODECS:
        yield f"{name} {level} {digest(of_codec(name, codecs))}"
    makes: dict[str, Callable[[], Iterator[bytes]]] = {}
    for rule in ("nesterov", "heavy_ball", "sgd"):
        for dtype in (np.float32, np.float64):
            makes[f"{rule}-{dtype.__name__}"] = lambda r=rule, d=dtype: of_rule(r, d)
    if level != "numpy":
        assert KERNELS is not None
        makes["rows"] = lambda: of_rows(KERNELS)
    for name, make in makes.items():
        yield f"{name} {level} {digest(make())}"


def main() -> None:
    """Print the lines of every instruction set, and of numpy."""
    assert KERNELS is not None, native.NUMPY_REASON
    for level in KERNELS.levels():
        KERNELS.use(level)
        print(*all_lines(level), sep="\n")
    outer_step.KERNELS = None  # type: ignore[misc, assignment]
    print(*all_lines("numpy"), sep="\n")


if __name__ == "__main__":
    main()
