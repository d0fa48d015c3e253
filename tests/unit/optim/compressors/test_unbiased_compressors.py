"""TernGrad and QSDP: right in expectation, with the errors of the papers, and refused if not."""

from __future__ import annotations

import numpy as np
import pytest
from harness.gradients import averages, manifest_of

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import QSDP, TernGrad
from atoll.optim.compressors import Compressor
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.manifest import Manifest, Parameter

SHAPE = (32, 32)
SIZE = 1024
ONE = manifest_of(SHAPE)
STEPS = range(400)  # each has random numbers of its own


def normal(n: int, s: int = 0, size: int = SIZE) -> F32:
    return np.random.default_rng((n, s)).standard_normal(size).astype(np.float32)


def make(name: str) -> Compressor:
    return TernGrad() if name == "terngrad" else QSDP(bits=int(name[-1]))


@pytest.mark.parametrize("name", ["terngrad", "qsdp8", "qsdp4"])
def test_it_is_right_in_expectation(name: str) -> None:
    """The mean over many steps is the gradient, but for what chance leaves of the error."""
    gradient = np.clip(normal(0), -2.3, 2.3)  # TernGrad clips at 2.5 times the root mean square
    found = np.array(averages(lambda n: make(name), ONE, lambda n, s: gradient, STEPS, 1)[0])
    largest = np.abs(gradient).max()
    if name == "terngrad":
        variance = largest * np.abs(gradient) - gradient**2
    else:
        variance = np.full(SIZE, (largest / {"8": 127, "4": 7}[name[-1]]) ** 2 / 12)
    deviation = np.sqrt(np.maximum(variance, 0) / len(STEPS))
    assert (np.abs(found.mean(axis=0) - gradient) <= 5 * deviation + 1e-5).all()
    assert np.unique(found[:, 5]).size > 1


def squared_error(compressor: str, workers: int) -> float:
    """Of the mean, relative to one worker's gradient; theirs are independent."""
    found = averages(lambda n: make(compressor), ONE, lambda n, s: normal(n), STEPS[:50], workers)
    exact = np.mean([normal(n) for n in range(workers)], axis=0)
    return float(np.mean([np.square(mean - exact).sum() for mean in found[0]]) / SIZE)


def test_errors_of_terngrad_are_those_of_the_table_and_cancel_out() -> None:
    alone = squared_error("terngrad", 1)
    assert 0.8 < alone < 1.2
    assert squared_error("terngrad", 4) == pytest.approx(alone / 4, rel=0.2)


def test_errors_of_a_shift_are_half_of_those_of_stochastic_rounding() -> None:
    for name, codec_name in [("qsdp8", "int8_sr"), ("qsdp4", "int4_sr")]:
        codec, errors = get_codec(codec_name), []
        data, decoded = np.empty(codec.encoded_bytes(SIZE), np.uint8), np.empty(SIZE, np.float32)
        for key in range(50):
            codec.encode(normal(0), data, key)
            codec.decode(data, decoded)
            errors.append(np.square(decoded - normal(0)).sum() / SIZE)
        assert squared_error(name, 1) == pytest.approx(np.mean(errors) / 2, rel=0.1)


class Recorded:
    """An exchange in which somebody else gives ``other``, or what this trainer gives."""

    counts = True

    def __init__(self, other: bytes | None = None) -> None:
        self.other = other

    def gather(self, data: bytes) -> list[Given]:
        self.given = data
        other = data if self.other is None else self.other
        return [Given("me", data, True), Given("other", other, True)]

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        return Exchanged(vector, 1)


def given_by(name: str, peer: str, step: int) -> bytes:
    compressor, exchange = make(name), Recorded()
    compressor.begin(ONE, "float32", peer)
    compressor.average(normal(0), step, exchange)
    return exchange.given


def test_the_shift_is_shared_and_terngrads_choices_are_not() -> None:
    assert given_by("qsdp8", "a", 3) == given_by("qsdp8", "b", 3) != given_by("qsdp8", "a", 4)
    assert given_by("terngrad", "a", 3) == given_by("terngrad", "a", 3)
    assert given_by("terngrad", "a", 3) != given_by("terngrad", "b", 3)
    assert given_by("terngrad", "a", 3) != given_by("terngrad", "a", 4)


def test_bytes_are_those_of_the_codecs() -> None:
    assert len(given_by("qsdp8", "a", 0)) == 8 + 1024 + 4 * 4
    assert len(given_by("qsdp4", "a", 0)) == 8 + 512 + 4 * 16
    assert len(given_by("terngrad", "a", 0)) == 256 + 4


def test_vectors_and_what_is_named_travel_as_they_are() -> None:
    manifest = Manifest.of(
        [Parameter(n, s) for n, s in [("b", (40,)), ("h.w", SHAPE), ("w", SHAPE)]]
    )
    size = manifest.elements
    found = averages(
        lambda n: TernGrad(dense=("h.",)), manifest, lambda n, s: normal(n, s, size), range(2)
    )
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    exact = (normal(0, 0, size) + normal(1, 0, size)) / 2
    np.testing.assert_allclose(found[0][0][: 40 + SIZE], exact[: 40 + SIZE], atol=1e-6)
    assert not np.allclose(found[0][0][40 + SIZE :], exact[40 + SIZE :], atol=0.1)


def test_who_has_nothing_to_give_is_not_in_the_mean() -> None:
    found = averages(lambda n: QSDP(), ONE, lambda n, s: normal(n), range(2), absent=[(1, 0)])
    np.testing.assert_allclose(found[1][0], normal(0), atol=0.03)
    nobody = averages(lambda n: QSDP(), ONE, lambda n, s: normal(n), [0], absent=[(0, 0), (1, 0)])
    assert nobody == [[None], [None]]


def test_malformed_parts_are_refused() -> None:
    for name in ("terngrad", "qsdp8"):
        compressor, fine = make(name), given_by(name, "me", 1)
        compressor.begin(ONE, "float32", "me")
        assert compressor.average(normal(0), 1, Recorded(fine)) is not None
        for wrong, why in [
            (fine[:-1], "bytes instead of"),
            (b"", "0 bytes instead of"),
            (fine[:8] + b"\xff" * (len(fine) - 8), "not allowed|scale|code"),
        ]:
            with pytest.raises(RemoteProtocolError, match=why):
                compressor.average(normal(0), 1, Recorded(wrong))
    with pytest.raises(RemoteProtocolError, match="another shift"):
        compressor.average(normal(0), 2, Recorded(fine))
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        QSDP(bits=2)
