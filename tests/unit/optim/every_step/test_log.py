"""One byte for a projected gradient, records of steps, and the log of them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.every_step.log import SAMPLES_MAX, SCALARS, Record, ScalarLog, ScalarPart, to_byte

CHAIN = bytes(range(32))
checked = settings(deadline=None, derandomize=True)

codes = st.binary(max_size=20).map(lambda data: data.replace(b"\x80", b"\x00"))
records = st.builds(
    lambda lr, given: Record.of(lr, [ScalarPart(n, c) for n, c in given.items()]),
    st.floats(0, 10, width=32),
    st.dictionaries(st.integers(0, 65_535), codes, max_size=5),
)


def test_one_bit_of_sign_and_seven_of_magnitude():
    assert to_byte(0.0) == to_byte(-0.0) == 0
    assert SCALARS[0] == 0
    assert to_byte(1.0) == 64
    assert SCALARS[64] == 1.0
    assert SCALARS[64 | 128] == -1.0
    for code in range(1, 128):
        value = math.exp((code - 64) / 8)
        assert float(SCALARS[code]) == pytest.approx(value, rel=1e-7)
        assert float(SCALARS[code | 128]) == -float(SCALARS[code])
        assert to_byte(float(SCALARS[code])) == code
        assert to_byte(-float(SCALARS[code])) == code | 128


@checked
@given(st.floats(4e-4, 2600) | st.floats(-2600, -4e-4))
def test_the_nearest_in_the_logarithm(value):
    found = float(SCALARS[to_byte(value)])
    assert abs(math.log(found / value)) <= 1 / 16 + 1e-6


def test_what_is_too_large_is_cut_off_and_too_small_is_zero():
    assert to_byte(1e30) == to_byte(2700.0) == 127
    assert to_byte(-1e30) == 255
    assert to_byte(3e-4) == to_byte(-1e-30) == to_byte(5e-324) == 0
    assert 128 not in {to_byte(sign * 2.0**n) for n in range(-30, 30) for sign in (1, -1)}


@checked
@given(st.lists(records, max_size=4))
def test_records_end_to_end_are_split(steps):
    every = [record.to_bytes() for record in steps]
    assert Record.split(b"".join(every)) == list(zip(steps, every, strict=True))


def test_10_the_order_of_arrival_changes_nothing():
    parts = [ScalarPart(2, b"abc"), ScalarPart(0, b"d"), ScalarPart(7, b"")]
    found = {Record.of(0.5, order).to_bytes() for order in itertools.permutations(parts)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("lr", "parts", "why"),
    [
        (0.1, [ScalarPart(1, b"a"), ScalarPart(1, b"b")], "one number"),
        (0.1, [ScalarPart(1, b"a\x80")], "minus zero"),
        (0.1, [ScalarPart(1, bytes(SAMPLES_MAX + 1))], "4097 bytes"),
        (math.nan, [ScalarPart(1, b"a")], "learning rate of nan"),
        (-0.1, [], "learning rate"),
        (math.inf, [], "learning rate"),
    ],
)
def test_what_cannot_be_a_step_is_refused(lr, parts, why):
    with pytest.raises(RemoteProtocolError, match=why):
        Record.of(lr, parts)
    with pytest.raises(RemoteProtocolError, match=why):
        Record.split(Record(lr, tuple(parts)).to_bytes())


def test_parts_out_of_order_are_refused():
    wrong = Record(0.1, (ScalarPart(2, b""), ScalarPart(1, b"")))
    with pytest.raises(RemoteProtocolError, match="one number"):
        Record.split(wrong.to_bytes())


def test_a_log_that_is_cut_off_is_refused():
    whole = Record.of(0.5, [ScalarPart(0, b"abc"), ScalarPart(1, b"defg")]).to_bytes()
    for cut in range(1, len(whole)):
        with pytest.raises(RemoteProtocolError, match="cut off"):
            Record.split(whole + whole[:cut])


@checked
@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_refused(data):
    try:
        found = Record.split(data)
    except RemoteProtocolError:
        return
    assert b"".join(own for _, own in found) == data


# ---------------------------------------------------------------- the log


def filled(count: int, bytes_max: int = 1000) -> ScalarLog:
    log = ScalarLog(10, CHAIN, bytes_max)
    for number in range(count):
        log.add(f"record {number:3}".encode())  # ten bytes each
    return log


def test_whoever_is_at_a_point_of_the_log_gets_the_rest():
    log, points = ScalarLog(10, CHAIN, 1000), [(10, CHAIN)]
    for number in range(5):
        log.add(f"record {number:3}".encode())
        points.append((log.steps, log.chain))
    assert len({chain for _, chain in points}) == 6
    for steps, chain in points:
        assert log.has(steps, chain)
        mine = ScalarLog(steps, chain, 1000)
        for at in range(0, 10 * (log.steps - steps), 10):
            mine.add(log.since(steps)[at : at + 10])
        assert (mine.steps, mine.chain) == (log.steps, log.chain)
    assert not log.has(11, CHAIN)
    assert not log.has(9, CHAIN)
    assert not log.has(16, log.chain)
    assert not log.has(12, bytes(32))


def test_the_chain_depends_on_every_byte_and_on_the_beginning():
    assert filled(3).chain == filled(3).chain
    other = ScalarLog(10, bytes(32), 1000)
    for number in range(3):
        other.add(f"record {number:3}".encode())
    assert other.chain != filled(3).chain
    assert filled(2).chain != filled(3).chain


def test_the_older_half_is_dropped():
    whole = filled(20, 1000)
    log = filled(10, 100)
    assert (log.begin, log.steps) == (10, 20)
    log = filled(11, 100)
    assert (log.begin, log.steps) == (16, 21)
    assert log.since(16) == filled(11).since(16)
    assert log.chain == filled(11).chain
    assert log.has(16, log.first_chain)
    assert not log.has(10, CHAIN)
    assert len(whole.since(10)) == 200


def test_a_log_of_nothing_knows_where_it_is():
    log = filled(3, 0)
    assert (log.begin, log.steps) == (13, 13)
    assert log.has(13, filled(3).chain)
    assert log.since(13) == b""
    with pytest.raises(ConfigError, match="-1 bytes"):
        ScalarLog(0, CHAIN, -1)
