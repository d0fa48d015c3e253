"""The sums of a reduction: the same bits with kernels and without, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives import Contribution, RoundResult, get_codec, grid_for
from atoll.collectives.codecs import F32
from atoll.collectives.engine import parts as parts_module
from atoll.collectives.errors import CodecError
from atoll.collectives.native import KERNELS

ELEMENTS = 1000
MAX = float(np.finfo(np.float32).max)

parts = st.lists(
    arrays(np.float32, 17, elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    min_size=1,
    max_size=5,
)
factors = st.lists(st.floats(0.0, 1.0, width=32), min_size=5, max_size=5)


class Bench:
    """One chunk to which ``parts`` are added in order, the first of them as the own part."""

    def __init__(self, codec: str, weights: list[float], *, is_root: bool = True) -> None:
        self.result = RoundResult(get_codec(codec), grid_for(ELEMENTS))
        self.values: F32 = np.zeros(0, np.float32)
        self.lies = False
        self.weights = tuple(weights)
        self.is_root = is_root
        self.sums = self.begin()

    def begin(self) -> parts_module.MeanParts:
        def fill(chunk: int, out: F32) -> None:
            assert not self.lies
            out[:] = self.values

        def show(chunk: int) -> F32:
            return self.values

        root = self.is_root
        own = show if self.lies else None
        codec = self.result.codec
        return parts_module.MeanParts(
            self.result, codec, self.weights, lambda chunk: root, Contribution(fill, own)
        )

    def add(self, participant: int | None, values: F32) -> None:
        buffer = self.sums.encoded.take()
        size = self.result.layout.size(0)
        self.result.codec.encode(values, buffer[:size])
        self.sums.add(0, participant, buffer)

    def add_own(self, values: F32, *, lies: bool) -> None:
        self.values = values
        if lies != self.lies:
            self.lies = lies
            self.sums = self.begin()
        self.sums.add_own(0, 0, coded=True)

    def encoded(self) -> bytes:
        out = self.result.view(0)
        self.sums.encode(0, out)
        return out.tobytes()


def whole(values: F32) -> F32:
    return np.resize(values, ELEMENTS)


@given(parts, factors, st.booleans(), st.booleans())
def test_kernels_and_numpy_give_the_same_sum(
    given_parts: list[F32], weights: list[float], lies: bool, is_root: bool
) -> None:
    def total(*, native: bool) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(parts_module, "KERNELS", None)
            bench = Bench("float32", weights, is_root=is_root)
            bench.add_own(whole(given_parts[0]), lies=lies)
            for participant, values in enumerate(given_parts[1:], 1):
                bench.add(participant, whole(values))
            return bench.encoded()

    assert total(native=True) == total(native=False)
    expected = np.zeros(ELEMENTS, np.float32)
    for weight, values in zip(weights, given_parts, strict=False):
        expected += np.float32(weight) * whole(values)
    assert total(native=KERNELS is not None) == expected.tobytes()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7, ELEMENTS - 1])
def test_a_part_that_is_not_finite_is_refused_when_it_is_added(
    native: bool, bad: float, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(parts_module, "KERNELS", None)
    bench = Bench("float32", [0.5, 0.5])
    bench.add(1, np.ones(ELEMENTS, np.float32))
    values = np.ones(ELEMENTS, np.float32)
    values[at] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        bench.add_own(values, lies=True)
    fresh = Bench("float32", [0.5, 0.5])
    with pytest.raises(CodecError, match="NaN or infinity"):
        fresh.add_own(values, lies=True)


@pytest.mark.parametrize("native", [False, True])
def test_a_sum_that_is_too_large_is_nobodys_fault(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(parts_module, "KERNELS", None)
    bench = Bench("float32", [1.0, 1.0])
    for participant in range(2):
        bench.add(participant, np.full(ELEMENTS, MAX, np.float32))
    with pytest.raises(CodecError, match="NaN or infinity"):
        bench.encoded()


def test_an_exact_sum_takes_no_memory_beside_the_result() -> None:
    bench = Bench("float32", [0.5, 0.5])
    bench.add_own(np.ones(ELEMENTS, np.float32), lies=True)
    assert bench.sums.allocated_bytes == 0
    assert bench.result.view(0).view(np.float32)[0] == 0.5
    elsewhere = Bench("float32", [0.5, 0.5], is_root=False)
    elsewhere.add_own(np.ones(ELEMENTS, np.float32), lies=True)
    assert elsewhere.sums.allocated_bytes == 4 * grid_for(ELEMENTS).size(0)


def test_the_next_attempt_begins_anew_where_the_last_one_broke_off() -> None:
    bench = Bench("float32", [0.5, 0.5])
    bench.add_own(np.full(ELEMENTS, 7, np.float32), lies=True)
    bench.weights = (1.0, 1.0)
    again = bench.begin()
    bench.sums = again
    bench.add_own(np.ones(ELEMENTS, np.float32), lies=True)
    assert np.frombuffer(bench.encoded(), np.float32).tolist() == [1.0] * ELEMENTS
