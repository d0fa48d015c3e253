"""GB/s of float32 input on one core, the kernels in C beside numpy.

    python tests/benchmarks/kernels.py [--times 9] [--levels avx2] [--only int8 step]

Chunks of 1 MiB that stay in the cache, and 64 MiB from memory; medians. Counted is the processor
time of the thread, so that other programs on the machine disturb less. The numpy columns are what
codecs and outer step do without kernels, measured in a process of its own. Where a bar is set, the
last column says whether the last instruction set passes it with both sizes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in daemons (peer/cli/main.py)

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results

from atoll.collectives.audit.sketch import SEED_BYTES, distance, sign_bits, sketch
from atoll.collectives.codecs import get_codec
from atoll.collectives.native import KERNEL_CODECS, KERNELS, NUMPY_REASON, Rule
from atoll.collectives.robust import get_rule
from atoll.collectives.robust.gram import add_gram
from atoll.optim.outer_step import outer_step

F32 = NDArray[np.float32]
SIZES_MIB = (1, 64)
MEASURED_MIB = 64  # small sizes are done so often that each measurement is long enough
# GB/s on one core, which is 64 Gbit/s of float32: above it no network of ours waits for a codec.
BARS_GB = {f"{name} {way}": 8.0 for name in ("int8", "int4") for way in ("encode", "decode_add")}
BARS_GB |= {f"{name} encode": 8.0 for name in ("fp8_e4m3", "fp8_e5m2", "dynamic8")}
RULES: tuple[Rule, ...] = ("heavy_ball", "sgd")  # nesterov has a form in numpy
PEERS = 16  # of robust rules
ROBUST = ("trimmed(f=3)", "meamed(f=3)", "multi_krum(f=3)", "nnm+trimmed(f=3)", "bulyan(f=3)")
Work = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9, help="measurements of each")
    parser.add_argument("--levels", nargs="*", help="instruction sets; all that are there")
    parser.add_argument("--only", nargs="*", default=[], help="what has one of these in its name")
    parser.add_argument("--numpy", action="store_true", help="only that, as JSON")
    arguments = parser.parse_args()
    if arguments.numpy:
        print(json.dumps([measured(mib, arguments.times, arguments.only) for mib in SIZES_MIB]))
        return
    if KERNELS is None:
        raise SystemExit(f"no kernels: {NUMPY_REASON}")
    levels = arguments.levels or KERNELS.levels()
    titles = [f"{name} {mib} MiB" for mib in SIZES_MIB for name in ("numpy", *levels)]
    print(f"{'GB/s of float32':<24}" + "".join(f"{title:>14}" for title in titles))
    columns: list[dict[str, float]] = []
    last: list[dict[str, float]] = []
    for mib, in_numpy in zip(SIZES_MIB, numpy_rates(), strict=True):
        columns.append(in_numpy)
        for level in levels:
            KERNELS.use(level)
            columns.append(measured(mib, arguments.times, arguments.only))
        last.append(columns[-1])
    for what in columns[-1]:
        rates = [f"{column[what]:.2f}" if what in column else "-" for column in columns]
        print(f"{what:<24}" + "".join(f"{rate:>14}" for rate in rates) + verdict(what, last))
        slowest_gb = min(rates[what] for rates in last)
        results.say(what.replace(" ", "/"), slowest_gb, "GB/s")


def verdict(what: str, last: list[dict[str, float]]) -> str:
    if what not in BARS_GB:
        return ""
    passed = min(rates[what] for rates in last) >= BARS_GB[what]
    return f"  {'above' if passed else 'BELOW'} the bar of {BARS_GB[what]:.0f}"


def random(mib: int) -> F32:
    return np.random.default_rng(0).standard_normal(mib << 18, np.float32)


def numpy_rates() -> list[dict[str, float]]:
    """What this script measures where no kernels are loaded."""
    done = subprocess.run(
        [sys.executable, __file__, "--numpy", *sys.argv[1:]],
        env={**os.environ, "ATOLL_KERNELS": "numpy"},
        capture_output=True,
        text=True,
        check=True,
    )
    rates: list[dict[str, float]] = json.loads(done.stdout)
    return rates


def measured(mib: int, times: int, only: list[str]) -> dict[str, float]:
    return {
        what: rate_gb(work, mib, times)
        for what, work in works(random(mib)).items()
        if not only or any(part in what for part in only)
    }


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


def works(values: F32) -> dict[str, Work]:
    """On kernels where they are loaded, else in numpy."""
    found: dict[str, Work] = {}
    count, into, copy, scratch = values.size, *(np.zeros_like(values) for _ in range(3))
    for name in KERNEL_CODECS:
        codec = get_codec(name)
        data = np.zeros(codec.encoded_bytes(count), np.uint8)
        codec.encode(values, data, 1)
        found |= {
            f"{name} encode": lambda c=codec, d=data: c.encode(values, d, 1),
            f"{name} check": lambda c=codec, d=data: c.check(d, count),
            f"{name} decode": lambda c=codec, d=data: c.decode(d, into),
            f"{name} decode_add": lambda c=codec, d=data: c.decode_add(d, 0.25, into),
        }
    seed, bits = bytes(SEED_BYTES), sign_bits(bytes(SEED_BYTES), 0, count)
    found |= {
        "audit signs": lambda: sign_bits(seed, 0, count),
        "audit sketch": lambda: sketch(values, bits),
        "audit distance": lambda: distance(values, copy),
    }
    rows = values.reshape(PEERS, -1)
    gram = np.zeros((PEERS, PEERS))
    found["robust inner_products"] = lambda: add_gram(rows, gram)
    add_gram(rows, gram)
    for text in ROBUST:
        rule = get_rule(text)
        matrix = rule.matrix(gram, PEERS, 0)
        found[f"robust {text}"] = lambda r=rule, m=matrix: r.aggregate(rows, m)
    theta, momentum = np.zeros_like(values), np.zeros_like(values)
    found["nesterov step"] = lambda: outer_step(
        "nesterov",
        theta,
        momentum,
        copy,
        lr=0.7,
        mu=0.9,
        out_theta=theta,
        out_momentum=momentum,
        scratch=scratch,
    )
    if KERNELS is not None:
        step = KERNELS.outer_step
        for rule in RULES:
            found[f"{rule} step"] = lambda r=rule: step(
                r, theta, momentum, copy, 0.7, 0.9, theta, momentum
            )
    return found


if __name__ == "__main__":
    main()
