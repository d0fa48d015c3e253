"""Define every exception that atoll raises, in one tree.

The tree lives in the lowest room because every room raises from it::

    AtollError                  E00
    |-- ConfigError             E10  an argument, file or folder is wrong; fix it and start again
    |   |-- HomeInUseError      E11  another daemon holds this --home
    |   |-- IdentityInUseError  E12  the same identity runs elsewhere with a newer incarnation
    |   `-- DataError           E13  the training text is missing or empty
    |-- UnfitMachineError       E14  `atoll doctor` has found what keeps a machine from training
    |-- ConnectError            E20  a peer could not be reached (the stage is named)
    |   |-- AdmissionError      E21  not admitted: secret or run differ
    |   |   |-- PassMissingError  E23  the run has an authority, and this peer shows no pass of it
    |   |   |-- PassForgedError   E24  a pass that the authority or its holder has not signed
    |   |   |-- PassExpiredError  E25  its time is over, and this peer was not in before
    |   |   |-- PassUsedUpError   E26  as many peers as it may let in have come with it
    |   |   |-- PassRevokedError  E27  the authority has revoked the peer, or its token
    |   |   |-- PassRoleError     E28  it does not permit this role
    |   |   |-- PassRunError      E29  it is for another run
    |   |   |-- BannedError       E34  the members have evidence against this peer
    |   |   `-- AddressFullError  E41  as many peers as may come from its IP address are in
    |   `-- VersionError        E22  no common protocol version
    |-- ProtocolError           E30
    |   |-- LocalProtocolError  E31  this program broke the protocol: a defect, please report it
    |   |-- RemoteProtocolError E32  the other side sent something that is not allowed
    |   `-- EvidenceError       E33  evidence against a peer that proves nothing, or cannot be read
    |-- IncompatibleRunError    E40  specification or model differ from the run's
    |-- RoundError              E50  a round did not come to its end
    |   |-- RoundTimeoutError   E51  no commit within the run's round deadline
    |   |-- NoQuorumError       E52  too few voters are alive to go on
    |   |-- CollectiveMismatchError E53  the other trainers called another collective
    |   |-- CollectiveMissedError E54  the round of a collective went on without this trainer
    |   `-- TooFewPeersError    E55  too few peers that count for the run's rule
    |-- CodecError              E60  bytes or values that a codec cannot take
    |-- StateError              E70  replicated state failed a check
    |   |-- DivergedError       E71  members hold different state and no majority decides
    |   |-- CheckpointError     E72  a checkpoint is corrupt, foreign or not one at all
    |   `-- DiskError           E73  the disk has not taken what this peer's word depends on
    `-- SessionError            E80
        |-- NoDaemonError       E81  no daemon answers at this --home
        |-- DaemonLostError     E82  the daemon died while it was in use
        `-- TrainerRefusedError E83  the daemon already serves a trainer, or is leaving

Codes are stable: scripts may test them. ``docs/errors.md`` has a paragraph for each.
"""

from __future__ import annotations

from typing import ClassVar


class AtollError(Exception):
    """Report what happened and what to do next; the base of the tree.

    ``str()`` gives ``ATOLL-Exx`` and what happened, then a line with the fix if there is one.
    """

    code: ClassVar[str] = "E00"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, fix: str = "") -> None:
        self.what = what
        self.fix = fix
        super().__init__(what, fix)

    def __str__(self) -> str:
        text = f"ATOLL-{self.code} {self.what}"
        return f"{text}\n    fix: {self.fix}" if self.fix else text


class ConfigError(AtollError):
    code = "E10"
    exit_code = 2


class HomeInUseError(ConfigError):
    code = "E11"


class IdentityInUseError(ConfigError):
    code = "E12"


class DataError(ConfigError):
    code = "E13"


class UnfitMachineError(AtollError):
    code = "E14"
    exit_code = 3


class ConnectError(AtollError):
    """Report that a peer could not be reached.

    ``stage``: what failed, "DNS" or "TCP" where nobody could be reached at all.
    """

    code = "E20"
    exit_code = 10

    def __init__(self, what: str, *, fix: str = "", stage: str = "") -> None:
        super().__init__(what, fix=fix)
        self.stage = stage


class AdmissionError(ConnectError):
    code = "E21"
    exit_code = 11


class PassMissingError(AdmissionError):
    code = "E23"


class PassForgedError(AdmissionError):
    code = "E24"


class PassExpiredError(AdmissionError):
    code = "E25"


class PassUsedUpError(AdmissionError):
    code = "E26"


class PassRevokedError(AdmissionError):
    code = "E27"


class PassRoleError(AdmissionError):
    code = "E28"


class PassRunError(AdmissionError):
    code = "E29"


class BannedError(AdmissionError):
    code = "E34"


class AddressFullError(AdmissionError):
    code = "E41"  # the twenties are full


class VersionError(ConnectError):
    code = "E22"
    exit_code = 12


class ProtocolError(AtollError):
    code = "E30"
    exit_code = 20


class LocalProtocolError(ProtocolError):
    code = "E31"
    exit_code = 21


class RemoteProtocolError(ProtocolError):
    code = "E32"
    exit_code = 22


class EvidenceError(ProtocolError):
    code = "E33"
    exit_code = 27


class IncompatibleRunError(AtollError):
    code = "E40"
    exit_code = 23


class RoundError(AtollError):
    """Report a round that did not end.

    Its text says for whom it waited, ``phase`` in which phase, ``elapsed_s`` after how many
    seconds.
    """

    code = "E50"
    exit_code = 24

    def __init__(
        self, what: str, *, fix: str = "", phase: str = "", elapsed_s: float = 0.0
    ) -> None:
        super().__init__(what, fix=fix)
        self.phase = phase
        self.elapsed_s = elapsed_s


class RoundTimeoutError(RoundError):
    code = "E51"


class NoQuorumError(RoundError):
    code = "E52"


class CollectiveMismatchError(RoundError):
    code = "E53"


class CollectiveMissedError(RoundError):
    code = "E54"


class TooFewPeersError(RoundError):
    code = "E55"


class CollectiveLostError(RoundError):
    code = "E56"


class CodecError(AtollError):
    code = "E60"
    exit_code = 25


class StateError(AtollError):
    code = "E70"
    exit_code = 26


class DivergedError(StateError):
    code = "E71"


class CheckpointError(StateError):
    code = "E72"


class DiskError(StateError):
    code = "E73"


class SessionError(AtollError):
    code = "E80"
    exit_code = 13


class NoDaemonError(SessionError):
    code = "E81"
    exit_code = 14


class DaemonLostError(SessionError):
    code = "E82"
    exit_code = 15


class TrainerRefusedError(SessionError):
    code = "E83"
    exit_code = 16


def _tree(root: type[AtollError]) -> dict[str, type[AtollError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS_BY_CODE: dict[str, type[AtollError]] = _tree(AtollError)
