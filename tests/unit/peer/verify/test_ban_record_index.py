"""Whom to ask for evidence, and whose word is remembered."""

from __future__ import annotations

from atoll.peer.verify.ban_record import SAID_MAX, EvidenceIndex

A, B = b"a" * 32, b"b" * 32
X, Y, Z = (bytes([n]) * 32 for n in range(3))


def everything(_: bytes) -> bool:
    return True


def test_each_is_asked_in_its_turn() -> None:
    tellers = EvidenceIndex()
    tellers.hear(A, (X, Y), ())
    tellers.hear(B, (Z,), ())
    assert tellers.next((A, B), everything) == (A, X)
    assert tellers.next((A, B), everything) == (B, Z)
    assert tellers.next((A, B), everything) == (A, X)
    assert tellers.next((A,), lambda digest: digest != X) == (A, Y)
    assert tellers.next((B,), lambda digest: digest != Z) is None
    assert tellers.next((), everything) is None


def test_what_one_has_not_given_is_not_asked_of_it_again() -> None:
    tellers = EvidenceIndex()
    for peer in (A, B):
        tellers.hear(peer, (X,), ())
    tellers.has_not(A, X)
    assert tellers.next((A,), everything) is None
    assert tellers.next((A, B), everything) == (B, X)
    assert tellers.of(X) == [A, B]  # its word counts all the same
    tellers.forget(A)
    assert tellers.of(X) == [B]


def test_a_word_about_a_pair_is_no_belief() -> None:
    tellers = EvidenceIndex()
    tellers.hear(A, (X,), (Y,))
    tellers.hear(B, (), (X,))
    assert tellers.believers((X, Y)) == {A}
    assert tellers.of(X) == [A, B]
    assert tellers.of(Y) == [A]


def test_of_one_peer_so_many_digests_are_remembered_and_the_latest() -> None:
    tellers = EvidenceIndex()
    tellers.hear(B, (X,), ())
    many = [n.to_bytes(32, "big") for n in range(SAID_MAX + 9)]
    tellers.hear(A, many, many)
    assert [A in tellers.of(digest) for digest in many] == [False] * 9 + [True] * SAID_MAX
    assert tellers.of(X) == [B]
