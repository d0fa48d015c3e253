"""Check the bodies of statements, and compute the common draw from them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from atoll.collectives.audit.sketch import SKETCH_WIDTH
from atoll.collectives.robust.gram import packed_sum, unpacked_gram
from atoll.peer.verify.statements import (
    Check,
    Commitment,
    Elimination,
    Replayed,
    Resultant,
    Statement,
    Verdict,
    Withholding,
    body_of,
)
from atoll.peer.verify.terms import AuditTerms, ReductionTerms

_F32: Final = np.dtype("<f4")
_DIGEST_BYTES: Final = 32


def seed_of(terms: AuditTerms, secrets: Mapping[bytes, bytes]) -> bytes:
    """Return the common draw, a SHA-256 of the terms and of all revealed secrets.

    No participant can choose it: all secrets were committed to before any was revealed, and one
    honest secret is enough.
    """
    hashed = hashlib.sha256(b"atoll audit seed 1\0" + terms.digest)
    for peer in sorted(secrets):
        hashed.update(peer + secrets[peer])
    return hashed.digest()


def body_fits(terms: AuditTerms, index: int, statement: Statement) -> str:
    """Return what is wrong with what a participant says in these terms; "" if nothing is.

    ``index``: its place among the participants. RemoteProtocolError if the body cannot be read.
    """
    body, work, counts = body_of(statement), terms.work, terms.counted[index]
    if isinstance(body, Commitment):
        return _commitment_fits(body, terms, counts)
    if isinstance(body, Check):
        return _check_fits(body, work.grid.count if counts else 0)
    if isinstance(body, Resultant):
        return _resultant_fits(body, work, index)
    if isinstance(body, Verdict):
        return _verdict_fits(body, work, index)
    if (
        isinstance(body, Elimination | Withholding | Replayed)
        and body.peer not in terms.participants
    ):
        return "it speaks of somebody who does not take part"
    if isinstance(body, Elimination) and body.peer == terms.participants[index]:
        return "it contradicts itself"
    return ""


def _commitment_fits(body: Commitment, terms: AuditTerms, counts: bool) -> str:
    wanted = len(terms.participants) if counts else 0
    if len(body.roots) != wanted:
        return f"{len(body.roots)} roots, not {wanted}"
    work_bytes = _DIGEST_BYTES if terms.validators and counts else 0
    return "" if len(body.work) == work_bytes else f"a commitment to work of {len(body.work)} bytes"


def _check_fits(body: Check, chunks: int) -> str:
    lengths = (len(body.sketches), len(body.norms))
    if lengths != (4 * SKETCH_WIDTH * chunks, 4 * chunks):
        return f"numbers of {lengths} bytes for {chunks} chunks"
    finite = (np.isfinite(np.frombuffer(d, _F32)).all() for d in (body.sketches, body.norms))
    return "" if all(finite) else "numbers that are not finite"


def _resultant_fits(body: Resultant, work: ReductionTerms, index: int) -> str:
    owned, count = len(work.shards.get(index, ())), len(work.counted)
    if len(body.digests) != _DIGEST_BYTES * owned:
        return f"{len(body.digests)} bytes of digests for {owned} chunks"
    needed = work.rule is not None and work.rule.needs_gram and owned > 0
    if len(body.gram) != (4 * count * (count + 1) * owned if needed else 0):
        return f"inner products of {len(body.gram)} bytes"
    if bool(body.matrix) != needed or len(body.matrix) % (4 * count):
        return f"a matrix of {len(body.matrix)} bytes for {count} parts"
    if not np.isfinite(np.frombuffer(body.matrix, _F32)).all():
        return "a matrix that is not finite"
    try:
        if needed:
            unpacked_gram(shard_gram(work, body), count)
    except ValueError as error:
        return str(error)
    return ""


def _verdict_fits(body: Verdict, work: ReductionTerms, index: int) -> str:
    """Return what is wrong with a verdict; "" if nothing is.

    An owner has the parts of others who count, in the chunks that it owns, and of nobody else: what
    else it names would be no accusation, and would still pass for one.
    """
    if not {*body.senders} <= {*work.counted} - {index}:
        return "it accuses somebody who has no part here"
    if not {*body.chunks} <= {*work.shards.get(index, ())}:
        return "it accuses in a chunk that it does not own"
    return ""


def shard_gram(work: ReductionTerms, owner: Resultant) -> bytes:
    """Return the packed inner products over an owner's shard: the sum of those over its chunks.

    They are what the owner has told before the rule, if they are those that it has signed; b""
    where the rule needs none. ValueError for no such numbers.
    """
    return packed_sum(owner.gram, len(work.counted)) if owner.gram else b""


def told_numbers(work: ReductionTerms, check: Check, chunk: int) -> bytes:
    """Return sketch and norm of a chunk, float32[9] as bytes, as a participant has said them."""
    width = 4 * SKETCH_WIDTH
    return (
        check.sketches[width * chunk : width * (chunk + 1)]
        + check.norms[4 * chunk : 4 * (chunk + 1)]
    )
