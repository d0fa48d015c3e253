"""Define the first message in each direction of a connection, and check it. Sans-I/O.

TLS has already proved that both sides know the run's secret and hold the key of their peer id. The
dialler says hello first. The other side answers with its own hello, or with the reason why not, so
that the person at the dialling machine reads that reason and not "connection reset".
"""

from __future__ import annotations

import re
from typing import Annotated

from atoll.collectives.errors import (
    AddressFullError,
    AdmissionError,
    AtollError,
    BannedError,
    ConnectError,
    IdentityInUseError,
    PassExpiredError,
    PassForgedError,
    PassMissingError,
    PassRevokedError,
    PassRoleError,
    PassRunError,
    PassUsedUpError,
    VersionError,
)
from atoll.collectives.version import VERSION
from atoll.peer.membership.view import plain
from atoll.peer.net.wire import Within, message
from atoll.peer.streams.keys import CIPHERS_MAX, CONN_ID_BYTES, CipherName

# The versions of the protocol that this program speaks. One is added when an old peer could
# misunderstand us, and the lowest is dropped where the two cannot work in one run. Version 1 is
# that of the first atoll 0.1: its hello does not say which program it is. Version 2 knows no lives,
# and does not dial for those who cannot.
PROTOCOL_MIN = 3
PROTOCOL_MAX = 3
# A run name, an address and a few numbers; what an unproved connection may make us decode.
HELLO_BYTES_MAX = 4 << 10

CONTROL, DATA, PROBE = "control", "data", "probe"
EXAMINE = "examine"  # asks what the run trains, and how fast bytes go (examination.py)
REACH = "reach"  # asks whether the dialler can be dialled (reach.py)
# Refused.code of a second control link between the same two peers.
DUPLICATE = "duplicate"
# What to do about every IdentityInUseError.
COPIED_HOME_FIX = "give one of the two daemons another --home; never copy a home folder"

_NAME_CHARACTERS_MAX = 64
_ADDRESS_CHARACTERS_MAX = 300  # the longest DNS name, brackets, a port
_WHAT_CHARACTERS_MAX = 1000
_PROGRAM = re.compile(r"[0-9A-Za-z.+!_-]{0,64}")  # what PEP 440 allows, and short
# Limit of what an authority has given a peer: twice what the largest takes (authority/grants.py).
_CREDENTIAL_BYTES_MAX = 1 << 10


@message(wire="Hello")
class Hello:
    """Say who speaks, and what for.

    ``life`` is the number of the process: higher with every start of the peer's daemon. ``inc`` is
    that of its memory as a member, which may change while the process lives. ``address`` is where
    this peer can be dialled, "" if nowhere; ``ciphers`` what its data streams can do besides TLS,
    nothing in the first version; ``credential`` and ``role`` what it was granted and wants to be,
    in a run with an authority; ``program`` the version of atoll, for people, "" in protocol 1;
    ``offer`` the id of the data stream that the dialler was offered, b"" if it opens its own.
    """

    protocol_min: int
    protocol_max: int
    run: str
    kind: str
    inc: int
    address: str
    ciphers: Annotated[tuple[CipherName, ...], Within(0, CIPHERS_MAX)] = ()
    credential: Annotated[bytes, Within(0, _CREDENTIAL_BYTES_MAX)] = b""
    role: Annotated[str, Within(0, _NAME_CHARACTERS_MAX)] = ""
    program: str = ""
    life: int = 0
    offer: Annotated[bytes, Within(0, CONN_ID_BYTES)] = b""

    def __post_init__(self) -> None:
        if not _PROGRAM.fullmatch(self.program):
            raise ValueError("this is not a version of a program")
        if not 0 <= self.protocol_min <= self.protocol_max:
            raise ValueError(f"protocol versions {self.protocol_min} to {self.protocol_max}")
        if self.kind not in (CONTROL, DATA, PROBE, REACH, EXAMINE):
            raise ValueError(f"connection kind {self.kind[:16]!r}")
        if len(self.run) > _NAME_CHARACTERS_MAX or len(self.address) > _ADDRESS_CHARACTERS_MAX:
            raise ValueError("the run name or the address is too long")
        if self.inc < 0 or self.life < 0:
            raise ValueError("a negative incarnation or life")


