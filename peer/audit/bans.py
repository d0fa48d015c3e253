"""Who is banned from the run, and by which evidence, as one member knows it. Sans-I/O.

Evidence that stands alone convinces everybody who checks it. The word of a majority, or of one half
of a pair, convinces only those who know that these peers were members: whoever took part in the
attempt, and whoever hears the same from more than half of the members of its view. Nothing is ever
taken back: a peer that was banned by mistake comes back with another identity.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from atoll.peer.audit.evidence import Evidence, Finding
from atoll.peer.audit.verifying import verify_evidence
from atoll.peer.group.views import short

__all__ = ["BANS_MAX", "Ban", "Bans"]

# Peers that can be banned; what is known of more is not kept. Four times the most of one view.
BANS_MAX: Final = 4096
UNSURE_MAX: Final = 64  # pieces of evidence that wait for more members to say the same


@dataclass(frozen=True, slots=True)
class Ban:
    peer: bytes
    evidence: Evidence
    finding: Finding


class Bans:
    def __init__(self, me: bytes) -> None:
        self._me = me
        self._by_peer: dict[bytes, Ban] = {}
        self._by_digest: dict[bytes, Evidence] = {}
        self._unsure: dict[bytes, tuple[Evidence, Finding, set[bytes]]] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._by_peer

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def all(self) -> list[Ban]:
        return list(self._by_peer.values())

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of all evidence that counts here."""
        return tuple(self._by_digest)

    def of(self, peer: bytes) -> Ban | None:
        return self._by_peer.get(peer)

    def evidence(self, digest: bytes) -> Evidence | None:
        return self._by_digest.get(digest)

    def knows(self, digest: bytes) -> bool:
        """Whether the evidence is here, whatever it counts."""
        return digest in self._by_digest or digest in self._unsure

    def learn(self, evidence: Evidence, *, first_hand: bool = False) -> list[Ban]:
        """Who is banned by it, and was not before. ``first_hand``: we took part in that attempt.
        EvidenceError if it proves nothing."""
        finding = verify_evidence(evidence)
        digest = evidence.digest
        if finding.stands_alone or first_hand:
            return self._adopt(digest, evidence, finding)
        if digest not in self._unsure and len(self._unsure) < UNSURE_MAX:
            self._unsure[digest] = (evidence, finding, set())
        return []

    def told(self, digest: bytes, member: bytes, members: Collection[bytes]) -> list[Ban]:
        """A member says that this evidence counts for it; ``members``: those of our view."""
        if digest not in self._unsure or member not in members or member in self._by_peer:
            return []
        evidence, finding, tellers = self._unsure[digest]
        tellers.add(member)
        voices = {teller for teller in tellers if teller in members} - {*finding.banned}
        if 2 * len(voices) <= len(members):
            return []
        del self._unsure[digest]
        return self._adopt(digest, evidence, finding)

    def _adopt(self, digest: bytes, evidence: Evidence, finding: Finding) -> list[Ban]:
        self._unsure.pop(digest, None)
        new = [peer for peer in finding.banned if peer not in self._by_peer]
        if not new or len(self._by_peer) + len(new) > BANS_MAX:
            return []
        self._by_digest[digest] = evidence
        bans = [Ban(peer, evidence, finding) for peer in new]
        self._by_peer |= {ban.peer: ban for ban in bans}
        return bans

    def rows(self) -> list[dict[str, object]]:
        """For `atoll status`: plain types."""
        return [
            {
                "peer": short(ban.peer),
                "id": ban.peer.hex(),
                "kind": ban.finding.kind,
                "round": ban.evidence.terms.round,
                "text": ban.finding.text,
                "evidence": ban.evidence.digest.hex(),
            }
            for ban in self._by_peer.values()
        ]
