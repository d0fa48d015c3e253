"""State what rounds ask of whoever verifies their attempts, and what that asks of an attempt.

peer/verify implements it. Nothing here imports that package: a daemon whose run is not audited
never loads it (peer/daemon/optional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8
from atoll.collectives.robust.gram import InnerProducts
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import RunSpec
from atoll.peer.membership.messages import Begin

if TYPE_CHECKING:
    from atoll.peer.verify.terms import AuditTerms


class AttemptVerifier(Protocol):
    """Verify the attempts of audited rounds. Lives in the event loop."""

    @property
    def progress(self) -> int:
        """Return a number that grows while it has a reason to take time, for stall detectors."""

    @property
    def validation(self) -> StepValidation:
        """Return what the own trainer does in the validation of local steps."""

    def terms_of(self, begin: Begin, spec: RunSpec, grid: ChunkGrid, /) -> AuditTerms | None:
        """Return the terms of an attempt, or None if it is not audited.

        ConfigError where it cannot be audited. Safe in any thread.
        """

    async def begin(
        self,
        run: AuditedRun,
        terms: AuditTerms,
        source: Callable[[int, F32], None],
        steps: bytes,
        /,
    ) -> None:
        """Commit to all parts and to the local ``steps``; send the parts once all others have too.

        ``source`` fills in the own part of a chunk. The attempt fails here if this peer has
        promised something in it before, if its trainer has committed to no local steps where
        validators need them, or if its contribution cannot be encoded.
        """

    def committed(
        self, attempt: VerifiedAttempt, spec: RunSpec, manifest: Manifest, theta: F32, /
    ) -> None:
        """Hear that an attempt is in the run; ``theta``: the run's parameters before it."""


class VerifiedAttempt(Protocol):
    """Verify one attempt."""

    def reduced(
        self, results: Sequence[U8], digests: Sequence[bytes], products: InnerProducts, /
    ) -> None:
        """Take the whole result, with the inner products that it was made with."""

    def end(self) -> None:
        """End with the attempt, which is committed or given up."""


class AuditedRun(Protocol):
    """Carry out the attempt that is verified: after ``send_parts`` it passes or fails, once."""

    audit: VerifiedAttempt | None

    def is_wanted(self) -> bool:
        """Return whether the attempt is still to be carried out."""

    def send_parts(self, parts: AuditedParts, /) -> None:
        """Start the reduction: everybody has committed to its parts."""

    def passed(self) -> None:
        """Hear that the result may be committed."""

    def failed(self, peers: tuple[bytes, ...], why: str, /) -> None:
        """Hear that the attempt has failed because of these peers; of none if nobody can say."""


class AuditedParts(Protocol):
    """Give and take the encoded parts of an audited reduction; in any thread."""

    def own_part(self, chunk: int, /) -> U8:
        """Return the own part of a chunk, as it was committed to."""

    def keep(self, sender: int, chunk: int, part: U8, /) -> None:
        """Keep a part of a chunk that this peer owns."""

    def came(self, chunk: int, result: U8, /) -> None:
        """Take a chunk of the result."""


class StepValidation(Protocol):
    """Give the own trainer its tasks in validation, and take what comes of them."""

    def tasks(self) -> list[dict[str, Any]]:
        """Return what the trainer has to do, in plain types."""

    def shown(self, terms: bytes, /) -> None:
        """Note that the trainer has shown its own steps in the attempt with these terms."""

    def judged(self, terms: bytes, target: bytes, judgement: int | None, why: str, /) -> None:
        """Take a judgement of the steps of another."""

    def fits(self, terms: bytes, target: bytes, flat: F32, /, *, start: bool) -> bool:
        """Return whether parameters begin, or end, where they should. Safe in any thread."""
