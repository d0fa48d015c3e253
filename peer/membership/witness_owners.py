"""Let a witness own the parts of a round, where no participant has a way to all others.

Theory. An owner only decodes what comes, adds up, encodes and hands out; it needs no parameters and
no trainer. So where everybody who trains can only dial out, a witness that can be dialled owns all:
n vectors come to it and n go, and nobody relays anything. A relay would carry n - 1 vectors for
each of n peers, both in and out: as much for two, more for three. It is no participant: it weighs
nothing, holds no result, and votes for one when others have it, as every witness does (attempt.py).

What it lacks is the run's specification, so BEGIN says what is reduced (``Owners``), and whoever
coordinates knows that from the heartbeats of those who have it (``Terms.work``).

Such a witness has to be trusted as every owner has to be: it could send what it likes. Where a run
does not trust owners it owns nothing (``Terms.no_witness_owns``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.collectives.chunks import CHUNK_ELEMENTS_MAX
from atoll.collectives.robust.rule import RULE_CHARACTERS_MAX
from atoll.optim.manifest import ELEMENTS_MAX, FRAGMENTS_MAX
from atoll.peer.membership.layout import WHY_CHARS_MAX
from atoll.peer.membership.view import MEMBERS_MAX, Lives, PeerId
from atoll.peer.net.wire import Within, message

# From so many on a witness that owns moves fewer bytes than a relay does.
CHEAPER_FROM = 3

Elements = Annotated[int, Within(0, ELEMENTS_MAX)]
ChunkElements = Annotated[int, Within(0, CHUNK_ELEMENTS_MAX)]
CodecName = Annotated[str, Within(0, RULE_CHARACTERS_MAX)]


@message(wire="Work")
@dataclass(frozen=True, slots=True)
class Work:
    """Say what the steps of a run reduce.

    ``elements``: of each fragment, cut into chunks of ``chunk_elements``, whose parts are
    encoded with ``codec``. There is none where parts are not just averaged.
    """

    elements: Annotated[tuple[Elements, ...], Within(1, FRAGMENTS_MAX)]
    chunk_elements: ChunkElements
    codec: CodecName


@message(wire="Owners")
@dataclass(frozen=True, slots=True)
class Owners:
    """Name the witnesses that own all parts of an attempt, and the processes that do (``lives``).

    ``elements``, ``chunk_elements`` and ``codec``: of a step, see Work. ``why``: for people.
    """

    peers: Annotated[tuple[PeerId, ...], Within(1, MEMBERS_MAX)]
    lives: Annotated[tuple[Lives, ...], Within(1, MEMBERS_MAX)]
    elements: Elements = 0
    chunk_elements: ChunkElements = 0
    codec: CodecName = ""
    why: Annotated[str, Within(0, 4 * WHY_CHARS_MAX)] = ""

    def __post_init__(self) -> None:
        if list(self.peers) != sorted(set(self.peers)) or len(self.lives) != len(self.peers):
            raise ValueError("owners are named once each, in order, each with its life")
