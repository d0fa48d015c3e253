from __future__ import annotations

import hashlib

import pytest

from atoll.collectives.errors import RemoteProtocolError, StateError
from atoll.collectives.merkle import merkle_root
from atoll.peer.membership.view import chain_after
from atoll.peer.net.wire import decode, encode
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, EntryOrigin, entry_chain, entry_root

A, B = b"a" * 32, b"b" * 32
ALONE, BOTH = EntryOrigin((A,), (1.0,)), EntryOrigin((A, B), (1.0, 3.5))
DIGESTS = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
CHAIN = b"c" * 32


def head(**changes: object) -> EntryHead:
    fields: dict[str, object] = {
        "round": 7,
        "kind": STEP,
        "fragment": 2,
        "origins": (BOTH, ALONE),
        "origin_of": b"\0\1\0\1\1",
        "root": entry_root((BOTH, ALONE), b"\0\1\0\1\1", DIGESTS),
        "chain": CHAIN,
    }
    return EntryHead(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_head_survives_the_wire():
    assert decode(encode(head())) == head()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "other"},
        {"kind": INIT, "fragment": 1},
        {"kind": STEP, "blob": b"x"},
        {"origin_of": b"\0\2"},
    ],
)
def test_a_head_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ValueError, match=r".+"):
        head(**changes)


@pytest.mark.parametrize(
    "changes", [{"origins": (), "origin_of": b""}, {"fragment": 64}, {"root": bytes(33)}]
)
def test_extreme_values_are_refused_where_they_arrive(changes):
    with pytest.raises(RemoteProtocolError):
        decode(encode(head(**changes)))


@pytest.mark.parametrize(
    ("participants", "weights"),
    [
        ((), ()),
        ((A,), (1.0, 2.0)),
        ((B, A), (1.0, 1.0)),
        ((A, A), (1.0, 1.0)),
        ((A,), (0.0,)),
        ((A,), (-1.0,)),
        ((A,), (float("nan"),)),
        ((A,), (float("inf"),)),
        ((A,), (2e15,)),
    ],
)
def test_an_origin_names_each_once_with_a_sane_weight(participants, weights):
    with pytest.raises(ValueError, match=r"participants|weight"):
        EntryOrigin(participants, weights)


def test_the_root_is_the_merkle_root_over_origin_and_digest_of_each_chunk():
    which = b"\0\1\0\1\1"
    leaves = [
        hashlib.sha256(b"atoll-r" + (BOTH, ALONE)[o].digest() + d).digest()
        for o, d in zip(which, DIGESTS, strict=True)
    ]
    root = merkle_root(leaves)
    assert entry_root((BOTH, ALONE), which, DIGESTS) == root
    with_blob = hashlib.sha256(hashlib.sha256(b"spec").digest() + root).digest()
    assert entry_root((BOTH, ALONE), which, DIGESTS, b"spec") == with_blob
    assert entry_root((BOTH,), b"", DIGESTS) == entry_root((BOTH,), bytes(5), DIGESTS)


def test_the_root_covers_who_contributed_with_which_weight_to_which_chunk():
    roots = {
        entry_root((BOTH, ALONE), b"\0\1\0\1\1", DIGESTS),
        entry_root((BOTH, ALONE), b"\1\1\0\1\1", DIGESTS),
        entry_root((EntryOrigin((A, B), (1.0, 3.0)), ALONE), b"\0\1\0\1\1", DIGESTS),
        entry_root((ALONE, BOTH), b"\0\1\0\1\1", DIGESTS),
        entry_root((BOTH, ALONE), b"\0\1\0\1\1", DIGESTS[::-1]),
    }
    assert len(roots) == 5


@pytest.mark.parametrize("count", [4, 6])
def test_origins_of_another_number_of_chunks_are_refused(count):
    with pytest.raises(StateError, match=f"{count} origins"):
        entry_root((BOTH,), bytes(count), DIGESTS)


def test_the_chain_covers_round_fragment_and_root():
    one = head()
    assert entry_chain(CHAIN, one) == chain_after(CHAIN, 7, 2, one.root)
    others = [head(round=8), head(fragment=1), head(root=bytes(32))]
    chains = {entry_chain(CHAIN, other) for other in (one, *others)}
    assert len(chains | {entry_chain(b"d" * 32, one)}) == 5


def test_a_share_is_that_of_the_chunks() -> None:
    """Chunks may be kept of an attempt without A, who is in the last one."""
    alone, both = EntryOrigin((B,), (1.0,)), EntryOrigin((A, B), (1.0, 3.0))
    kept = EntryHead(4, STEP, 0, (alone, both), bytes([0]), b"0" * 32, b"0" * 32)
    assert (kept.share_of(A), kept.share_of(B)) == (0.0, 1.0)
    half = EntryHead(4, STEP, 0, (alone, both), bytes([0, 1]), b"0" * 32, b"0" * 32)
    assert (half.share_of(A), half.share_of(B)) == (0.125, 0.875)
    plain = EntryHead(4, STEP, 0, (both,), b"", b"0" * 32, b"0" * 32)
    assert plain.share_of(A) == 0.25
