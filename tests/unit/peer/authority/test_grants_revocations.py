"""The list of those who are out: complete, numbered, signed, and refused if a byte is wrong."""

from __future__ import annotations

import pytest
from harness.passes import AUTHORITY, PUBLIC, peer_of
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, PassForgedError
from atoll.peer.authority.grants import REVOCATIONS_BYTES_MAX, REVOKED_MAX, Revocations

TWO = Revocations().with_more([peer_of("b"), peer_of("c")], AUTHORITY)


@given(st.sets(st.binary(min_size=32, max_size=32), max_size=20), st.integers(0, 1 << 40))
def test_a_list_comes_back_as_it_was(ids: set[bytes], number: int) -> None:
    made = Revocations(number).with_more(ids, AUTHORITY)
    assert made.number == number + 1
    assert Revocations.parse(made.encode(), PUBLIC) == made


def test_the_next_list_holds_the_former() -> None:
    more = TWO.with_more([peer_of("d"), peer_of("b")], AUTHORITY)
    assert more.number == 2
    assert more.ids == {peer_of("b"), peer_of("c"), peer_of("d")}


@given(at=st.integers(0), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(at: int, flip: int) -> None:
    damaged = bytearray(TWO.encode())
    damaged[at % len(damaged)] ^= flip
    with pytest.raises(PassForgedError):
        Revocations.parse(bytes(damaged), PUBLIC)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(PassForgedError):
        Revocations.parse(data, PUBLIC)


def test_another_authority_s_is_refused() -> None:
    with pytest.raises(PassForgedError, match="has not signed"):
        Revocations.parse(TWO.encode(), peer_of("another authority"))


def test_a_list_out_of_order_is_refused_even_if_it_is_signed() -> None:
    """So that one list has one encoding."""
    ids = sorted([peer_of("b"), peer_of("c")], reverse=True)
    body = b"\x01" + (1).to_bytes(8, "big") + (2).to_bytes(4, "big") + b"".join(ids)
    signature = AUTHORITY.sign(b"atoll revocations 1\0" + PUBLIC + body)
    with pytest.raises(PassForgedError, match="not in order"):
        Revocations.parse(body + signature, PUBLIC)


def test_it_is_bounded() -> None:
    full = Revocations().with_more((n.to_bytes(32, "big") for n in range(REVOKED_MAX)), AUTHORITY)
    assert len(full.encode()) == REVOCATIONS_BYTES_MAX
    assert Revocations.parse(full.encode(), PUBLIC) == full
    with pytest.raises(ConfigError, match="4096 are the most"):
        full.with_more([peer_of("b")], AUTHORITY)
