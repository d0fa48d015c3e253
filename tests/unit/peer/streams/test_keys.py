"""Keys of data streams: each serves one connection, and only those who have it get through."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.net.wire import decode, encode
from atoll.peer.streams.keys import (
    CIPHER_AES,
    CIPHER_NONE,
    CIPHERS,
    CIPHERS_PLAIN,
    CONN_ID_BYTES,
    DIALLER_PROOF_BYTES,
    GRANT_S,
    GRANTS_PER_PEER_MAX,
    GREETING_BYTES,
    OPENING_BYTES,
    STREAM_FIRST_BYTE,
    Grants,
    Handshake,
    StreamAsked,
    StreamDenied,
    StreamGranted,
    check_granted,
    choose_cipher,
    conn_id_of,
    is_trusted_network,
)

ALICE, BOB = b"a" * 32, b"b" * 32
KEY = bytes(range(32))
R1, R2 = b"1" * 16, b"2" * 16


def granted(number: int = 1, *, cipher: str = CIPHER_AES, key: bytes = KEY) -> StreamGranted:
    return StreamGranted(number, cipher, number.to_bytes(CONN_ID_BYTES, "big"), key)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "msg", [StreamAsked(7, CIPHERS_PLAIN), granted(), StreamDenied(7, "there are enough")]
)
def test_messages_travel(msg: object) -> None:
    assert decode(encode(msg)) == msg


@pytest.mark.parametrize(
    "msg",
    [
        StreamAsked(-1, CIPHERS),
        StreamAsked(1, ()),
        StreamAsked(1, ("x",) * 9),
        StreamAsked(1, ("x" * 65,)),
        StreamAsked(1, ("",)),
        StreamGranted(1, CIPHER_AES, bytes(15), KEY),
        StreamGranted(1, CIPHER_AES, bytes(16), KEY + b"x"),
        StreamGranted(1, "", bytes(16), KEY),
        StreamDenied(1, "x" * 1001),
    ],
)
def test_messages_are_checked(msg: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(msg))


def test_no_log_shows_a_key() -> None:
    shown = repr(granted()) + str(granted())
    assert repr(KEY)[2:-1] not in shown
    assert repr(granted().conn_id) not in shown


# ---------------------------------------------------------------- ciphers


@pytest.mark.parametrize(
    ("asked", "allowed", "chosen"),
    [
        ((CIPHER_AES,), (CIPHER_AES,), CIPHER_AES),
        ((CIPHER_AES, CIPHER_NONE), CIPHERS_PLAIN, CIPHER_AES),
        ((CIPHER_NONE, CIPHER_AES), CIPHERS_PLAIN, CIPHER_NONE),
        ((CIPHER_NONE, CIPHER_AES), (CIPHER_AES,), CIPHER_AES),
        ((CIPHER_NONE,), (CIPHER_AES,), ""),
        (("of a later version", CIPHER_AES), (CIPHER_AES,), CIPHER_AES),
    ],
)
def test_the_dialler_prefers_and_the_acceptor_permits(
    asked: tuple[str, ...], allowed: tuple[str, ...], chosen: str
) -> None:
    assert choose_cipher(asked, allowed) == chosen


@pytest.mark.parametrize(
    ("ip", "trusted"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("10.1.2.3", True),
        ("192.168.0.7", True),
        ("172.31.0.1", True),
        ("169.254.3.4", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("::ffff:10.0.0.1", True),
        ("8.8.8.8", False),
        ("::ffff:8.8.8.8", False),
        ("172.32.0.1", False),
        ("100.64.0.1", False),
        ("192.0.2.1", False),
        ("2001:4860:4860::8888", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_networks_that_may_go_without_a_cipher(ip: str, trusted: bool) -> None:
    assert is_trusted_network(ip) is trusted


def test_nobody_is_talked_into_no_cipher() -> None:
    both = StreamAsked(1, CIPHERS_PLAIN)
    check_granted(both, granted(), "8.8.8.8")
    check_granted(both, granted(cipher=CIPHER_NONE), "10.0.0.1")
    with pytest.raises(RemoteProtocolError, match=r"8\.8\.8\.8 must not go without"):
        check_granted(both, granted(cipher=CIPHER_NONE), "8.8.8.8")
    with pytest.raises(RemoteProtocolError, match="does not answer"):
        check_granted(StreamAsked(1, CIPHERS), granted(cipher=CIPHER_NONE), "10.0.0.1")
    with pytest.raises(RemoteProtocolError, match="does not answer"):
        check_granted(both, granted(2), "10.0.0.1")


# ---------------------------------------------------------------- grants


def test_an_id_serves_once_and_not_for_long() -> None:
    grants = Grants()
    for number in (1, 2):
        assert grants.add(ALICE, granted(number), 0.0) == ""
    first, second = granted(1).conn_id, granted(2).conn_id
    assert grants.find(bytes(16), 0.0) is None
    found = grants.find(first, 1.0)
    assert found is not None
    assert (found.peer, found.granted) == (ALICE, granted(1))
    assert grants.take(first, 1.0) is found
    assert grants.find(first, 1.0) is grants.take(first, 1.0) is None
    assert grants.find(second, GRANT_S - 0.1) is not None
    assert grants.find(second, GRANT_S) is grants.take(second, GRANT_S) is None


def test_a_peer_opens_few_streams_at_a_time() -> None:
    grants = Grants()
    for number in range(GRANTS_PER_PEER_MAX):
        assert grants.add(ALICE, granted(number), 0.0) == ""
    assert (
        grants.add(ALICE, granted(100), 1.0)
        == f"{GRANTS_PER_PEER_MAX} data streams are being opened already"
    )
    assert grants.add(BOB, granted(101), 1.0) == ""
    assert grants.add(ALICE, granted(102), GRANT_S) == ""  # the first ones were never used
    assert len(grants) == 2
    with pytest.raises(LocalProtocolError, match="twice"):
        grants.add(BOB, granted(102), GRANT_S)


def test_grants_end_with_the_control_link() -> None:
    grants = Grants()
    grants.add(ALICE, granted(1), 0.0)
    grants.add(BOB, granted(2), 0.0)
    grants.forget(ALICE)
    assert grants.find(granted(1).conn_id, 0.0) is None
    assert grants.find(granted(2).conn_id, 0.0) is not None


# ---------------------------------------------------------------- the opening


def shaken(dialler: Handshake, acceptor: Handshake) -> tuple[bytes, bytes]:
    acceptor.finish(dialler.answer(acceptor.greeting(dialler.opening(R1), R2)))
    return dialler.secret(), acceptor.secret()


def test_both_sides_come_to_one_secret() -> None:
    ours, theirs = shaken(Handshake(granted()), Handshake(granted()))
    assert ours == theirs
    assert len(ours) == 32
    assert ours != KEY


def test_the_sizes_of_the_messages() -> None:
    dialler, acceptor = Handshake(granted()), Handshake(granted())
    opening = dialler.opening(R1)
    greeting = acceptor.greeting(opening, R2)
    proof = dialler.answer(greeting)
    assert opening[0] == STREAM_FIRST_BYTE == 0xA7
    assert (len(opening), len(greeting), len(proof)) == (
        OPENING_BYTES,
        GREETING_BYTES,
        DIALLER_PROOF_BYTES,
    )
    assert len(opening) + len(proof) <= 96  # reliability_and_security.md 3.1
    assert conn_id_of(opening) == granted().conn_id


def test_the_bytes_of_an_opening() -> None:
    """From the description alone: another program could take part."""

    def derived(purpose: bytes, salt: bytes = bytes(32)) -> bytes:  # RFC 5869, one block
        extracted = hmac.digest(salt, KEY, "sha256")
        return hmac.digest(extracted, b"atoll stream aes-256-gcm " + purpose + b"\x01", "sha256")

    dialler = Handshake(granted())
    said = b"\xa7\x01" + granted().conn_id + R1
    assert dialler.opening(R1) == said
    said += R2
    greeting = R2 + hmac.digest(derived(b"proof of acceptor"), said, "sha256")
    said += greeting[16:]
    proof = hmac.digest(derived(b"proof of dialler"), said, "sha256")
    assert dialler.answer(greeting) == proof
    assert dialler.secret() == derived(b"records", salt=said + proof)


def test_every_connection_has_its_own_secret() -> None:
    """Even if an id were used twice: the random values differ."""
    secrets = set()
    for random in (R1, R2, bytes(16)):
        dialler, acceptor = Handshake(granted()), Handshake(granted())
        acceptor.finish(dialler.answer(acceptor.greeting(dialler.opening(R1), random)))
        secrets.add(dialler.secret())
    assert len(secrets) == 3


@pytest.mark.parametrize(
    "other", [granted(key=bytes(32)), granted(cipher=CIPHER_NONE)], ids=["key", "cipher"]
)
def test_sides_that_do_not_agree_notice(other: StreamGranted) -> None:
    with pytest.raises(RemoteProtocolError, match="the acceptor of a data stream did not prove"):
        shaken(Handshake(granted()), Handshake(other))


def test_a_proof_does_not_serve_another_connection_or_the_other_side() -> None:
    dialler, acceptor, again = (Handshake(granted()) for _ in range(3))
    opening = dialler.opening(R1)
    greeting = acceptor.greeting(opening, R2)
    proof = dialler.answer(greeting)
    again.greeting(opening, bytes(16))  # the acceptor's next connection
    for replayed in (proof, greeting[16:]):
        with pytest.raises(RemoteProtocolError, match="the dialler of a data stream did not prove"):
            again.finish(replayed)
    acceptor.finish(proof)


@given(st.integers(0, 8 * (OPENING_BYTES + GREETING_BYTES + DIALLER_PROOF_BYTES) - 1))
def test_every_changed_bit_is_noticed(bit: int) -> None:
    changed = bit // 8

    def damaged(data: bytes, start: int) -> bytes:
        if not start <= changed < start + len(data):
            return data
        copy = bytearray(data)
        copy[changed - start] ^= 1 << bit % 8
        return bytes(copy)

    dialler, acceptor = Handshake(granted()), Handshake(granted())

    def whole() -> None:
        opening = damaged(dialler.opening(R1), 0)
        greeting = damaged(acceptor.greeting(opening, R2), OPENING_BYTES)
        acceptor.finish(damaged(dialler.answer(greeting), OPENING_BYTES + GREETING_BYTES))

    # Local: an id that belongs to another grant, which the caller would not have found.
    with pytest.raises((RemoteProtocolError, LocalProtocolError)):
        whole()


@given(st.binary(max_size=2 * OPENING_BYTES))
def test_hostile_openings(opening: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="data stream"):
        conn_id_of(opening if opening[:2] != b"\xa7\x01" else b"")


def test_a_later_version_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match="version 9; this side speaks 1"):
        conn_id_of(bytes((STREAM_FIRST_BYTE, 9)) + bytes(32))


def test_random_values_have_their_length() -> None:
    with pytest.raises(LocalProtocolError, match="15 random bytes"):
        Handshake(granted()).opening(bytes(15))
