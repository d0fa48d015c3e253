"""Set up the TLS of a run: all peers derive the same certificate authority from its secret.

Nobody hands out certificates. The CA's key is HKDF of the secret, its certificate is the same bytes
everywhere, and each peer signs a leaf for its own identity key. So "the certificate chain is valid"
means "the other side knows this run's secret", and the leaf's public key *is* the peer id. A wrong
secret fails in the handshake, before anything that the other side says is parsed; a wrong run name
is told apart at the hello.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.durable.disk import DISK_FULL
from atoll.peer.net.identity import Home, write_atomic

# Clocks of volunteers are wrong: no certificate of a run ever expires. 9999-12-31 is RFC 5280's
# "no well-defined expiration".
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_CA_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll run ca")])
_LEAF_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll peer")])


@dataclass(frozen=True, slots=True)
class RunTls:
    """Hold the two TLS contexts of one identity in one run. Both check the other's certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    tag: str  # names the run secret in errors without telling it; see tag_of


def run_tls(home: Home, secret: bytes) -> RunTls:
    """Return the TLS contexts for ``home``'s identity in the run with this secret.

    The leaf certificate and its key are left in ``<home>/tls``: ``ssl`` loads a chain from files
    only, so they must exist; the folder is private like the home. On a full disk they are in
    memory.
    """
    folder = home.path / "tls"
    folder.mkdir(mode=0o700, exist_ok=True)
    authority = ca_key(secret)
    leaf = leaf_certificate(home.private_key.public_key(), authority)
    pem = _key_pem(home.private_key) + leaf.public_bytes(serialization.Encoding.PEM)
    trusted = ca_certificate(authority).public_bytes(serialization.Encoding.PEM).decode()
    with _file_of(folder / "leaf.pem", pem) as chain:
        return RunTls(
            server=_context(ssl.PROTOCOL_TLS_SERVER, chain, trusted),
            client=_context(ssl.PROTOCOL_TLS_CLIENT, chain, trusted),
            tag=tag_of(leaf),
        )


@contextlib.contextmanager
def _file_of(path: Path, data: bytes) -> Iterator[Path]:
    """Write ``data`` to this file, or where the disk is full to one in memory; give its path."""
    try:
        write_atomic(path, data)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
    else:
        yield path
        return
    fd = os.memfd_create(path.name)
    try:
        os.write(fd, data)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def tag_of(leaf: x509.Certificate) -> str:
    """Return eight hexadecimal digits that differ between run secrets, from a leaf certificate.

    They begin the hash of the CA's public key. Raises x509.ExtensionNotFound for a certificate that
    does not name the key of its issuer.
    """
    issuer = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    return (issuer.key_identifier or b"").hex()[:8]


def unverified_context() -> ssl.SSLContext:
    """Return a TLS context that does not check the other side's certificate.

    It is there to look at the certificate of a peer that refused us, and for nothing else.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_id_of(tls: ssl.SSLObject) -> bytes:
    """Return the 32-byte peer id that the other side of a finished handshake has proved.

    It is the Ed25519 public key of the other side's certificate. Raises RemoteProtocolError where
    there is no such certificate or key.
    """
    der = tls.getpeercert(binary_form=True)
    if der is None:
        raise RemoteProtocolError("the other side showed no certificate")
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except Exception as error:  # x509.InvalidVersion, for one, is no ValueError
        raise RemoteProtocolError("the other side's certificate cannot be read") from error
    if not isinstance(key, Ed25519PublicKey):
        raise RemoteProtocolError("the other side's certificate does not hold an Ed25519 key")
    return key.public_bytes_raw()


def ca_key(secret: bytes) -> Ed25519PrivateKey:
    """Derive the private key of the run's CA from the run secret, with HKDF.

    The run name does not enter: a wrong one is told apart at the hello.
    """
    kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"atoll-ca")
    return Ed25519PrivateKey.from_private_bytes(kdf.derive(secret))


def ca_certificate(authority: Ed25519PrivateKey) -> x509.Certificate:
    """Make the run's CA certificate, which is a function of the key alone.

    Ed25519 signatures have no nonce, so every peer makes the same bytes.
    """
    public = authority.public_key()
    return (
        _builder(_CA_NAME, public, serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(authority, algorithm=None)
    )


def leaf_certificate(identity: Ed25519PublicKey, authority: Ed25519PrivateKey) -> x509.Certificate:
    """Make a certificate that says: the holder of ``identity`` knows the run secret."""
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    # Serials must differ below one CA; the identity is unique. 20 bytes at most, top bit clear.
    serial = int.from_bytes(identity.public_bytes_raw()[:16], "big") + 2
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _builder(_LEAF_NAME, identity, serial)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, algorithm=None)
    )


def _builder(subject: x509.Name, public: Ed25519PublicKey, serial: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_CA_NAME)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _context(protocol: ssl._SSLMethod, chain: Path, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)  # trusts nobody yet: no system CAs are loaded
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers move; the key is the name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=trusted)
    context.load_cert_chain(chain)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would skip the proof of identity
    return context
