"""Whom reports of broken edges leave out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.membership.attempt import vertex_cover

A, B, C, D, E = (name.encode() * 32 for name in "abcde")
EVERYONE = (A, B, C, D, E)


@pytest.mark.parametrize(
    ("misses", "cover"),
    [
        ({}, set()),
        ({B: (C,)}, {C}),  # a tie: the larger id
        ({C: (B,)}, {C}),
        ({A: (B,)}, {B}),  # never the coordinator first
        ({B: (A,)}, {B}),
        ({B: (C,), D: (C,)}, {C}),  # the one that all name
        ({C: (B, D, E)}, {C}),  # the one that names all
        ({B: (B,)}, {B}),  # cannot contribute at all
        ({A: (A,)}, {A}),  # not even the coordinator
        ({B: (B,), C: (B,)}, {B}),
        ({B: (C,), D: (E,)}, {C, E}),
    ],
)
def test_vertex_cover(misses: dict[bytes, tuple[bytes, ...]], cover: set[bytes]) -> None:
    assert vertex_cover(misses, A) == cover


@given(
    st.dictionaries(
        st.sampled_from(EVERYONE), st.lists(st.sampled_from(EVERYONE), max_size=4).map(tuple)
    ),
    st.sets(st.sampled_from(EVERYONE)),
)
def test_every_reported_edge_is_covered(
    misses: dict[bytes, tuple[bytes, ...]], newcomers: set[bytes]
) -> None:
    cover = vertex_cover(misses, A, newcomers)
    for reporter, missing in misses.items():
        for peer in missing:
            assert reporter in cover or peer in cover
    if A in cover:  # only if it reported itself
        assert A in misses.get(A, ())
