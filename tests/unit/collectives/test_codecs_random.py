"""Codecs that need a key: unbiased, reproducible, and with the error that theory gives."""

from __future__ import annotations

import numpy as np
import pytest
from harness.roundtrip import decoded, draw, encoded, relative_error, through

from atoll.collectives.codecs import CODECS, F32, Codec, get_codec
from atoll.collectives.counter_rng import random_words
from atoll.collectives.errors import CodecError

KEYED = [codec for codec in CODECS.values() if codec.contract.keyed]
ROUNDING = ["int8_sr", "int4_sr", "int8_shift", "int4_shift"]
KEYS = 400
keyed_codecs = pytest.mark.parametrize("codec", KEYED, ids=lambda codec: codec.name)


def test_unbiased_codecs_are_the_keyed_ones() -> None:
    assert {codec.name for codec in KEYED} == {*ROUNDING, "ternary", "randk"}
    assert all(
        codec.contract.keyed == (codec.contract.kind == "unbiased") for codec in CODECS.values()
    )


def z_scores(codec: Codec, values: F32, keys: range) -> np.ndarray:
    """Of the mean error of each element over the keys, at least 200 as the reference asks."""
    errors = np.array([through(codec, values, key) - values.astype(np.float64) for key in keys])
    spread = errors.std(axis=0, ddof=1)
    # An element that errs by much and seldom may seem to vary less than it does.
    spread = np.maximum(spread, np.sqrt(np.mean(spread**2))) / np.sqrt(len(keys))
    # float32's own rounding of `code * scale` is no randomness: 2^-24 of the value.
    mean = np.maximum(np.abs(errors.mean(axis=0)) - np.abs(values) * 1e-7, 0)
    return mean / spread


@keyed_codecs
def test_the_mean_over_keys_is_the_value(codec: Codec) -> None:
    # Nothing beyond 2.5 times the root mean square, where ternary would clip.
    values = np.random.default_rng(2).uniform(-1, 1, 600).astype(np.float32)
    scores = z_scores(codec, values, range(KEYS))
    assert scores.max() < 5
    # One number over all elements, which a bias of the same sign everywhere would move.
    total = np.array(
        [np.sum(through(codec, values, key) - values.astype(float)) for key in range(KEYS)]
    )
    assert abs(total.mean()) < 5 * total.std(ddof=1) / np.sqrt(KEYS)


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_is_unbiased_for_every_fraction_of_a_step(name: str) -> None:
    codec = get_codec(name)
    steps = 7 if "4" in name else 127
    # The first element sets the scale to 1; the others lie at k + i / 62 steps, both signs.
    values = np.concatenate([[steps], np.linspace(0, 1, 63) - steps / 2]).astype(np.float32)
    assert z_scores(codec, values, range(KEYS)).max() < 5


@pytest.mark.parametrize("name", ["int8_sr", "int4_sr"])
def test_stochastic_rounding_leaves_whole_steps_alone(name: str) -> None:
    codec = get_codec(name)
    steps = np.arange(-7, 8, dtype=np.float32) if "4" in name else np.arange(-127, 128)
    values = steps.astype(np.float32)
    for key in range(20):
        assert through(codec, values, key).tobytes() == values.tobytes()


def test_stochastic_rounding_has_twice_the_error_of_nearest() -> None:
    values = draw("gauss", 2**18)
    nearest = relative_error(values, through(get_codec("int8"), values))
    random = relative_error(values, through(get_codec("int8_sr"), values, 1))
    assert random / nearest == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "block", "steps"), [("int8_shift", 256, 127), ("int4_shift", 64, 7)]
)
def test_a_shift_has_a_twelfth_of_a_squared_step(name: str, block: int, steps: int) -> None:
    values = draw("gauss", 2**18)
    squared_steps = (np.abs(values.reshape(-1, block)).max(axis=1) / steps).astype(float) ** 2
    error = np.sum((through(get_codec(name), values, 3) - values.astype(float)) ** 2)
    assert error / (squared_steps.sum() * block) == pytest.approx(1 / 12, rel=0.01)


def test_one_shift_serves_a_block() -> None:
    codec = get_codec("int4_shift")
    values = np.tile(np.array([7, *[0.3] * 63], np.float32), 5)
    rows = through(codec, values, key=8).reshape(5, 64)
    assert all(len(set(row[1:].tolist())) == 1 for row in rows)
    assert len(set(rows[:, 1].tolist())) == 5


