"""The run's certificate authority: the same for all who know the secret, useless to others."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.peer.net.certs import (
    RunTls,
    ca_certificate,
    ca_key,
    leaf_certificate,
    peer_id_of,
    run_tls,
)
from atoll.peer.net.identity import Home

SECRET = bytes(range(32))


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ...]:
    """Both ends of a handshake in memory; raises what either raises."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends


@pytest.fixture
def contexts(tmp_path: Path) -> dict[str, tuple[bytes, RunTls]]:
    made = {}
    for name, secret in (("a", SECRET), ("b", SECRET), ("stranger", SECRET[::-1])):
        with Home.open(tmp_path / name) as home:
            made[name] = (home.peer_id, run_tls(home, secret))
    return made


def test_the_authority_is_byte_deterministic() -> None:
    key = ca_key(SECRET)
    der = ca_certificate(key).public_bytes(Encoding.DER)
    assert der == ca_certificate(ca_key(SECRET)).public_bytes(Encoding.DER)
    # Pinned: a change here would split every run between old and new versions.
    assert hashlib.sha256(der).hexdigest() == (
        "56433f8ec0908fcb8bba9eefd0eaf65448ada506a9bd6df771951bac99a59ad7"
    )
    assert der != ca_certificate(ca_key(bytes(32))).public_bytes(Encoding.DER)


def test_a_leaf_carries_the_identity() -> None:
    identity = Ed25519PrivateKey.generate().public_key()
    authority = ca_key(SECRET)
    leaf = leaf_certificate(identity, authority)
    leaf.verify_directly_issued_by(ca_certificate(authority))
    assert leaf.public_key() == identity


def test_both_ends_learn_who_the_other_is(contexts: dict[str, tuple[bytes, RunTls]]) -> None:
    (a_id, a_tls), (b_id, b_tls) = contexts["a"], contexts["b"]
    client, server = handshake(a_tls.client, b_tls.server)
    assert peer_id_of(client) == b_id
    assert peer_id_of(server) == a_id
    assert client.version() == "TLSv1.3"


def test_another_token_fails_in_the_handshake(
    contexts: dict[str, tuple[bytes, RunTls]],
) -> None:
    ours, theirs = contexts["a"][1], contexts["stranger"][1]
    assert ours.tag != theirs.tag
    for client, server in ((ours.client, theirs.server), (theirs.client, ours.server)):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(client, server)


def test_a_client_without_a_certificate_is_refused(
    contexts: dict[str, tuple[bytes, RunTls]],
) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(client, contexts["a"][1].server)


def test_nothing_older_than_tls_1_3(contexts: dict[str, tuple[bytes, RunTls]]) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        handshake(client, contexts["a"][1].server)


def test_only_the_run_is_trusted(contexts: dict[str, tuple[bytes, RunTls]]) -> None:
    for context in (contexts["a"][1].server, contexts["a"][1].client):
        assert context.cert_store_stats()["x509_ca"] == context.cert_store_stats()["x509"] == 1
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert contexts["a"][1].server.num_tickets == 0


def test_the_files_are_private(tmp_path: Path) -> None:
    with Home.open(tmp_path / "h") as home:
        run_tls(home, SECRET)
        assert (home.path / "tls").stat().st_mode & 0o777 == 0o700
        assert (home.path / "tls" / "leaf.pem").stat().st_mode & 0o777 == 0o600
