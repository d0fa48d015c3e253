"""Grants and credentials: exact round trips, every flipped byte refused, nobody else's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.passes import AUTHORITY, PUBLIC, RUN, key_of, passed, peer_of, token, tokened
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import AdmissionError, ConfigError, PassForgedError, PassRunError
from atoll.peer.authority.grants import CREDENTIAL_BYTES_MAX, ROLES, Credential, Grant
from atoll.peer.membership.view import ARCHIVE, REPLICA, WITNESS
from atoll.peer.net.hello import CONTROL, HELLO_BYTES_MAX, Hello
from atoll.peer.net.wire import encode

SHOWN = tokened("b", token("t", uses=3, not_after_s=2_000_000_000), "t").encode()
PASSED = passed("b", role=WITNESS).encode()


@given(
    run=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    role=st.sampled_from(ROLES),
    uses=st.integers(0, 4096),
    not_after_s=st.integers(0, 253_402_300_799),
)
def test_what_was_granted_comes_back_as_it_was(
    run: str, role: str, uses: int, not_after_s: int
) -> None:
    subject = peer_of("t") if uses else peer_of("b")
    grant = Grant(run, subject, role, uses, not_after_s).signed(AUTHORITY)
    assert Grant.parse(grant.encode(), PUBLIC) == grant
    seed = key_of("t").private_bytes_raw()
    found = Credential.bind(grant, PUBLIC, key_of("b"), seed)
    assert Credential.parse(found.encode(), PUBLIC, run) == found
    assert len(found.encode()) <= CREDENTIAL_BYTES_MAX


def test_the_largest_fits_into_a_hello() -> None:
    grant = token("t", uses=4096, not_after_s=253_402_300_799, run="r" * 64)
    shown = tokened("b", grant, "t").encode()
    assert len(shown) == CREDENTIAL_BYTES_MAX
    hello = Hello(1, 1, "r" * 64, CONTROL, 1 << 62, "h" * 300, ("aes-256-gcm",) * 8, shown, REPLICA)
    assert len(encode(hello)) < HELLO_BYTES_MAX


@given(at=st.integers(0), flip=st.integers(1, 255), data=st.sampled_from([SHOWN, PASSED]))
def test_any_flipped_byte_is_refused(at: int, flip: int, data: bytes) -> None:
    damaged = bytearray(data)
    damaged[at % len(data)] ^= flip
    with pytest.raises(AdmissionError):
        Credential.parse(bytes(damaged), PUBLIC, RUN)


@pytest.mark.parametrize("data", [SHOWN, PASSED])
def test_every_bit_of_it_counts(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(PassForgedError):
                Credential.parse(bytes(damaged), PUBLIC, RUN)


@given(st.binary(max_size=CREDENTIAL_BYTES_MAX + 10))
def test_noise_is_refused(data: bytes) -> None:
    for parse in (lambda: Credential.parse(data, PUBLIC, RUN), lambda: Grant.parse(data, PUBLIC)):
        with pytest.raises(PassForgedError):
            parse()


@pytest.mark.parametrize("data", [SHOWN[:-1], SHOWN + b"\0", SHOWN[1:], b"", SHOWN * 2])
def test_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(PassForgedError):
        Credential.parse(data, PUBLIC, RUN)


def test_another_authority_s_signature_is_refused() -> None:
    with pytest.raises(PassForgedError, match=r"authority .* has not signed"):
        Credential.parse(SHOWN, peer_of("another authority"), RUN)


def test_another_run_s_is_refused() -> None:
    with pytest.raises(PassRunError, match="for run demo, not for other"):
        Credential.parse(SHOWN, PUBLIC, "other")


def test_who_has_seen_a_token_cannot_use_it() -> None:
    """A member knows the grant, and not the private key that is in the invite."""
    seen = Credential.parse(SHOWN, PUBLIC, RUN)
    with pytest.raises(PassForgedError, match="its invite is damaged"):
        Credential.bind(seen.grant, PUBLIC, key_of("mallory"), key_of("guess").private_bytes_raw())
    mallory = key_of("mallory")
    text = b"atoll holder 1\0" + PUBLIC + seen.grant.encode() + peer_of("mallory")
    for by_subject in (seen.by_subject, mallory.sign(text)):
        forged = replace(
            seen, peer=peer_of("mallory"), by_subject=by_subject, by_peer=mallory.sign(text)
        )
        with pytest.raises(PassForgedError, match="not given to this peer"):
            Credential.parse(forged.encode(), PUBLIC, RUN)


def test_a_pass_is_for_one_peer() -> None:
    grant = passed("b").grant
    with pytest.raises(PassForgedError, match="it is for another peer"):
        Credential.bind(grant, PUBLIC, key_of("c"))
    given_away = replace(passed("b"), peer=peer_of("c"))
    text = b"atoll holder 1\0" + PUBLIC + grant.encode() + peer_of("c")
    lent = replace(given_away, by_subject=key_of("b").sign(text), by_peer=key_of("c").sign(text))
    with pytest.raises(PassForgedError, match="given to another peer"):
        Credential.parse(lent.encode(), PUBLIC, RUN)


def test_a_replica_s_grant_is_good_for_every_role() -> None:
    assert [passed("b", role=REPLICA).grant.permits(role) for role in ROLES] == [True] * 3
    assert not passed("b", role=WITNESS).grant.permits(REPLICA)
    assert not passed("b", role=WITNESS).grant.permits(ARCHIVE)
    assert passed("b", role=WITNESS).grant.permits(WITNESS)
    assert not passed("b", role=REPLICA).grant.permits("emperor")


def test_expiry_is_a_moment() -> None:
    grant = token("t", not_after_s=1000)
    assert not grant.expired(1000.0)
    assert grant.expired(1000.1)
    assert not token("t").expired(1e12)


@pytest.mark.parametrize(("uses", "not_after_s"), [(-1, 0), (4097, 0), (1, -1), (1, 1 << 60)])
def test_what_nobody_could_read_is_not_signed(uses: int, not_after_s: int) -> None:
    with pytest.raises(ConfigError):
        Grant(RUN, peer_of("t"), REPLICA, uses, not_after_s).signed(AUTHORITY)
