"""Results that consist of what all participants sent: both rules, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from harness.roundtrip import decoded, draw, encoded
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.codecs import (
    CODECS,
    F32,
    NUMPY_CODECS,
    RULES,
    U8,
    Gathered,
    gathered_codec,
    get_codec,
)
from atoll.collectives.errors import CodecError

TOPK = get_codec("topk")
INNER = [codec for codec in CODECS.values() if not codec.contract.keyed]
MAX = float(np.finfo(np.float32).max)

weights_of = st.lists(
    st.one_of(st.just(0.0), st.floats(0.001, 1e6)), min_size=1, max_size=9
).filter(any)
names = st.sampled_from([codec.name for codec in INNER])


def put_together(whole: Gathered, parts: list[F32]) -> U8:
    """The encoding; ``parts`` are of all participants."""
    count = parts[0].size
    counted = [p for p, weight in enumerate(whole.weights) if weight > 0]
    sent = {p: encoded(whole.inner, parts[p]) for p in counted}
    if whole.has_slots:
        return np.concatenate([sent[p] for p in counted])
    total, weights = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for p in counted:
        whole.add(p, sent[p], total, weights)
    whole.finish(total, weights)
    return total.view(np.uint8)


def naive(whole: Gathered, parts: list[F32]) -> F32:
    """Element by element, in the order of participants, every step in float32."""
    count, weights = parts[0].size, whole.weights
    above, below = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for p, weight in enumerate(weights):
        if weight == 0:
            continue
        factor = np.float32(weight / sum(weights))
        values = decoded(whole.inner, encoded(whole.inner, parts[p]), count)
        for element in sent_by(whole.inner.name, parts[p]):
            above[element] += factor * values[element]
            below[element] += factor
    if whole.rule == "senders":
        return np.array(
            [a / b if b else np.float32(0) for a, b in zip(above, below, strict=True)], np.float32
        )
    return above


def sent_by(name: str, values: F32) -> list[int]:
    """Of topk: the 64 largest of 4096, the first of equal ones."""
    if name != "topk":
        return list(range(values.size))
    found: list[int] = []
    for lo in range(0, values.size, 4096):
        block = np.abs(values[lo : lo + 4096])
        order = np.argsort(-block, kind="stable")[: -(-block.size // 64)]
        found += [lo + int(i) for i in sorted(order)]
    return found


@given(names, weights_of, st.sampled_from(RULES), st.integers(1, 400), st.integers(0, 99))
def test_decoding_is_the_rule_told_slowly(
    name: str, weights: list[float], rule: str, count: int, seed: int
) -> None:
    whole = gathered_codec(get_codec(name), tuple(weights), rule)
    parts = [draw("student_t3", count, seed + p) for p in range(len(weights))]
    data = put_together(whole, parts)
    assert data.size == whole.encoded_bytes(count)
    whole.check(data, count)
    assert decoded(whole, data, count).tobytes() == naive(whole, parts).tobytes()


@pytest.mark.parametrize("rule", RULES)
def test_of_sparse_parts_only_the_senders_count(rule: str) -> None:
    whole = gathered_codec(TOPK, (1.0, 0.0, 3.0), rule)
    parts = [np.zeros(4096, np.float32) for _ in range(3)]
    for place in range(64):
        parts[0][place] = 8.0
        parts[1][place] = 1e6  # has no weight
        parts[2][place + 63] = 4.0
    out = decoded(whole, put_together(whole, parts), 4096)
    shared, alone = (5.0, (8.0, 4.0)) if rule == "senders" else (5.0, (2.0, 3.0))
    assert out[63] == shared
    assert out[:63].tolist() == [alone[0]] * 63
    assert out[64:127].tolist() == [alone[1]] * 63
    assert not out[127:].any()


@pytest.mark.parametrize("name", ["topk", "float32", "int4"])
def test_of_identical_parts_both_rules_give_the_part(name: str) -> None:
    """Acceptance test 7: exactly, where R times 1/R is 1 in float32; else but for rounding."""
    values = draw("gauss", 9000)
    sent = decoded(get_codec(name), encoded(get_codec(name), values), 9000)
    for peers in range(1, 10):
        found = {}
        for rule in RULES:
            whole = gathered_codec(get_codec(name), (1.0,) * peers, rule)
            found[rule] = decoded(whole, put_together(whole, [values] * peers), 9000)
            np.testing.assert_allclose(found[rule], sent, rtol=1e-6)
        if peers in (1, 2, 4, 8):
            assert found["all"].tobytes() == found["senders"].tobytes()
        if peers in (1, 2):
            assert found["all"].tobytes() == sent.tobytes()


@given(weights_of, st.integers(1, 500))
def test_without_loss_it_is_the_weighted_mean(weights: list[float], count: int) -> None:
    parts = [draw("gauss", count, seed) for seed in range(len(weights))]
    mean = np.average(np.array(parts, np.float64), axis=0, weights=weights)
    for rule in RULES:
        whole = gathered_codec(get_codec("float32"), tuple(weights), rule)
        out = decoded(whole, put_together(whole, parts), count)
        np.testing.assert_allclose(out, mean, rtol=1e-5, atol=1e-5)


def test_it_takes_slots_until_float32_is_smaller() -> None:
    for name, most in (("topk", 128), ("int8", 3), ("int4", 7), ("sign", 28), ("float32", 1)):
        inner = get_codec(name)
        assert gathered_codec(inner, (1.0,) * most, "all").has_slots
        assert not gathered_codec(inner, (1.0,) * (most + 1), "all").has_slots
        assert gathered_codec(inner, (1.0,) * most + (0.0,), "all").has_slots
    whole = gathered_codec(TOPK, (2.0,) * 100, "senders")
    assert whole.encoded_bytes(262_144) == 100 * TOPK.encoded_bytes(262_144) < 2**20
    assert gathered_codec(TOPK, (2.0,) * 1024, "senders").encoded_bytes(262_144) == 2**20


def test_parts_are_found_where_they_are() -> None:
    whole = gathered_codec(TOPK, (1.0, 0.0, 2.0), "all")
    parts = [draw("gauss", 5000, seed) for seed in range(3)]
    data = put_together(whole, parts)
    for participant in (0, 2):
        part = whole.part(data, participant)
        assert part is not None
        assert part.tobytes() == encoded(TOPK, parts[participant]).tobytes()
        assert np.may_share_memory(part, data)
    assert whole.part(data, 1) is None
    assert whole.part(data, 3) is None
    many = gathered_codec(get_codec("float32"), (1.0, 1.0), "all")
    assert many.part(put_together(many, parts[:2]), 0) is None
    assert TOPK.part(encoded(TOPK, parts[0]), 0) is None


def test_equal_ones_are_equal() -> None:
    assert gathered_codec(TOPK, (1.0, 2.0), "all") == Gathered(TOPK, (1.0, 2.0), "all")
    assert gathered_codec(TOPK, (1.0, 2.0), "all") is gathered_codec(TOPK, (1.0, 2.0), "all")
    assert gathered_codec(TOPK, (1.0, 2.0), "all") != gathered_codec(TOPK, (1.0, 2.0), "senders")
    assert gathered_codec(TOPK, (1.0, 2.0), "all") != gathered_codec(TOPK, (2.0, 1.0), "all")
    assert gathered_codec(TOPK, (1.0,), "all") != TOPK


@pytest.mark.parametrize("slot", [0, 1])
def test_any_bad_slot_is_refused_and_nothing_is_written(slot: int) -> None:
    whole = gathered_codec(TOPK, (1.0, 1.0), "senders")
    data = put_together(whole, [draw("gauss", 4096, seed) for seed in range(2)])
    data[slot * data.size // 2 :][:4].view("<f4")[:] = np.nan
    out = np.full(4096, 5, np.float32)
    with pytest.raises(CodecError, match="topk value"):
        whole.check(data, 4096)
    with pytest.raises(CodecError, match="topk value"):
        whole.decode(data, out)
    assert (out == 5).all()


@pytest.mark.parametrize("peers", [2, 200])
def test_bytes_of_another_length_are_refused(peers: int) -> None:
    whole = gathered_codec(TOPK, (1.0,) * peers, "senders")
    out = np.zeros(4096, np.float32)
    for size in (0, whole.encoded_bytes(4096) - 1, whole.encoded_bytes(4096) + 1):
        for call in (
            lambda data: whole.check(data, 4096),
            lambda data: whole.decode(data, out),
        ):
            with pytest.raises(CodecError, match=f"topk of {peers}"):
                call(np.zeros(size, np.uint8))
    many = gathered_codec(TOPK, (1.0,) * 200, "senders")
    with pytest.raises(CodecError, match="NaN or infinity"):
        many.check(np.full(64, np.inf, np.float32).view(np.uint8), 64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["float32", "topk"])
def test_nothing_finite_becomes_infinite(name: str, rule: str) -> None:
    """Weights are rounded, so that their sum may be a little more than 1."""
    for peers in (3, 7, 9):
        whole = gathered_codec(get_codec(name), (1.0,) * peers, rule)
        for sign in (1, -1):
            parts = [np.full(100, sign * MAX, np.float32)] * peers
            out = decoded(whole, put_together(whole, parts), 100)
            assert np.isfinite(out).all()
            assert out[0] == pytest.approx(sign * MAX, rel=1e-6)


@given(st.binary(max_size=600), st.integers(1, 3), st.integers(1, 700))
def test_any_bytes_decode_to_finite_values_or_are_refused(
    data: bytes, peers: int, count: int
) -> None:
    whole = gathered_codec(TOPK, (1.0,) * peers, "senders")
    size = whole.encoded_bytes(count)
    padded = np.resize(np.frombuffer(data, np.uint8), size) if data else np.zeros(size, np.uint8)
    out = np.full(count, 7, np.float32)
    try:
        whole.decode(padded, out)
    except CodecError:
        assert (out == 7).all()
        with pytest.raises(CodecError):
            whole.check(padded, count)
    else:
        whole.check(padded, count)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [1, 64, 700, 9000])
def test_weights_are_added_where_the_bytes_have_an_element(name: str, count: int) -> None:
    values = draw("gauss", count)
    for codec in (CODECS[name], NUMPY_CODECS[name]):
        data = encoded(codec, values, key=5)
        into, weights, added = (np.full(count, 0.5, np.float32) for _ in range(3))
        codec.decode_weigh(data, 0.3, into, weights)
        codec.decode_add(data, 0.3, added)
        assert into.tobytes() == added.tobytes()
        has = weights != np.float32(0.5)
        assert (weights[has] == np.float32(0.5) + np.float32(0.3)).all()
        assert not decoded(codec, data, count)[~has].any()
        sparse = name in ("topk", "randk")
        assert np.count_nonzero(has) == (-(-count // 64) if sparse else count)
        bad = data.copy()
        bad[: bad.size // 2 + 4] = 0xFF
        into[:], weights[:] = 1, 2
        try:
            codec.check(bad, count)
        except CodecError:
            with pytest.raises(CodecError):
                codec.decode_weigh(bad, 0.3, into, weights)
            assert (into == 1).all()
            assert (weights == 2).all()
