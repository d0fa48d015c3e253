"""The kernels as a module: what they refuse, how they are loaded, builds without a compiler."""

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
from numpy.typing import NDArray

from atoll.collectives.codecs import CODECS, NUMPY_CODECS
from atoll.collectives.native import KERNEL_CODECS, KERNELS, NUMPY_REASON

ROOT = Path(__file__).parents[3]
every_codec = pytest.mark.parametrize("codec", KERNEL_CODECS)


def size(codec: str, count: int) -> int:
    return NUMPY_CODECS[codec].encoded_bytes(count)


def zeros(codec: str, count: int) -> NDArray[np.uint8]:
    """What encodes zeros: but for topk's places these are zeros."""
    data = np.zeros(size(codec, count), np.uint8)
    NUMPY_CODECS[codec].encode(np.zeros(count, np.float32), data)
    return data


# ---------------------------------------------------------------- values and bytes refused


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found_everywhere(kernels: Any, codec: str, bad: float) -> None:
    for count in (1, 255, 256, 257, 600):
        for place in {0, count // 2, count - 1}:
            values = np.ones(count, np.float32)
            values[place] = bad
            assert not kernels.encode(codec, values, 0, zeros(codec, count))


def bad_bytes(codec: str, count: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes that encode zeros, each with one thing wrong."""
    for number, places in bad_numbers(codec, count):
        for place in places:
            data = zeros(codec, count)
            wrong = np.frombuffer(number, np.uint8)
            data[place : place + wrong.size] = wrong
            yield data


def bad_numbers(codec: str, count: int) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """What is not allowed, and where."""
    last = size(codec, count) - 1
    if codec == "float32":
        for value in (np.nan, np.inf, -np.inf):
            yield np.float32(value).tobytes(), (0, last - 3)
    elif codec in ("bfloat16", "float16"):
        for bits in (0x7F80, 0x7FFF, 0xFF80) + (0x7C00, 0xFE00) * (codec == "float16"):
            yield np.uint16(bits).tobytes(), (0, last - 1)
    elif codec == "topk":
        for value in (np.nan, np.inf, -np.inf, -0.0, 1e-45):
            yield np.float32(value).tobytes(), (0, 12)
        yield b"\xff\x0f", (16,)  # a place beyond the vector
        if -(-count // 64) % 4:
            yield b"\xc0", (last,)
    elif codec.startswith("fp8"):
        low, high, top = (10, 246, 0x7E) if codec == "fp8_e4m3" else (17, 239, 0x7B)
        blocks = -(-count // 32)
        for scale in (1, low - 1, high + 1, 255):
            yield bytes([scale]), (0, blocks - 1)
        for code in (top + 1, 0x7F, 0x80 | top + 1, 0xFF):
            yield bytes([code]), (blocks, last)
    elif codec == "dynamic8":
        blocks = -(-count // 256)
        low = np.nextafter(np.float32(2.0**-105), np.float32(0))
        for scale in (np.nan, np.inf, -np.inf, -0.0, low, -low, 1e-45):
            yield np.float32(scale).tobytes(), (0, 4 * (blocks - 1))
    else:
        yield from bad_scales_and_codes(codec, count)


def bad_scales_and_codes(codec: str, count: int) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    header = 8 if "shift" in codec else 0
    is_few = codec in ("int2", "sign")
    blocks = -(-count // (256 if "int8" in codec or is_few else 64))
    steps = {"int8": 127, "int4": 7, "fp4_e3m0": 16, "int8_shift": 127.5, "int4_shift": 7.5}
    steps |= {"int2": 1.5104, "sign": 1}
    limit = float(np.finfo(np.float32).max) / steps[codec.removesuffix("_sr")]
    limit = np.inf if codec == "sign" else 1.0001 * limit
    tiny = np.finfo(np.float32).tiny * np.float32(4 if codec in ("fp4_e3m0", "int2") else 1)
    tiny *= np.float32(2**17 if header else 1)
    low = np.nextafter(tiny, np.float32(0))
    for scale in (np.nan, np.inf, -np.inf, -0.0, -1.0, low, -tiny, 1e-45, limit):
        yield np.float32(scale).tobytes(), (header, header + 4 * (blocks - 1))
    codes, last = header + 4 * blocks, size(codec, count) - 1
    for byte in {"int8": b"\x80", "int4": b"\x08\x80\x88"}.get(codec[:4], b""):
        yield bytes([byte]), (codes, last)
    if is_few and count % 4:  # what is left of the last byte
        yield b"\x80", (last,)
    elif "int8" not in codec and not is_few and count % 2:  # the nibble after the last
        yield b"\x10", (last,)


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
            lambda d=data: kernels.encode(codec, values, 0, d),
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
    out, good, both = zeros(codec, 8), np.ones(8, np.float32), np.zeros(64, np.uint8)
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
                kernels.encode(codec, array, 0, out)
            with pytest.raises(ValueError, match=message):
                kernels.decode_add(codec, out, 1.0, array)
    with pytest.raises(ValueError, match="read-only"):
        kernels.decode(codec, out, frozen)
    with pytest.raises(ValueError, match="read-only"):
        kernels.encode(codec, good, 0, bytes(out.size))
    with pytest.raises(TypeError):
        kernels.encode(codec, [1.0] * 8, 0, out)
    with pytest.raises(ValueError, match="shares memory"):
        kernels.encode(codec, both.view(np.float32)[:8], 0, both[: out.size])
    with pytest.raises(TypeError, match="4 arguments, not 2"):
        kernels.encode(codec, good)
    with pytest.raises(TypeError, match="int"):
        kernels.encode(codec, good, 1.0, out)
    with pytest.raises(ValueError, match="no kernels for codec"):
        kernels.encode("int9", good, 0, out)


def test_keys_have_64_bits(kernels: Any) -> None:
    values, out = np.ones(8, np.float32), zeros("int8_sr", 8)
    assert kernels.encode("int8_sr", values, 2**64 - 1, out)
    for key in (-1, 2**64, 2**100):
        assert not kernels.encode("int8_sr", values, key, out)


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


def test_every_kernel_is_used() -> None:
    on_kernels = {name for name, codec in CODECS.items() if codec is not NUMPY_CODECS[name]}
    assert on_kernels == (set() if KERNELS is None else set(KERNEL_CODECS))


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
