"""Load the optional packages, verification and authority, when a run turns out to need them.

Most runs have no audits and no authority, and their daemons never import peer/verify or
peer/authority. What may show that it is needed after all, at any time: a state whose specification
says ``audit``; a view that names bans, or evidence in the home; and a message, from anybody. So the
messages of both packages are known here by name. Whoever gets one loads the module that defines it
(net/wire.py), and answers as if that had always been there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import RunSpec
from atoll.peer.daemon.ports import AdmissionPort, AuditPort, BanPort
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.membership.signing import Signer
from atoll.peer.membership.view import Banned
from atoll.peer.net.admission_policy import AdmissionPolicy, PeersMet
from atoll.peer.net.hello import Hello
from atoll.peer.net.identity import Home
from atoll.peer.net.wire import defined_in
from atoll.peer.rounds.verifier import AuditedRun, StepValidation, VerifiedAttempt

if TYPE_CHECKING:
    from atoll.peer.verify.ban_list import BanList
    from atoll.peer.verify.evidence import Evidence
    from atoll.peer.verify.manager import AuditManager
    from atoll.peer.verify.terms import AuditTerms

# Which messages, by their names on the wire, each component takes ...
ABOUT_PASSES: Final = frozenset({"Known", "Admitted", "Revoked"})
ABOUT_BANS: Final = frozenset({"KnownBans", "AskEvidence", "EvidencePiece"})
ABOUT_AUDITS: Final = frozenset({"Said", "AskSaid", "AskPart", "Piece"})
# ... and which module defines them, and those that are only parts of others or kept in files.
MODULES: Final[dict[str, Collection[str]]] = {
    "atoll.peer.authority.ledger": {*ABOUT_PASSES, "AdmissionFile"},
    "atoll.peer.verify.ban_list": ABOUT_BANS,
    "atoll.peer.verify.statement": {
        *ABOUT_AUDITS,
        "Statement",
        "Commitment",
        "Resultant",
        "Reveal",
        "Check",
        "Verdict",
        "Withholding",
        "Elimination",
        "Replayed",
    },
    "atoll.peer.verify.evidence": {"Shown", "Evidence"},
    "atoll.peer.verify.terms": {"AuditTerms"},
}
for _module, _names in MODULES.items():
    defined_in(_module, _names)


class LazyVerifier:
    """Verify attempts (AttemptVerifier), from when there is something to verify."""

    def __init__(self, me: bytes, signer: Signer, daemon: AuditPort) -> None:
        self._me, self._signer, self._daemon = me, signer, daemon
        self._loaded: AuditManager | None = None

    @property
    def _manager(self) -> AuditManager:
        if self._loaded is None:
            from atoll.peer.verify.manager import AuditManager

            self._loaded = AuditManager(self._me, self._signer, self._daemon)
        return self._loaded

    @staticmethod
    def preload() -> None:
        """Import what audits need: tens of milliseconds, so not in the event loop."""
        import_module("atoll.peer.verify.manager")

    @property
    def progress(self) -> int:
        return self._loaded.progress if self._loaded is not None else 0

    @property
    def validation(self) -> StepValidation:
        return self._manager.validation

    def terms_of(self, begin: Begin, spec: RunSpec, grid: ChunkGrid) -> AuditTerms | None:
        if not spec.audit or begin.kind != STEP:
            return None
        from atoll.peer.verify.terms import terms_of

        return terms_of(begin, spec, grid)

    async def begin(
        self, run: AuditedRun, terms: AuditTerms, source: Callable[[int, F32], None], steps: bytes
    ) -> None:
        await self._manager.begin(run, terms, source, steps)

    def committed(
        self, attempt: VerifiedAttempt, spec: RunSpec, manifest: Manifest, theta: F32
    ) -> None:
        self._manager.committed(attempt, spec, manifest, theta)

    def on_message(self, peer: bytes, message: Any) -> None:
        """Take a message about an audited attempt, or one that is to come."""
        self._manager.on_message(peer, message)

    def banned(self, peers: Collection[bytes]) -> None:
        if self._loaded is not None:
            self._loaded.banned(peers)

    def link_lost(self, peer: bytes) -> None:
        if self._loaded is not None:
            self._loaded.link_lost(peer)

    def took_part(self, terms: bytes) -> bool:
        return self._loaded is not None and self._loaded.took_part(terms)

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()


class AdmissionChain(AdmissionPolicy):
    """Keep banned peers outside, whatever they can show; of others ask whoever judges passes.

    ``folder``: where the home keeps evidence.
    """

    def __init__(self, passes: AdmissionPolicy, me: bytes, folder: Path, daemon: BanPort) -> None:
        self.passes = passes
        self.credential, self.role = passes.credential, passes.role
        self._me, self._folder, self._daemon = me, folder, daemon
        self._met = PeersMet()
        self._loaded: BanList | None = None
        if any(folder.glob("*.evidence")):
            self._load()

    @property
    def _ban_list(self) -> BanList:
        return self._loaded or self._load()

    def _load(self) -> BanList:
        from atoll.peer.verify.ban_list import BanList

        self._loaded = BanList(self._me, self._folder, self._daemon, self._met)
        return self._loaded

    # ------------------------------------------------------------ bans and passes

    def admit(self, peer: bytes, theirs: Hello, *, called: bool) -> None:
        if self._loaded is not None:
            self._loaded.check(peer)
        self.passes.admit(peer, theirs, called=called)

    def check_address(self, ip: str, others: Sequence[str]) -> None:
        self.passes.check_address(ip, others)

    def linked(self, peer: bytes) -> None:
        self.passes.linked(peer)
        if self._loaded is not None:
            self._loaded.linked(peer)

    def unlinked(self, peer: bytes) -> None:
        self.passes.unlinked(peer)
        if self._loaded is not None:
            self._loaded.unlinked(peer)

    def check_message(self, peer: bytes, message: object) -> bool:
        return self.passes.check_message(peer, message)

    def on_message(self, peer: bytes, message: Any) -> None:
        self.passes.on_message(peer, message)

    def is_out(self, peer: bytes) -> bool:
        banned = self._loaded is not None and self._loaded.is_out(peer)
        return banned or self.passes.is_out(peer)

    def revoke(self, data: bytes) -> str:
        return self.passes.revoke(data)

    def status(self) -> dict[str, Any]:
        banned = self._loaded.bans.rows() if self._loaded is not None else []
        return {**self.passes.status(), "banned": banned}

    # ------------------------------------------------------------ bans

    def on_ban_message(self, peer: bytes, message: Any) -> None:
        """Take a message about bans and their evidence."""
        self._ban_list.on_message(peer, message)

    def installed(self, members: Collection[bytes], banned: Collection[Banned]) -> None:
        """Take the members of a view that was installed, and the bans that it names."""
        if self._loaded is None and not banned:
            self._met.add(members)
        else:
            self._ban_list.installed(members, banned)

    def convict(self, evidence: Evidence) -> None:
        """Take evidence that this peer has found itself."""
        self._ban_list.convict(evidence)


def authority_admission(
    home: Home,
    run: str,
    authority: bytes,
    credential: bytes,
    role: str,
    *,
    founds: bool,
    daemon: AdmissionPort,
    per_address: Callable[[], int | None],
) -> AdmissionPolicy:
    """Return who judges the passes of a run with an authority, whose public key is given.

    Raises AdmissionError if this peer's own pass is no good.
    """
    from atoll.peer.authority.ledger import Ledger
    from atoll.peer.authority.policy import AuthorityAdmission

    ledger = Ledger(authority, run)
    return AuthorityAdmission(
        home, ledger, credential, role, founds=founds, daemon=daemon, per_address=per_address
    )
