"""The string of a rule: what it means, what is refused, and how many peers it needs."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.robust import get_rule
from atoll.collectives.robust.coordinate import sorted_rows
from atoll.collectives.robust.gram import (
    add_gram,
    grams_of_chunks,
    packed_gram,
    packed_sum,
    unpacked_gram,
)

LEAST = {
    "trimmed(f=2)": 5,
    "median(f=1)": 3,
    "meamed(f=3)": 7,
    "krum(f=2)": 7,
    "multi_krum(f=1)": 5,
    "multi_krum(f=1,m=6)": 7,
    "bulyan(f=2)": 11,
    "mda(f=1)": 3,
    "gm(f=4)": 9,
    "nnm+trimmed(f=2)": 5,
    "bucketing(s=2)+median(f=1)": 5,
    "trimmed(f=0)": 1,
}


@pytest.mark.parametrize("text", LEAST)
def test_how_many_peers_a_rule_needs(text: str) -> None:
    rule = get_rule(text)
    assert rule.least == LEAST[text]
    rule.check(rule.least)
    if rule.least > 1:
        with pytest.raises(
            ConfigError, match=f"needs at least {rule.least} peers, and here are {rule.least - 1}"
        ):
            rule.check(rule.least - 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "trimmed",
        "trimmed()",
        "trimmed(f)",
        "trimmed(f=)",
        "trimmed(f=-1)",
        "trimmed(f=1.5)",
        "trimmed(f=nan)",
        "trimmed(f=inf)",
        "trimmed(f=1e9)",
        "trimmed(f=1,m=2)",
        "nnm",
        "trimmed(f=1)+nnm",
        "nnm(f=1)+trimmed(f=1)",
        "best(f=1)",
        "mean(f=1)",
        "nnm+mean(f=1)",
        "bucketing(s=2)+mean(f=1)",
        "bucketing(s=1024)+bucketing(s=1024)+median(f=1)",
        "flag(f=20,pairs=1)",
        "multi_krum(f=1,m=1000)",
        "bucketing(s=0)+gm(f=1)",
        "centered_clip(f=1,tau=0)",
        "mda(f=40)",
        "gm(f=1)+",
        "gm(f=1" + " " * 200 + ")",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        get_rule(text)


@given(st.text(max_size=60))
def test_any_text_is_a_rule_or_a_clear_error(text: str) -> None:
    with suppress(ConfigError):
        assert get_rule(text).least >= 1


@pytest.mark.parametrize("text", ["trimmed(f=0)", "median(f=0)", "nnm+trimmed(f=0)", "krum(f=0)"])
def test_with_nobody_to_bear_it_is_the_plain_mean(text: str) -> None:
    rows = np.random.default_rng(1).normal(size=(4, 9)).astype(np.float32)
    rule = get_rule(text)
    assert rule.is_mean
    assert not rule.needs_gram
    assert rule.matrix(None, 4, 0) is None
    total = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    assert rule.aggregate(rows, None).tobytes() == (total / np.float32(4)).tobytes()


def test_which_rules_need_distances() -> None:
    for text in ("trimmed(f=1)", "median(f=1)", "meamed(f=1)", "bucketing(s=2)+trimmed(f=1)"):
        assert not get_rule(text).needs_gram
    for text in ("nnm+trimmed(f=1)", "krum(f=1)", "gm(f=1)", "bulyan(f=1)", "arc+median(f=1)"):
        assert get_rule(text).needs_gram


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13, 16, 33])
def test_the_network_sorts(count: int) -> None:
    rows = np.random.default_rng(count).integers(0, 2, size=(count, 2048)).astype(np.float32)
    assert np.array_equal(sorted_rows(rows), np.sort(rows, axis=0))


@pytest.mark.parametrize("count", range(1, 9))
def test_the_network_sorts_every_row_of_zeros_and_ones(count: int) -> None:
    """Which proves that it sorts everything (Knuth, the 0-1 principle)."""
    rows = ((np.arange(1 << count)[None] >> np.arange(count)[:, None]) & 1).astype(np.float32)
    assert np.array_equal(sorted_rows(rows), np.sort(rows, axis=0))


def test_buckets_are_drawn_anew_for_each_key_and_hold_everyone_once() -> None:
    rule = get_rule("bucketing(s=3)+median(f=1)")
    one, same, other = (rule.matrix(None, 10, key) for key in (1, 1, 2))
    assert one is not None
    assert same is not None
    assert other is not None
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert one.shape == (4, 10)
    assert ((one > 0).sum(axis=0) == 1).all()
    np.testing.assert_allclose(one.sum(axis=1), 1.0)


def test_inner_products_of_parts_add_up_to_those_of_the_whole() -> None:
    rows = np.random.default_rng(5).normal(size=(6, 10_000)).astype(np.float32)
    whole = np.zeros((6, 6))
    add_gram(rows, whole)
    parts = np.zeros((6, 6))
    for lo in range(0, 10_000, 3_000):
        part = np.zeros((6, 6))
        add_gram(rows[:, lo : lo + 3_000], part)
        parts += unpacked_gram(packed_gram(part), 6)
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    np.testing.assert_allclose(whole, rows.astype(np.float64) @ rows.T.astype(np.float64))


def test_what_was_signed_of_chunks_gives_the_bits_of_what_was_told() -> None:
    rows = np.random.default_rng(5).normal(size=(6, 10_000)).astype(np.float32)
    parts, total = [], np.zeros((6, 6))
    for lo in range(0, 10_000, 1_000):
        parts.append(np.zeros((6, 6)))
        add_gram(rows[:, lo : lo + 1_000], parts[-1])
        total += parts[-1]
    chunks = b"".join(map(packed_gram, parts))
    assert packed_sum(chunks, 6) == packed_gram(total)
    np.testing.assert_array_equal(grams_of_chunks(chunks, 6), parts)
    for wrong in (chunks[:-8], b"\xff" * len(chunks)):
        with pytest.raises(ValueError, match="inner products"):
            packed_sum(wrong, 6)


@pytest.mark.parametrize(
    "upper",
    [
        [1.7e308, 0, 0, 1, 0, 1],  # sums of several such are infinite
        [1, 2, 0, 1, 0, 1],  # Cauchy and Schwarz
        [1, -0.9, -0.9, 1, -0.9, 1],  # three vectors cannot all be against each other
        [0, 1e-300, 0, 1, 0, 1],
        [-1e-9, 0, 0, 1, 0, 1],
    ],
)
def test_finite_numbers_may_be_no_inner_products_either(upper: list[float]) -> None:
    with pytest.raises(ValueError, match="inner products"):
        unpacked_gram(np.array(upper, "<f8").tobytes(), 3)


def test_inner_products_of_vectors_of_any_size_pass() -> None:
    dice = np.random.default_rng(9)
    for scale in (1e-30, 1e-3, 1.0, 1e18):
        for columns in (1, 2, 50, 4000):  # so few that they depend on each other, and many
            rows = (dice.normal(size=(8, columns)) * scale).astype(np.float32)
            rows[1], rows[2] = rows[0], 0
            rows[3] *= np.float32(1e10)
            gram = np.zeros((8, 8))
            add_gram(rows, gram)
            np.testing.assert_array_equal(unpacked_gram(packed_gram(gram), 8), gram)


@pytest.mark.parametrize(
    "data", [b"", bytes(8), bytes(8 * 7), b"\xff" * 48, b"\x00" * 47 + b"\xff"]
)
def test_other_bytes_are_no_inner_products(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"inner products|buffer size"):
        unpacked_gram(data, 3)


def test_an_attacker_with_huge_numbers_does_not_spoil_the_digits_of_the_others() -> None:
    dice = np.random.default_rng(2)
    rows = dice.normal(size=(9, 50)) + 5
    rows[0] = 1e15
    for text in ("gm(f=2)", "centered_clip(f=2)", "nnm+trimmed(f=2)", "caf(f=2)"):
        rule = get_rule(text)
        gram = np.zeros((9, 9))
        add_gram(rows, gram)
        found = rule.aggregate(rows, rule.matrix(gram, 9, 0))
        assert np.linalg.norm(found - rows[1:].mean(axis=0)) < 10
