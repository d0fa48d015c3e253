"""Certificates that OpenSSL takes and `cryptography` cannot read: they end one connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.collectives.errors import AdmissionError, ConnectError
from atoll.peer.net.certs import _context, _key_pem, ca_certificate, ca_key, leaf_certificate
from atoll.peer.net.dial import Dial
from tests.unit.peer.conftest import SECRET

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net

SIGNATURE_BYTES = 64  # the last ones of a certificate that Ed25519 has signed
# Bytes of a leaf, each once in it, and what is written in their place: the version, and the usages
# of the key, which become two extensions of one kind that OpenSSL does not know.
VERSION_2 = {"a003020102": "a003020101"}
EXTENSION_TWICE = {"0603551d0f": "0603551d7f", "0603551d25": "0603551d7f"}


def odd_chain(path: Path, secret: bytes, changes: Mapping[str, str]) -> Path:
    """Write a certificate that a run's CA has signed, but with other bytes in it, and its key."""
    authority, identity = ca_key(secret), Ed25519PrivateKey.generate()
    leaf = leaf_certificate(identity.public_key(), authority)
    body = odd = leaf.tbs_certificate_bytes
    for old, new in changes.items():
        assert odd.count(bytes.fromhex(old)) == 1
        odd = odd.replace(bytes.fromhex(old), bytes.fromhex(new))
    der = leaf.public_bytes(Encoding.DER).replace(body, odd)
    der = der[:-SIGNATURE_BYTES] + authority.sign(odd)
    with pytest.raises((x509.InvalidVersion, x509.DuplicateExtension)):
        _ = x509.load_der_x509_certificate(der).extensions
    path.write_bytes(_key_pem(identity) + ssl.DER_cert_to_PEM_cert(der).encode())
    return path


def context_of(protocol: ssl._SSLMethod, chain: Path) -> ssl.SSLContext:
    """Return a context of the run with another certificate than a peer's."""
    trusted = ca_certificate(ca_key(SECRET)).public_bytes(Encoding.PEM).decode()
    return _context(protocol, chain, trusted)


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[str]:
    """Accept TLS connections and say nothing; give the address."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("changes", [VERSION_2, EXTENSION_TWICE], ids=["version", "extension"])
def test_a_stranger_is_one_whatever_its_certificate(
    net: Net, tmp_path: Path, changes: Mapping[str, str]
) -> None:
    """As who has the address now that a peer had."""

    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(odd_chain(tmp_path / "odd.pem", bytes(32), changes))
        async with listening(context) as address:
            with pytest.raises(AdmissionError, match=r"another run secret \(tag unknown,"):
                await net.node("a").host.dial(address)

    net.run(scenario())


def test_a_peer_whose_certificate_cannot_be_read_is_no_peer(net: Net, tmp_path: Path) -> None:
    chain = odd_chain(tmp_path / "odd.pem", SECRET, VERSION_2)

    async def scenario() -> None:
        a, b = await net.linked()
        dial = Dial(a.address, "demo", a.tls.tag)
        channel, _ = await dial.reach(context_of(ssl.PROTOCOL_TLS_CLIENT, chain))
        await a.until(lambda: a.logs)
        channel.close()
        assert a.logs[0].endswith(": the other side's certificate cannot be read")
        assert "DEFECT" not in a.logs[0]
        async with listening(context_of(ssl.PROTOCOL_TLS_SERVER, chain)) as address:
            with pytest.raises(ConnectError, match="certificate cannot be read"):
                await b.host.dial(address)
        assert not a.downs

    net.run(scenario())


def test_a_defect_that_a_connection_meets_ends_that_connection(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        with monkeypatch.context() as patch:
            patch.setattr("atoll.peer.net.listener.peer_id_of", lambda _: {}["nobody"])
            with pytest.raises(ConnectError):
                await net.node("c").host.dial(a.address)
        assert ": DEFECT, please report it: it raised KeyError: 'nobody' (in " in a.logs[0]
        assert await net.node("d").host.dial(a.address) == a.id
        assert not a.downs
        assert not b.downs

    net.run(scenario())
