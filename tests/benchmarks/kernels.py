"""GB/s of float32 input on one core, the kernels in C beside numpy.

    python tests/benchmarks/kernels.py [--times 9] [--levels avx2]

Chunks of 1 MiB that stay in the cache, and 64 MiB from memory; medians. Counted is the processor
time of the thread, so that other programs on the machine disturb less. The numpy columns are what
codecs and outer step do without kernels, measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import codecs
from atoll.collectives.native import KERNELS, NUMPY_REASON, Kernels
from atoll.optim.outer import nesterov_step

F32 = NDArray[np.float32]
SIZES_MIB = (1, 64)
CHUNK, KEEP = 4096, 64  # of top-k
MEASURED_MIB = 64  # small sizes are done so often that each measurement is long enough
Work = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9, help="measurements of each")
    parser.add_argument("--levels", nargs="*", help="instruction sets; all that are there")
    parser.add_argument("--numpy", action="store_true", help="only that, as JSON")
    arguments = parser.parse_args()
    if arguments.numpy:
        rates = [measured(numpy_work(random(mib)), mib, arguments.times) for mib in SIZES_MIB]
        print(json.dumps(rates))
        return
    if KERNELS is None:
        raise SystemExit(f"no kernels: {NUMPY_REASON}")
    levels = arguments.levels or KERNELS.levels()
    titles = [f"{name} {mib} MiB" for mib in SIZES_MIB for name in ("numpy", *levels)]
    print(f"{'GB/s of float32':<24}" + "".join(f"{title:>14}" for title in titles))
    columns: list[dict[str, float]] = []
    for mib, in_numpy in zip(SIZES_MIB, numpy_rates(arguments.times), strict=True):
        columns.append(in_numpy)
        for level in levels:
            KERNELS.use(level)
            columns.append(measured(kernel_work(KERNELS, random(mib)), mib, arguments.times))
    for what in columns[1]:
        rates = [f"{column[what]:.2f}" if what in column else "-" for column in columns]
        print(f"{what:<24}" + "".join(f"{rate:>14}" for rate in rates))


def random(mib: int) -> F32:
    return np.random.default_rng(0).standard_normal(mib << 18, np.float32)


def numpy_rates(times: int) -> list[dict[str, float]]:
    """What this script measures where no kernels are loaded."""
    done = subprocess.run(
        [sys.executable, __file__, "--numpy", "--times", str(times)],
        env={**os.environ, "ATOLL_KERNELS": "numpy"},
        capture_output=True,
        text=True,
        check=True,
    )
    rates: list[dict[str, float]] = json.loads(done.stdout)
    return rates


def measured(works: dict[str, Work], mib: int, times: int) -> dict[str, float]:
    return {what: rate_gb(work, mib, times) for what, work in works.items()}


def rate_gb(work: Work, mib: int, times: int) -> float:
    """GB of float32 input per second, the median of ``times``."""
    repeats = MEASURED_MIB // mib
    work()  # pages are touched, scratch is there
    seconds = []
    for _ in range(times):
        start = time.thread_time()
        for _ in range(repeats):
            work()
        seconds.append((time.thread_time() - start) / repeats)
    return (mib << 20) / statistics.median(seconds) / 1e9


def kernel_work(kernels: Kernels, values: F32) -> dict[str, Work]:
    works: dict[str, Work] = {}
    count, into, copy = values.size, np.zeros_like(values), values.copy()
    for codec, bits, block in (
        ("float32", 32, 0),
        ("int8", 8, 256),
        ("int4", 4, 64),
        ("fp4_e3m0", 4, 64),
    ):
        data = np.zeros((4 * count // block if block else 0) + count * bits // 8, np.uint8)
        kernels.encode(codec, values, data)  # type: ignore[arg-type]
        works |= {
            f"{codec} encode": lambda c=codec, d=data: kernels.encode(c, values, d),
            f"{codec} check": lambda c=codec, d=data: kernels.check(c, d, count),
            f"{codec} decode": lambda c=codec, d=data: kernels.decode(c, d, into),
            f"{codec} decode_add": lambda c=codec, d=data: kernels.decode_add(c, d, 0.25, into),
        }
    indices = np.zeros(count // CHUNK * KEEP, np.uint16)
    codes = np.zeros(indices.size, np.uint8)
    packed, packed2 = np.zeros(indices.size * 12 // 8, np.uint8), np.zeros(indices.size // 4, "u1")
    theta, momentum = np.zeros_like(values), np.zeros_like(values)
    for rule in ("nesterov", "heavy_ball", "sgd"):
        works[f"{rule} step"] = lambda r=rule: kernels.outer_step(
            r, theta, momentum, copy, 0.7, 0.9, theta, momentum
        )
    return works | {
        "top 64 of 4096 select": lambda: kernels.select_top(values, CHUNK, KEEP, indices),
        "top 64 of 4096 pack": lambda: (
            kernels.pack12(indices, packed),
            kernels.pack2(codes, packed2),
        ),
        "top 64 of 4096 unpack": lambda: (
            kernels.unpack12(packed, indices),
            kernels.unpack2(packed2, codes),
        ),
    }


def numpy_work(values: F32) -> dict[str, Work]:
    works: dict[str, Work] = {}
    into, copy, scratch = np.zeros_like(values), values.copy(), np.zeros_like(values)
    for name in ("float32", "int8", "int4", "fp4_e3m0"):
        if name not in codecs.CODECS:
            continue
        codec = codecs.get_codec(name)
        data = np.zeros(codec.encoded_bytes(values.size), np.uint8)
        codec.encode(values, data)
        works |= {
            f"{name} encode": lambda c=codec, d=data: c.encode(values, d),
            f"{name} check": lambda c=codec, d=data: c.check(d, values.size),
            f"{name} decode": lambda c=codec, d=data: c.decode(d, into),
            f"{name} decode_add": lambda c=codec, d=data: c.decode_add(d, 0.25, into),
        }
    theta, momentum = np.zeros_like(values), np.zeros_like(values)
    rows = values.reshape(-1, CHUNK)

    def select() -> None:
        magnitudes = np.abs(rows)
        lowest = np.partition(magnitudes, CHUNK - KEEP, axis=1)[:, CHUNK - KEEP, None]
        np.flatnonzero(magnitudes >= lowest)

    works["nesterov step"] = lambda: nesterov_step(
        theta,
        momentum,
        copy,
        lr=0.7,
        mu=0.9,
        out_theta=theta,
        out_momentum=momentum,
        scratch=scratch,
    )
    works["top 64 of 4096 select"] = select
    return works


if __name__ == "__main__":
    main()
