"""Describe what members tell all that they have a link to about passes. Sans-I/O.

What is told is signed by others than who tells it, so it does not matter of whom one hears it.
"""

from __future__ import annotations

from typing import Annotated

from atoll.peer.authority.grants import CREDENTIAL_BYTES_MAX
from atoll.peer.authority.ledger import RECORDS_MAX
from atoll.peer.authority.revocations import REVOCATIONS_BYTES_MAX
from atoll.peer.net.wire import Within, message

# Verifying one takes 0.3 ms: 20 ms of the event loop, and 21 KiB.
RECORDS_PER_MESSAGE_MAX = 64

_Credential = Annotated[bytes, Within(1, CREDENTIAL_BYTES_MAX)]


@message(wire="Known")
class Known:
    """Tell what the sender knows, on a new link: who knows more tells it."""

    number: Annotated[int, Within(0, (1 << 64) - 1)]  # of its revocation list
    digest: Annotated[bytes, Within(32, 32)]  # of its records


@message(wire="Admitted")
class Admitted:
    """Carry credentials of peers that were let in."""

    credentials: Annotated[tuple[_Credential, ...], Within(1, RECORDS_PER_MESSAGE_MAX)]


@message(wire="Revoked")
class Revoked:
    """Carry the newest revocation list that the sender has."""

    signed: Annotated[bytes, Within(1, REVOCATIONS_BYTES_MAX)]


@message(wire="AdmissionFile")
class AdmissionFile:
    """Hold credentials and the revocation list as the home keeps them; never sent."""

    revocations: Annotated[bytes, Within(0, REVOCATIONS_BYTES_MAX)]  # none yet: empty
    credentials: Annotated[tuple[_Credential, ...], Within(0, RECORDS_MAX)]


AboutPasses = Known | Admitted | Revoked
