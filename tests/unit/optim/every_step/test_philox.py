"""Philox against its authors' vectors and against plain integers."""

from __future__ import annotations

import pytest
import torch

from atoll.optim.every_step.philox import Stream, philox, sign_bits, signed

CPU = torch.device("cpu")
SEED = 0x0123_4567_89AB_CDEF


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """With integers of Python, from the paper's definition."""
    c, k = list(counter), list(key)
    for number in range(10):
        if number:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second % 2**32,
            (first >> 32) ^ c[3] ^ k[1],
            first % 2**32,
        ]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_vectors_of_random123(counter, key, expected):
    found = philox(torch.tensor(counter)[:, None], key[0] | key[1] << 32)
    assert " ".join(f"{word:08x}" for word in found.flatten().tolist()) == expected
    assert plain_philox(counter, key) == found.flatten().tolist()


def test_signs_are_bits_of_blocks():
    stream = Stream(step=2**40 + 5, sample=4095, number=1023)
    found = sign_bits(SEED, [stream], 0, 1000, CPU)[0]
    for j in range(1000):
        counter = [j // 128, 4095 | 1023 << 16, 5, 2**8]
        words = plain_philox(counter, [SEED % 2**32, SEED >> 32])
        bit = words[j % 128 // 32] >> j % 32 & 1
        assert int(found[j]) == -(2**31) * bit


@pytest.mark.parametrize(("lo", "hi"), [(0, 1), (127, 129), (128, 256), (500, 999), (31, 4000)])
def test_any_part_of_several_streams_is_the_same(lo, hi):
    streams = [Stream(3, 1, 0), Stream(3, 1, 1), Stream(2**63, 0, 0)]
    every = sign_bits(SEED, streams, 0, 5000, CPU)
    assert torch.equal(sign_bits(SEED, streams, lo, hi, CPU), every[:, lo:hi])
    for row, stream in zip(every, streams, strict=True):
        assert torch.equal(sign_bits(SEED, [stream], lo, hi, CPU)[0], row[lo:hi])


def test_each_number_of_a_stream_gives_another_one():
    base = {"step": 7, "sample": 3, "number": 2}
    others = [Stream(**{**base, name: base[name] + 1}) for name in base]
    others += [Stream(7, 2, 3), Stream(7 + 2**32, 3, 2)]
    rows = sign_bits(SEED, [Stream(**base), *others], 0, 10_000, CPU).sign()
    rows = torch.cat([rows, sign_bits(SEED + 1, [Stream(**base)], 0, 10_000, CPU).sign()])
    equal = (rows[:, None] == rows).double().mean(2)
    equal.fill_diagonal_(0.5)
    assert float((equal - 0.5).abs().max()) < 0.025  # five standard deviations


def test_signs_are_even_and_uncorrelated():
    z = signed(1.0, sign_bits(1, [Stream(0, 0, 0)], 0, 200_000, CPU)[0])
    assert abs(float(z.mean())) < 0.012
    for lag in (1, 32, 128):
        assert abs(float((z[lag:] * z[:-lag]).mean())) < 0.012


@pytest.mark.parametrize("value", [1.0, -0.3, 1e-3, 2631.0])
def test_signed_values(value):
    bits = torch.tensor([0, -(2**31)], dtype=torch.int32)
    expected = torch.tensor([value, -value])
    assert torch.equal(signed(value, bits), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_signs_are_the_same_on_a_device():
    streams = [Stream(3, 1, 0), Stream(2**40, 1, 1)]
    device = torch.device("cuda")
    found = sign_bits(SEED, streams, 77, 300_000, device).cpu()
    assert torch.equal(found, sign_bits(SEED, streams, 77, 300_000, CPU))
