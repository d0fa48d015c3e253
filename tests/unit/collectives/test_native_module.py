"""The kernels as a module: top-k and packing, refusals, loading, and builds without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.collectives.native import KERNELS, NUMPY_REASON, TOP_CHUNK_MAX, Kernels

ROOT = Path(__file__).parents[3]
CODECS = ("float32", "int8", "int4", "fp4_e3m0")
every_codec = pytest.mark.parametrize("codec", CODECS)
checked = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def size(codec: str, count: int) -> int:
    block, bits = {"float32": (0, 32), "int8": (256, 8)}.get(codec, (64, 4))
    return (4 * -(-count // block) if block else 0) + -(-count * bits // 8)


def zeros(codec: str, count: int) -> NDArray[np.uint8]:
    return np.zeros(size(codec, count), np.uint8)


# ---------------------------------------------------------------- top-k and packing


def numpy_top(values: NDArray[np.float32], chunk: int, keep: int) -> NDArray[np.uint16]:
    rows = np.abs(values).reshape(-1, chunk)
    first = np.argsort(-rows, axis=1, kind="stable")[:, :keep]
    return np.sort(first, axis=1).astype(np.uint16).reshape(-1)


@given(data=st.data(), seed=st.integers(0, 2**32), few=st.booleans())
@checked
def test_the_largest_are_selected(
    kernels: Kernels, data: st.DataObject, seed: int, few: bool
) -> None:
    chunk = data.draw(st.sampled_from([1, 2, 63, 64, 65, 130, 1000, 4095, 4096]))
    keep = data.draw(st.integers(1, chunk) | st.integers(1, min(chunk, 64)))
    random = np.random.default_rng(seed)
    values = random.standard_normal(3 * chunk).astype(np.float32)
    if few:  # many ties, and zeros of both signs
        values = np.sign(values) * random.integers(0, 3, values.size).astype(np.float32)
    out = np.empty(3 * keep, np.uint16)
    assert kernels.select_top(values, chunk, keep, out)
    assert np.array_equal(out, numpy_top(values, chunk, keep))
    values[random.integers(values.size)] = random.choice([np.nan, np.inf, -np.inf])
    assert not kernels.select_top(values, chunk, keep, out)


@given(raw=st.binary(max_size=400))
@checked
def test_packed_numbers(kernels: Kernels, raw: bytes) -> None:
    for bits, dtype in ((12, np.uint16), (2, np.uint8)):
        numbers = np.frombuffer(raw[: len(raw) // 2 * 2], dtype)
        pack, unpack = getattr(kernels, f"pack{bits}"), getattr(kernels, f"unpack{bits}")
        whole = sum(int(n) % 2**bits << bits * i for i, n in enumerate(numbers))
        data = np.full(-(-numbers.size * bits // 8), 0xEE, np.uint8)
        pack(numbers, data)
        assert data.tobytes() == whole.to_bytes(data.size, "little")
        out = np.full_like(numbers, 0xEE)
        assert unpack(data, out)
        assert np.array_equal(out, numbers % 2**bits)
        if numbers.size * bits % 8:
            data[-1] |= 0x80
            assert not unpack(data, out)


# ---------------------------------------------------------------- values and bytes refused


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found_everywhere(kernels: Any, codec: str, bad: float) -> None:
    for count in (1, 255, 256, 257, 600):
        for place in {0, count // 2, count - 1}:
            values = np.ones(count, np.float32)
            values[place] = bad
            assert not kernels.encode(codec, values, zeros(codec, count))


def bad_bytes(codec: str, count: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes that encode zeros, each with one thing wrong."""
    if codec == "float32":
        for value in (np.nan, np.inf, -np.inf):
            for place in (0, count - 1):
                data = zeros(codec, count)
                data.view("<f4")[place] = value
                yield data
        return
    blocks = -(-count // (256 if codec == "int8" else 64))
    limit = np.finfo(np.float32).max / {"int8": 127, "int4": 7, "fp4_e3m0": 16}[codec]
    tiny = np.finfo(np.float32).tiny * np.float32(4 if codec == "fp4_e3m0" else 1)
    low = np.nextafter(tiny, np.float32(0))
    for scale in (np.nan, np.inf, -np.inf, -0.0, -1.0, low, -tiny, 1e-45, limit * 1.0001):
        for block in (0, blocks - 1):
            data = zeros(codec, count)
            data[4 * block : 4 * block + 4] = np.float32(scale).reshape(1).view(np.uint8)
            yield data
    wrong = {"int8": (0x80,), "int4": (0x08, 0x80, 0x88), "fp4_e3m0": ()}[codec]
    for byte in wrong:
        for place in (4 * blocks, size(codec, count) - 1):
            data = zeros(codec, count)
            data[place] = byte
            yield data
    if codec != "int8" and count % 2:  # the nibble after the last
        data = zeros(codec, count)
        data[-1] = 0x10
        yield data


@every_codec
@pytest.mark.parametrize("count", [1, 63, 300, 301])
def test_malformed_bytes_leave_the_output_alone(kernels: Any, codec: str, count: int) -> None:
    ones = np.ones(count, np.float32)
    assert kernels.check(codec, zeros(codec, count), count)
    for data in bad_bytes(codec, count):
        assert not kernels.check(codec, data, count)
        assert not kernels.decode(codec, data, ones)
        assert not kernels.decode_add(codec, data, 1.0, ones)
        assert (ones == 1).all()


# ---------------------------------------------------------------- arguments refused


@every_codec
def test_wrong_lengths(kernels: Any, codec: str) -> None:
    values = np.ones(300, np.float32)
    for length in (0, 1, size(codec, 300) - 1, size(codec, 300) + 1):
        data = np.zeros(length, np.uint8)
        for call in (
            lambda d=data: kernels.encode(codec, values, d),
            lambda d=data: kernels.check(codec, d, 300),
            lambda d=data: kernels.decode(codec, d, values),
            lambda d=data: kernels.decode_add(codec, d, 1.0, values),
        ):
            with pytest.raises(ValueError, match="elements, not"):
                call()
    for count in (-1, 2**61, 2**63 - 1):
        with pytest.raises(ValueError, match=r"count|many elements"):
            kernels.check(codec, zeros(codec, 300), count)
    with pytest.raises(OverflowError):
        kernels.check(codec, zeros(codec, 300), 2**80)
    assert (values == 1).all()


@every_codec
def test_wrong_arrays(kernels: Any, codec: str) -> None:
    out, good = zeros(codec, 8), np.ones(8, np.float32)
    frozen = good.copy()
    frozen.flags.writeable = False
    askew = np.zeros(33, np.uint8)[1:].view(np.float32)
    wrong = {
        "another type": [good.astype(np.float64), good.view(np.int32), good.astype(">f4")],
        "not flat": [good.reshape(2, 4), np.float32(1).reshape(())],
        "not contiguous": [np.ones(16, np.float32)[::2], good[::-1]],
        "not aligned|another type": [askew],
    }
    for message, candidates in wrong.items():
        for array in candidates:
            with pytest.raises(ValueError, match=message):
                kernels.encode(codec, array, out)
            with pytest.raises(ValueError, match=message):
                kernels.decode_add(codec, out, 1.0, array)
    with pytest.raises(ValueError, match="read-only"):
        kernels.decode(codec, out, frozen)
    with pytest.raises(ValueError, match="read-only"):
        kernels.encode(codec, good, bytes(out.size))
    with pytest.raises(TypeError):
        kernels.encode(codec, [1.0] * 8, out)
    with pytest.raises(ValueError, match="shares memory"):
        kernels.encode(codec, good, good.view(np.uint8)[: out.size])
    with pytest.raises(TypeError, match="3 arguments, not 2"):
        kernels.encode(codec, good)
    with pytest.raises(ValueError, match="no kernels for codec"):
        kernels.encode("int9", good, out)


def test_wrong_outer_steps(kernels: Any) -> None:
    arrays = [np.ones(8, np.float32) for _ in range(5)]

    def step(*inputs: Any, rule: str = "nesterov") -> None:
        kernels.outer_step(rule, *inputs[:3], 0.7, 0.9, *inputs[3:])

    for place in range(5):
        for other in (np.ones(7, np.float32), np.ones(8)):
            wrong = [*arrays[:place], other, *arrays[place + 1 :]]
            with pytest.raises(ValueError, match=r"another type|elements, not"):
                step(*wrong)
    theta, momentum, delta, out, kept = arrays
    both = np.ones(12, np.float32)
    for shared in (
        (theta, momentum, delta, out, out),
        (theta, momentum, delta, delta, kept),
        (theta, momentum, delta, out, delta),
        (theta, momentum, delta, momentum, kept),
        (both[:8], momentum, delta, both[4:], kept),
    ):
        with pytest.raises(ValueError, match="shares memory"):
            step(*shared)
    with pytest.raises(ValueError, match="no outer step"):
        step(*arrays, rule="adam")
    assert all((array == 1).all() for array in arrays)


def test_wrong_selections(kernels: Any) -> None:
    values, out = np.ones(200, np.float32), np.zeros(20, np.uint16)
    for chunk, keep in ((0, 0), (100, 0), (10, 11), (TOP_CHUNK_MAX + 1, 1), (3, 1), (100, 9)):
        with pytest.raises(ValueError):
            kernels.select_top(values, chunk, keep, out)
    with pytest.raises(ValueError, match="elements, not"):
        kernels.pack12(out, np.zeros(29, np.uint8))
    with pytest.raises(ValueError, match="elements, not"):
        kernels.unpack2(np.zeros(4, np.uint8), np.zeros(20, np.uint8))


# ---------------------------------------------------------------- loading and building

LOADING = """
import sys
{before}
from atoll.collectives import native
said = []
native.say_once(said.append)
native.say_once(said.append)
assert native.KERNELS is None
assert len(said) == 1 and {reason!r} in said[0], said
"""


@pytest.mark.parametrize(
    ("before", "reason", "environment"),
    [
        ("", "ATOLL_KERNELS=numpy", {"ATOLL_KERNELS": "numpy"}),
        ("sys.modules['atoll._kernels'] = None", "atoll._kernels", {}),
        ("sys.modules['atoll._kernels'] = sys", "other sources", {}),
    ],
)
def test_without_kernels_numpy_is_used_and_said_once(
    before: str, reason: str, environment: dict[str, str]
) -> None:
    code = LOADING.format(before=before, reason=reason)
    environment = {**os.environ, "ATOLL_KERNELS": "", **environment}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_build_without_a_compiler_succeeds(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "collectives" / "native", tmp_path / "collectives" / "native")
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "failed" in built.stdout + built.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Or every other test of kernels would be skipped when they fail to build."""
    if os.environ.get("ATOLL_KERNELS") != "numpy" and shutil.which("cc"):
        assert KERNELS is not None, NUMPY_REASON
