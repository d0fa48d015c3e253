"""The largest messages: they fit into a frame."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import RemoteProtocolError
from atoll.optim.run_spec import BLOB_BYTES_MAX, PROBATION_MAX
from atoll.peer.membership import messages as ms
from atoll.peer.membership.kept_chunks import DIGEST_BYTES, KEPT_BYTES_MAX, KEPT_MAX
from atoll.peer.membership.layout import WHY_CHARS_MAX, Layout
from atoll.peer.membership.operations import OBJECT_BYTES_MAX, pack_objects
from atoll.peer.membership.view import (
    ABSENT_MAX,
    ADDRESS_BYTES_MAX,
    ANCESTORS_MAX,
    BANNED_MAX,
    MEMBERS_MAX,
    Absent,
    Ballot,
    Banned,
    Member,
    Newcomer,
    View,
)
from atoll.peer.net.wire import (
    ARRAY_ITEMS_MAX,
    CONTROL_FRAME_BYTES_MAX,
    decode,
    encode,
    frame,
)
from atoll.peer.rounds.entries import CHUNKS_MAX, ORIGINS_MAX, ROUNDS_IN_FLIGHT_MAX, EntryOrigin

LINEAGE, CHAIN = b"L" * 32, b"c" * 32
NUMBER_MAX, ROUND_MAX = (1 << 31) - 1, (1 << 62) - 1


def ids(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def largest_view(letter: str) -> View:
    address = letter * (ADDRESS_BYTES_MAX // len(letter.encode()))
    with pytest.raises(ValueError, match="address"):
        Member(b"p" * 32, 1, address=address + letter)
    members = tuple(Member(p, (1 << 63) - 1, address=address) for p in ids(MEMBERS_MAX))
    ancestors = (LINEAGE,) * ANCESTORS_MAX
    strangers = ids(MEMBERS_MAX + ABSENT_MAX)[MEMBERS_MAX:]
    return View(
        LINEAGE,
        NUMBER_MAX,
        members,
        members[0].peer,
        ROUND_MAX,
        CHAIN,
        True,
        ancestors,
        newcomers=tuple(Newcomer(p, PROBATION_MAX) for p in ids(MEMBERS_MAX)),
        absent=tuple(Absent(p, ROUND_MAX) for p in strangers),
        banned=tuple(Banned(p, CHAIN) for p in ids(MEMBERS_MAX + BANNED_MAX)[MEMBERS_MAX:]),
    )


@pytest.mark.parametrize("letter", ["a", "é", "\U0001f600"])
def test_a_full_view_of_the_longest_addresses_fits_into_a_frame(letter: str) -> None:
    view = largest_view(letter)
    ballot = Ballot(ROUND_MAX, b"p" * 32)
    tag = (LINEAGE, NUMBER_MAX)
    runs = (ms.Run(ROUND_MAX, NUMBER_MAX, 63, CHAIN),) * ROUNDS_IN_FLIGHT_MAX
    report = ms.Report(ROUND_MAX, CHAIN, True, runs)
    votes = tuple(ms.Vote(p, (1 << 63) - 1, b"s" * 64) for p in ids(MEMBERS_MAX))
    proof = ms.Proof(*tag, ballot, votes)
    for msg in (
        ms.Install(view),
        ms.Install(view, proof),
        ms.Redirect(view),
        ms.Accept(*tag, ballot, view),
        ms.Promise(*tag, ballot, report, ballot, view),
    ):
        framed = frame(encode(msg))
        assert 0.35 * CONTROL_FRAME_BYTES_MAX < len(framed) < 0.7 * CONTROL_FRAME_BYTES_MAX
        assert decode(framed[4:]) == msg


def test_a_round_of_all_members_fits_into_a_frame() -> None:
    assert MEMBERS_MAX <= ARRAY_ITEMS_MAX
    everyone, tag = tuple(ids(MEMBERS_MAX)), (LINEAGE, NUMBER_MAX)
    blob, weights = b"b" * BLOB_BYTES_MAX, (1e15,) * MEMBERS_MAX
    past = (EntryOrigin(everyone[:256], weights[:256]),) * (ORIGINS_MAX - 1)
    kept = bytes(KEPT_BYTES_MAX)
    shares, order = (CHUNKS_MAX,) * MEMBERS_MAX, tuple(range(MEMBERS_MAX))
    layout = Layout("ring", shares, order, MEMBERS_MAX, "€" * WHY_CHARS_MAX)
    few = Layout("ring", shares[:256], order[:256], MEMBERS_MAX, "€" * WHY_CHARS_MAX)
    first = (*tag, ROUND_MAX, NUMBER_MAX)
    for msg in (
        ms.Begin(*first, ms.STEP, everyone, (1e15,) * MEMBERS_MAX, b"", 63, layout=layout),
        ms.Begin(*first, ms.INIT, everyone, (1e15,) * MEMBERS_MAX, blob),
        ms.Miss(*tag, ROUND_MAX, NUMBER_MAX, everyone),
        ms.CoordinatorBeat(*tag, ROUND_MAX, CHAIN, None, everyone, 1e9),
        ms.Offer(*tag, blob),
        ms.Begin(*first, ms.STEP, everyone[:256], weights[:256], b"", 63, past, kept, few),
        ms.ObjectIs(*tag, bytes(OBJECT_BYTES_MAX)),
        gather_of(everyone, weights),
        ms.Finals(*tag, ROUND_MAX, NUMBER_MAX, bytes(DIGEST_BYTES * KEPT_MAX)),
    ):
        framed = frame(encode(msg))
        assert len(framed) < 0.9 * CONTROL_FRAME_BYTES_MAX
        assert decode(framed[4:]) == msg


def gather_of(everyone: tuple[bytes, ...], weights: tuple[float, ...]) -> ms.Begin:
    """All members' objects, as large as fit together."""
    each = BLOB_BYTES_MAX // len(everyone) - 4
    blob = pack_objects([bytes(each)] * len(everyone))
    assert len(blob) > 0.9 * BLOB_BYTES_MAX
    operation = ms.Operation(ms.GATHER)
    return ms.Begin(
        *(LINEAGE, NUMBER_MAX, ROUND_MAX, NUMBER_MAX, ms.GATHER, everyone, weights, blob),
        operation=operation,
    )


def test_one_member_too_many_is_refused() -> None:
    too_many = tuple(ids(MEMBERS_MAX + 1))
    with pytest.raises(ValueError, match="members"):
        View(LINEAGE, 1, tuple(Member(p, 1) for p in too_many), too_many[0], 0, CHAIN)
    with pytest.raises(RemoteProtocolError, match="peers is 1025"):
        decode(encode(ms.Miss(LINEAGE, 1, 1, 1, too_many)))
