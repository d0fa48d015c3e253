"""Keep a peer's home folder: who it is, which life this is, which run it belongs to.

::

    <home>/            mode 0700, one daemon at a time (flock on ``lock``)
      lock             pid of the holder, for the error message only
      identity.key     32 bytes, the Ed25519 seed; mode 0600; the public key is the peer id
      incarnation      the highest incarnation ever used, decimal
      run.json         run name, run secret, known addresses, authority and pass; mode 0600
      admission        in a run with an authority: who was let in, who is revoked
      run/             unix sockets
      tls/             this peer's leaf certificate and key for the run

Every write is atomic and on disk before it returns, so a power cut leaves the old or the new file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.collectives.errors import ConfigError, HomeInUseError
from atoll.peer.durable.disk import DISK_FULL
from atoll.peer.membership.signatures import KEY_BYTES
from atoll.peer.net.invite import SECRET_BYTES, check_run_name

PEER_ID_BYTES = KEY_BYTES
# Addresses to try after a restart; more would only make a start with everybody gone slower.
KNOWN_ADDRESSES_MAX = 64
# sockaddr_un.sun_path has 108 bytes on Linux and 104 on macOS, with the closing zero.
SOCKET_PATH_BYTES_MAX = 100
# For homes with long paths. Not TMPDIR: a daemon and its clients may have different ones.
SOCKETS_BASE = Path("/tmp")
# Of run.json. A record without a version is of the first one, which had the same fields.
HOME_VERSION = 2
# A run record is a few hundred bytes; a file beyond this is not one.
_RECORD_BYTES_MAX = 64 << 10
# What a view can name (views.Member). Nanoseconds since 1970 reach it in the year 2262.
_INCARNATION_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Hold what a daemon must remember to get back into its run. ``repr`` hides the secret."""

    run: str
    secret: bytes = field(repr=False)
    known: tuple[str, ...] = ()
    authority: bytes = b""  # its public key, and
    credential: bytes = b""  # what it gave this peer, in a run that has one


