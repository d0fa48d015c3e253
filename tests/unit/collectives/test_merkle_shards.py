"""Commitments to encoded chunks: each opens at its own place and nowhere else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.merkle import merkle_root, opening, opens, shard_roots
from atoll.collectives.schedule.plan import NOBODY


def digests_of(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([c])).digest() for c in range(count)]


owners_of_chunks = st.lists(st.integers(NOBODY, 4), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(owners=owners_of_chunks)
def test_every_chunk_opens_at_its_place_alone(owners: list[int]) -> None:
    digests = digests_of(len(owners))
    roots = shard_roots(digests, owners, 5)
    for chunk, owner in enumerate(owners):
        if owner == NOBODY:
            with pytest.raises(LocalProtocolError, match="nobody owns"):
                opening(digests, owners, chunk)
            continue
        proof = opening(digests, owners, chunk)
        for other, its_owner in enumerate(owners):
            root = roots[its_owner]  # of NOBODY it is any
            assert opens(digests[chunk], other, owners, proof, root) == (other == chunk)
        others = [root for participant, root in enumerate(roots) if participant != owner]
        assert not any(opens(digests[chunk], chunk, owners, proof, root) for root in others)


def test_the_leaves_are_an_owners_chunks_in_ascending_order() -> None:
    digests = digests_of(5)
    roots = shard_roots(digests, [1, 0, 1, NOBODY, 1], 3)
    assert roots == [merkle_root(digests[1:2]), merkle_root([digests[c] for c in (0, 2, 4)]), b""]


def test_what_does_not_belong_does_not_open() -> None:
    digests, owners = digests_of(7), [0, 0, 1, 0, 1, 0, NOBODY]
    roots = shard_roots(digests, owners, 2)
    proof = opening(digests, owners, 3)
    assert opens(digests[3], 3, owners, proof, roots[0])
    other = bytes(32)
    for digest, chunk, shown, root in (
        (other, 3, proof, roots[0]),
        (digests[3][:31], 3, proof, roots[0]),
        (digests[3], 5, proof, roots[0]),
        (digests[3], 3, proof[:-1], roots[0]),
        (digests[3], 3, proof + other, roots[0]),
        (digests[3], 3, b"", roots[0]),
        (digests[3], 3, proof, b""),
        (digests[6], 6, b"", roots[0]),
        (digests[3], -1, proof, roots[0]),
        (digests[3], 7, proof, roots[0]),
    ):
        assert not opens(digest, chunk, owners, shown, root)


def test_there_is_a_digest_for_each_owner() -> None:
    with pytest.raises(ValueError, match="zip"):
        shard_roots(digests_of(3), [0, 0, 0, 0], 1)
    for chunk in (-1, 3):
        with pytest.raises(LocalProtocolError, match="nobody owns"):
            opening(digests_of(3), [0, 0, 0], chunk)