@message(wire="Refused")
class Refused:
    """Say why the hello was not accepted.

    ``what`` is for people, ``code`` for programs; the rest says what refused, as in a hello.
    Protocol 1 had no such fields.
    """

    code: str
    what: str
    protocol_min: int = 1
    protocol_max: int = 1
    program: str = ""

    def __post_init__(self) -> None:
        if not _PROGRAM.fullmatch(self.program):
            raise ValueError("this is not a version of a program")
        if not 0 <= self.protocol_min <= self.protocol_max:
            raise ValueError(f"protocol versions {self.protocol_min} to {self.protocol_max}")
        if len(self.what) > _WHAT_CHARACTERS_MAX or len(self.code) > _NAME_CHARACTERS_MAX:
            raise ValueError("the reason is too long")


def check(mine: Hello, theirs: Hello, who: str = "that peer") -> None:
    """Raise VersionError or AdmissionError, naming both sides' values, if the two cannot talk.

    The words are for the people at the side of ``mine``: a listener hands in the two hellos the
    other way round, to tell the dialler.
    """
    if mine.protocol_max < theirs.protocol_min or theirs.protocol_max < mine.protocol_min:
        raise _version_error(mine, theirs, who)
    if mine.run != theirs.run:
        raise AdmissionError(
            f"{who} runs {theirs.run!r}, you asked for {mine.run!r}",
            fix=_FIXES[AdmissionError],
        )


def refusal_of(error: AtollError) -> Refused:
    """Return what the other side is told about ``error``; :func:`refusal_error` turns it back."""
    what = error.what[:_WHAT_CHARACTERS_MAX]
    return Refused(error.code, what, PROTOCOL_MIN, PROTOCOL_MAX, VERSION)


def refusal_error(refused: Refused, who: str) -> AtollError:
    """Return the error that the dialler raises when ``who`` answered ``refused``."""
    if refused.code == VersionError.code:
        mine = Refused("", "", PROTOCOL_MIN, PROTOCOL_MAX, VERSION)
        return _version_error(mine, refused, who)
    what = f"{who} refused: {plain(refused.what)}"  # for a terminal
    for kind, fix in _FIXES.items():
        if refused.code == kind.code:
            return kind(what, fix=fix)
    return ConnectError(what)


def fix_of(error: AtollError) -> str:
    """Return what a person can do about a refusal of this kind; "" if nothing is known."""
    return _FIXES.get(type(error), "")


_ASK = "ask whoever runs the authority for an invite of your own"
_FIXES: dict[type[AtollError], str] = {
    AdmissionError: "use the invite of the run that you mean",
    AddressFullError: "ask the members to allow more with `atoll up --per-address N`",
    IdentityInUseError: COPIED_HOME_FIX,
    PassMissingError: f"{_ASK}, and give it with --pass",
    PassForgedError: "copy the whole invite again; it works in one home only if it names a peer",
    PassExpiredError: f"{_ASK}; the clock of this machine or of that peer may be wrong, too",
    PassUsedUpError: _ASK,
    PassRevokedError: _ASK,
    PassRoleError: "start this peer in the role that the invite is for: --witness, `atoll follow`",
    PassRunError: "use the invite of the run that you mean",
    BannedError: "see docs/errors.md; `atoll status` of a member shows the evidence",
}


def _version_error(mine: Hello | Refused, theirs: Hello | Refused, who: str) -> VersionError:
    older_is_theirs = theirs.protocol_max < mine.protocol_min
    place = "on that machine too" if older_is_theirs else "on this machine too"
    version = (mine if older_is_theirs else theirs).program
    return VersionError(
        f"{who} runs {_named(theirs)}, you run {_named(mine)}: peers of different protocols cannot"
        " be in one run, so update the older one",
        fix=f"install atoll {version or 'of the newer version'} {place}; its homes and checkpoints"
        " stay good",
    )


def _named(side: Hello | Refused) -> str:
    """Return the program and the protocol of one side, in words."""
    program = f"atoll {side.program}" if side.program else "an atoll that does not say its version"
    if side.protocol_min == side.protocol_max:
        return f"{program} (protocol {side.protocol_max})"
    return f"{program} (protocols {side.protocol_min} to {side.protocol_max})"