class Home:
    """Hold a home folder open and locked. Use :meth:`open`; close it last of all."""

    def __init__(self, path: Path, lock_fd: int, key: Ed25519PrivateKey) -> None:
        self.path = path
        self.private_key = key
        self.peer_id = key.public_key().public_bytes_raw()
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Lock the home, making it and the identity at the first start.

        Raises HomeInUseError (naming the holder's pid) or ConfigError for a folder or key file
        that is missing, unreadable, or open to other users.
        """
        home = Path(path).expanduser().absolute()
        try:
            _private_folder(home)
            lock_fd = _lock(home)
            try:
                return cls(home, lock_fd, _load_or_make_key(home / "identity.key"))
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise ConfigError(
                f"the home folder {home} cannot be used: {error.strerror or error}",
                fix="choose a writable folder with --home",
            ) from error

    def close(self) -> None:
        """Release the lock. Harmless when already closed."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sign(self, data: bytes) -> bytes:
        """Return the Ed25519 signature of ``data``, 64 bytes."""
        return self.private_key.sign(data)

    def next_incarnation(self, now_ns: int) -> int:
        """Return a number above every earlier one, on disk before it is returned.

        ``max(stored + 1, now_ns)``: the clock keeps a restored backup ahead of its former lives,
        the stored number keeps a clock that went backwards from repeating one.
        """
        path = self.path / "incarnation"
        try:
            stored = int(path.read_text("ascii"))
        except FileNotFoundError:
            stored = 0
        except ValueError as error:
            raise ConfigError(
                f"{path} does not hold a number", fix=f"remove it: rm {path}"
            ) from error
        if not 0 <= stored < _INCARNATION_MAX:
            raise ConfigError(
                f"{path} holds a number that no clock gives", fix=f"remove it: rm {path}"
            )
        incarnation = max(stored + 1, now_ns)
        number = b"%d\n" % incarnation
        try:
            write_atomic(path, number)
        except OSError as error:
            if error.errno not in DISK_FULL or not stored or path.stat().st_size != len(number):
                raise
            _overwrite(path, number)  # in its own block, less than a sector: all of it or nothing
        return incarnation

    def load_run(self) -> RunRecord | None:
        """Return the run this home belongs to, or None before the first ``up`` or ``join``.

        Raises ConfigError if what is there is not a run record, or others can read it.
        """
        path = self.path / "run.json"
        try:
            refuse_wide_mode(path)
            with path.open("rb") as file:
                document = json.loads(file.read(_RECORD_BYTES_MAX))
            return _record(document)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            # Never chain the cause: a parser's message may quote the secret.
            raise ConfigError(
                f"{path} is not a run record ({type(error).__name__})",
                fix=f"remove it (rm {path}) and join the run again with its invite",
            ) from None

    def save_run(self, record: RunRecord) -> None:
        """Replace the run record atomically; at most KNOWN_ADDRESSES_MAX addresses are kept."""
        document: dict[str, object] = {
            "version": HOME_VERSION,
            "run": record.run,
            "secret": record.secret.hex(),
            "known": list(record.known[:KNOWN_ADDRESSES_MAX]),
        }
        if record.authority:
            document["authority"] = record.authority.hex()
            document["credential"] = record.credential.hex()
        write_atomic(self.path / "run.json", json.dumps(document, indent=1).encode())

    def socket_path(self, name: str) -> Path:
        """Return where the unix socket ``name`` of this home lives; make its folder, private."""
        path = socket_path(self.path, name)
        _private_folder(path.parent)
        return path


def default_home(explicit: str | Path | None = None) -> Path:
    """Return ``explicit``, else ATOLL_HOME, else ``atoll`` in the user's state folder (XDG)."""
    if explicit:
        return Path(explicit).expanduser().absolute()
    if chosen := os.environ.get("ATOLL_HOME"):
        return Path(chosen).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME")
    # The XDG specification tells programs to ignore a relative path.
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "atoll"


def socket_path(home: Path, name: str) -> Path:
    """Return the path of the unix socket ``name`` for ``home``. Make nothing: clients call it too.

    A home whose path is too long for a socket address gets a folder in SOCKETS_BASE, named by the
    home's hash. However a home is named, through links or not, it is one home.
    """
    home = home.expanduser().resolve()
    folder = home / "run"
    if len(os.fsencode(folder / name)) > SOCKET_PATH_BYTES_MAX:
        tag = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
        folder = SOCKETS_BASE / f"atoll-{os.getuid()}-{tag}"
    path = folder / name
    if folder.is_symlink() or folder.exists():
        _check_private(folder)  # nobody else's daemon is to be spoken to
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` (mode 0600) by ``data``: all or nothing, and on disk when this returns."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _overwrite(path: Path, data: bytes) -> None:
    """Write ``data`` over as many bytes of a file; they are on the disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _private_folder(path: Path) -> None:
    """Make ``path`` with mode 0700; refuse one that somebody else owns or can enter."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} is not a folder", fix="choose another --home") from error
    _check_private(path)


def _check_private(path: Path) -> None:
    # lstat: in a folder that all users share a stranger may have put a link here.
    found = path.lstat() if path.parent == SOCKETS_BASE else path.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} is not a folder of this user", fix="choose another --home")
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be entered by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            fix=f"chmod 700 {path}",
        )


def _lock(home: Path) -> int:
    """Return a descriptor that holds the flock on ``home``; closing it, or dying, releases it.

    Raises HomeInUseError if another process holds it.
    """
    path = home / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise HomeInUseError(
            f"the home folder {home} is in use by process {holder or 'unknown'}",
            fix="stop that daemon with `atoll leave`, or give this one another --home",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises FileNotFoundError; ConfigError if others can read the file, or it is no key.
    """
    refuse_wide_mode(path)
    with path.open("rb") as file:
        seed = file.read(PEER_ID_BYTES + 1)
    if len(seed) != PEER_ID_BYTES:
        raise ConfigError(
            f"{path} is not an Ed25519 key: not exactly {PEER_ID_BYTES} bytes",
            fix="restore it from a backup, or remove it to get a new one, as somebody new",
        )
    return Ed25519PrivateKey.from_private_bytes(seed)


def _load_or_make_key(path: Path) -> Ed25519PrivateKey:
    try:
        return load_key(path)
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        write_atomic(path, key.private_bytes_raw())
        return key


def refuse_wide_mode(path: Path) -> None:
    """Raise ConfigError for a file with a secret in it that other users may read."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds a secret and other users may read it (mode {mode:04o})",
            fix=f"chmod 600 {path}",
        )


def _record(document: dict[str, object]) -> RunRecord:
    version = document.get("version", 1) if isinstance(document, dict) else None
    if type(version) is not int:
        raise TypeError("the version is not a number")
    if version > HOME_VERSION:
        raise ConfigError(
            f"this home has version {version}, and this version of atoll reads {HOME_VERSION}",
            fix="use the version of atoll that wrote it, or a newer one",
        )
    run, secret, known = document["run"], document["secret"], document["known"]
    if not (isinstance(run, str) and isinstance(secret, str) and isinstance(known, list)):
        raise TypeError("a field has the wrong type")
    if not all(isinstance(address, str) for address in known):
        raise TypeError("an address is not a string")
    authority, credential = document.get("authority", ""), document.get("credential", "")
    if not (isinstance(authority, str) and isinstance(credential, str)):
        raise TypeError("a field has the wrong type")
    record = RunRecord(
        check_run_name(run),
        bytes.fromhex(secret),
        tuple(known),
        bytes.fromhex(authority),
        bytes.fromhex(credential),
    )
    if len(record.secret) != SECRET_BYTES or len(record.authority) not in (0, KEY_BYTES):
        raise ValueError("the secret or the authority has the wrong length")
    return record
