from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.merkle import (
    MerkleTree,
    merkle_climb,
    merkle_proof,
    merkle_root,
    merkle_verify,
)


def leaves_of(count: int) -> list[bytes]:
    return [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(count)]


def rfc6962(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1: the left part is the largest power of two below the count."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + rfc6962(leaves[:left]) + rfc6962(leaves[left:])).digest()


@pytest.mark.parametrize("count", [*range(1, 20), 63, 64, 65, 1000])
def test_the_root_is_that_of_rfc_6962(count):
    leaves = leaves_of(count)
    assert merkle_root(leaves) == rfc6962(leaves) == MerkleTree(leaves).root


@pytest.mark.parametrize("count", [*range(1, 34), 255, 256, 257])
def test_every_leaf_has_a_proof_and_only_for_its_place(count):
    leaves = leaves_of(count)
    tree = MerkleTree(leaves)
    for i, leaf in enumerate(leaves):
        proof = tree.proof(i)
        assert merkle_verify(leaf, i, count, proof, tree.root)
        assert merkle_climb(leaf, i, count, proof) == tree.root
        for other in {(i + 1) % count, i ^ 1} - {i}:
            assert not merkle_verify(leaf, other, count, proof, tree.root)
    assert tree.proof(count // 2) == merkle_proof(leaves, count // 2)


@given(st.integers(1, 40), st.data())
def test_a_changed_leaf_proof_or_root_is_refused(count, data):
    leaves = leaves_of(count)
    tree = MerkleTree(leaves)
    i = data.draw(st.integers(0, count - 1))
    parts = [bytearray(leaves[i]), bytearray(tree.proof(i)), bytearray(tree.root)]
    part = data.draw(st.sampled_from([part for part in parts if part]))
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    leaf, proof, root = map(bytes, parts)
    assert not merkle_verify(leaf, i, count, proof, root)


@given(st.integers(1, 40), st.data())
def test_a_proof_of_another_length_leads_nowhere(count, data):
    tree = MerkleTree(leaves_of(count))
    i = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(0, 250))
    proof = (tree.proof(i) + bytes(250))[:length]
    found = merkle_climb(tree.leaves[i], i, count, proof)
    assert found == (tree.root if length == len(tree.proof(i)) else None)


def test_a_node_does_not_pass_for_a_leaf():
    leaves = leaves_of(4)
    inner = hashlib.sha256(b"\0" + leaves[0]).digest() + hashlib.sha256(b"\0" + leaves[1]).digest()
    assert merkle_root([inner, *leaves[2:]]) != merkle_root(leaves)
    tree = MerkleTree(leaves)
    assert not merkle_verify(inner, 0, 2, tree.proof(0)[32:], tree.root)


@pytest.mark.parametrize("index", [-1, 3])
def test_there_is_no_such_leaf(index):
    tree = MerkleTree(leaves_of(3))
    assert not merkle_verify(tree.leaves[0], index, 3, tree.proof(0), tree.root)
    with pytest.raises(IndexError):
        tree.proof(index)
