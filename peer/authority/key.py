"""Keep the authority itself: a folder that a person keeps offline, and no daemon ever sees.

::

    DIR/               mode 0700
      authority.key    32 bytes, the Ed25519 seed; mode 0600
      revocations      the last list, to hand to any daemon: `atoll revoke DIR/revocations`
      issued           what was granted, a line each, for people; no secrets

The secret of each of its runs is derived from the key, so there is nothing else to keep or to lose.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.collectives.errors import ConfigError, PassForgedError
from atoll.peer.authority.grants import Grant, Revocations, date_of
from atoll.peer.membership.signatures import KEY_BYTES
from atoll.peer.net.identity import load_key, write_atomic
from atoll.peer.net.invite import SECRET_BYTES, SEED_BYTES, Invite

_SPAN = re.compile(r"(\d{1,6})([mhd])")
_SPAN_S = {"m": 60, "h": 3600, "d": 86400}


class Authority:
    """Grant, invite and revoke with the key of an authority's folder."""

    def __init__(self, path: Path, key: Ed25519PrivateKey) -> None:
        self.path, self._key = path, key
        self.public_key = key.public_key().public_bytes_raw()

    @classmethod
    def new(cls, path: Path) -> Authority:
        """Make a key; ConfigError if there is one already."""
        key_path = path / "authority.key"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if key_path.exists():
            what = f"{path} holds an authority already"
            raise ConfigError(
                what, fix="choose another folder: who has lost a key has lost its runs"
            )
        key = Ed25519PrivateKey.generate()
        write_atomic(key_path, key.private_bytes_raw())
        return cls(path, key)

    @classmethod
    def open(cls, path: Path) -> Authority:
        try:
            return cls(path, load_key(path / "authority.key"))
        except FileNotFoundError as error:
            what = f"{path} holds no authority"
            raise ConfigError(what, fix=f"make one: atoll authority new {path}") from error

    def secret_of(self, run: str) -> bytes:
        """Return the run secret.

        It keeps strangers from being parsed, and admits nobody by itself.
        """
        info = b"atoll-run-secret 1\0" + run.encode()
        kdf = HKDF(algorithm=hashes.SHA256(), length=SECRET_BYTES, salt=None, info=info)
        return kdf.derive(self._key.private_bytes_raw())

    def token(self, run: str, role: str, uses: int, not_after_s: int) -> tuple[Grant, bytes]:
        """Make a token, and return it with its seed; ConfigError for less than one use."""
        if uses < 1:
            raise ConfigError(f"a token of {uses} uses", fix="give --uses 1 or more")
        seed = Ed25519PrivateKey.generate()
        subject = seed.public_key().public_bytes_raw()
        return self._granted(Grant(run, subject, role, uses, not_after_s)), seed.private_bytes_raw()

    def allow(self, run: str, role: str, peer: bytes, not_after_s: int) -> Grant:
        """Make a pass for one peer."""
        return self._granted(Grant(run, peer, role, 0, not_after_s))

    def invite(self, grant: Grant, address: tuple[str, int], seed: bytes = b"") -> Invite:
        secret, seed = self.secret_of(grant.run), seed or bytes(SEED_BYTES)
        return Invite(*address, grant.run, b"", secret, self.public_key, grant.encode(), seed)

    def revoke(self, ids: Iterable[bytes]) -> Revocations:
        """Make the next list, with these ids added, in the file of :attr:`revocations_path`."""
        latest = self._latest().with_more(ids, self._key)
        write_atomic(self.revocations_path, latest.encode())
        return latest

    @property
    def revocations_path(self) -> Path:
        return self.path / "revocations"

    def _latest(self) -> Revocations:
        try:
            return Revocations.parse(self.revocations_path.read_bytes(), self.public_key)
        except FileNotFoundError:
            return Revocations()
        except PassForgedError as error:
            raise ConfigError(
                f"{self.revocations_path} is damaged: {error.what}",
                fix="copy the newest list back to there: members refuse one with a lower number",
            ) from error

    def _granted(self, grant: Grant) -> Grant:
        signed = grant.signed(self._key)
        uses = f"{grant.uses} uses, " if grant.is_token else ""
        line = f"{date_of(int(time.time()))}: {grant.subject.hex()} {uses}{grant.describe()}"
        fd = os.open(self.path / "issued", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(fd, "a") as log:
            log.write(f"{line}, run {grant.run}\n")
        return signed


def expiry(text: str, now_s: float) -> int:
    """Return when "7d", "12h" or "30m" from now is, in seconds since 1970; 0 for "never".

    ConfigError for any other text.
    """
    if text == "never":
        return 0
    found = _SPAN.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ConfigError(
            f"{text!r} is no time until it expires", fix="for example 7d, 12h or never"
        )
    return int(now_s) + int(found[1]) * _SPAN_S[found[2]]


def parse_id(text: str) -> bytes:
    """Return the 32 bytes of a peer's or a token's id; ConfigError if the text is none."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise ConfigError(
            f"{text[:80]!r} is not an id of {2 * KEY_BYTES} hexadecimal digits",
            fix="`atoll id` prints a peer's; `atoll status` shows those of peers and tokens",
        )
    return found