@keyed_codecs
def test_the_same_key_gives_the_same_bytes_and_another_key_others(codec: Codec) -> None:
    values = draw("gauss", 5000)
    assert encoded(codec, values, 7).tobytes() == encoded(codec, values, 7).tobytes()
    assert encoded(codec, values, 7).tobytes() != encoded(codec, values, 8).tobytes()
    assert encoded(codec, values, 7).tobytes() != encoded(codec, values, 7 + 2**63).tobytes()


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_codecs_without_a_key_ignore_it(codec: Codec) -> None:
    values = draw("gauss", 3000)
    if not codec.contract.keyed:
        assert encoded(codec, values, 7).tobytes() == encoded(codec, values, 0).tobytes()


@keyed_codecs
def test_errors_of_peers_with_their_own_keys_cancel_out(codec: Codec) -> None:
    values = np.random.default_rng(4).uniform(-1, 1, 4096).astype(np.float32)
    alone = relative_error(values, through(codec, values, 0))
    together = np.mean([through(codec, values, key).astype(float) for key in range(64)], axis=0)
    # int8's scales are float32, so the last few parts in 10^15 remain.
    assert relative_error(values, together) < alone / 64 * 1.5 + 1e-12


# ---------------------------------------------------------------- ternary


def test_ternary_sends_signs_and_zeros() -> None:
    values = draw("gauss", 4096)
    back = through(get_codec("ternary"), values, 1)
    scale = np.float32(2.5 * np.sqrt(np.mean(values.astype(float) ** 2)))
    assert set(np.unique(back).tolist()) == {-float(scale), 0.0, float(scale)}
    assert (back[back != 0] * values[back != 0] > 0).all()
    clipped = np.minimum(np.abs(values), scale)
    assert np.mean(back != 0) == pytest.approx(np.mean(clipped / scale), rel=0.03)


def test_ternary_of_an_even_block_takes_its_largest_value() -> None:
    values = np.array([1, -1, 1, 0, 0.5], np.float32)
    assert through(get_codec("ternary"), values, 2)[:4].tolist() == [1, -1, 1, 0]


def test_ternary_refuses_a_fourth_code() -> None:
    data = encoded(get_codec("ternary"), np.ones(40, np.float32))
    data[4 + 3] = 0b0001_1101
    with pytest.raises(CodecError, match="element 13"):
        get_codec("ternary").check(data, 40)


# ---------------------------------------------------------------- randk


@pytest.mark.parametrize("count", [1, 63, 64, 65, 640, 4097])
def test_randk_sends_one_of_each_64(count: int) -> None:
    values = np.arange(1, count + 1, dtype=np.float32)
    back = through(get_codec("randk"), values, key=count)
    for lo in range(0, count, 64):
        part, sent = values[lo : lo + 64], back[lo : lo + 64]
        (at,) = np.flatnonzero(sent)
        assert sent[at] == pytest.approx(part[at] * part.size, rel=2**-7)


def test_randk_chooses_every_place_equally_often() -> None:
    values = np.ones(64 * 20_000 + 3, np.float32)
    places = np.flatnonzero(through(get_codec("randk"), values, key=1)[:-3]) % 64
    counts = np.bincount(places, minlength=64)
    assert np.sum((counts - 312.5) ** 2 / 312.5) < 120  # chi-square, 63 degrees: 1e-5 above


def test_randk_rounds_to_bfloat16_at_random() -> None:
    value = np.float32(1 + 2**-9) / 64  # a quarter of the way between two bfloat16s, times 64
    words = np.empty(4000, np.uint32)
    random_words(6, 0, words)
    back = through(get_codec("randk"), np.full(64 * 4000, value, np.float32), key=6)
    kept = back[back != 0]
    assert set(kept.tolist()) == {1.0, 1 + 2**-7}
    assert np.mean(kept > 1) == pytest.approx(0.25, abs=0.03)
    assert (kept > 1).tolist() == ((words & 0xFFFF) >= 0xC000).tolist()


def test_randk_refuses_infinity_from_the_wire() -> None:
    data = encoded(get_codec("randk"), np.ones(200, np.float32))
    data[8 + 2 : 8 + 4] = (0x80, 0x7F)
    with pytest.raises(CodecError, match="infinity"):
        decoded(get_codec("randk"), data, 200)
