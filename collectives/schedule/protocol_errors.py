"""Refuse frames that cannot be taken in: what no schedule allows, and the errors of a reduction."""

from __future__ import annotations

from collections.abc import Collection

from atoll.collectives.codecs import Decoder
from atoll.collectives.errors import RemoteProtocolError, RoundTimeoutError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.schedule import Frame, FrameKind


def refused(peer: str, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"peer {peer} sent {what}", fix="run the same version of atoll on all peers"
    )


def check_frame(plan: ReducePlan, me: int, src: int, kind: int, chunk: int) -> None:
    """Raise RemoteProtocolError for what no schedule of this plan lets ``src`` send to ``me``."""
    if not 0 <= src < len(plan.participants) or src == me:
        raise RemoteProtocolError(f"a data frame from {src}, who takes no part in this attempt")
    if not 0 <= chunk < len(plan.owners):
        raise refused(plan.name(src), f"chunk {chunk} of {len(plan.owners)}")
    if kind not in tuple(FrameKind):
        raise refused(plan.name(src), f"a data frame of unknown kind {kind}")
    if plan.owners[chunk] == NOBODY:
        kept = f"chunk {chunk}, which is kept from an earlier attempt"
        raise refused(plan.name(src), kept)


def wrong_length(
    plan: ReducePlan, frame: Frame, length: int, codec: Decoder, expected: int
) -> RemoteProtocolError:
    where = f" at {frame.offset}" if frame.offset else ""
    takes = f"which takes {expected} in {codec.name}"
    return refused(plan.name(frame.src), f"{length} bytes{where} for chunk {frame.chunk}, {takes}")


def twice(plan: ReducePlan, frame: Frame) -> RemoteProtocolError:
    return refused(plan.name(frame.src), f"chunk {frame.chunk} while the same frame arrives")


def held_too_long(
    plan: ReducePlan, src: int, chunk: int, waited_s: float, missing: Collection[int]
) -> RoundTimeoutError:
    """Return the error for a frame that was held for too long.

    ``missing``: the participants that this peer waits for.
    """
    late = ", ".join(plan.name(p) for p in sorted(missing))
    return RoundTimeoutError(
        f"peer {plan.name(src)} has waited {waited_s:.1f} s to send chunk {chunk}, "
        f"because this peer still waits for {late or 'itself'}",
        fix="see `atoll status` for the links to those peers",
        phase="reduce",
        elapsed_s=waited_s,
    )
