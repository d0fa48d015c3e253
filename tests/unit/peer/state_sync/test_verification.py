"""What counts as known: folded heads, agreed digests, parts that lead to a root."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from harness.donors import History, sha
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.state_sync.verification import (
    DISSENT_S,
    RUN_MAX,
    Attestation,
    Heads,
    fold,
    open_parts,
    part_head,
    state_of,
)

LEAD, ONE, TWO, THREE = (bytes([n]) * 32 for n in range(1, 5))
GOOD, BAD, LATER = sha(b"good"), sha(b"bad"), sha(b"later")


def history_of(rounds: int) -> History:
    history = History(5)
    while history.last < rounds:
        history.commit()
    return history


def agreed(named: dict[bytes, bytes], members: set[bytes], lead: bytes = LEAD) -> bytes:
    attestation = Attestation()
    for peer, digest in named.items():
        attestation.record(peer, 7, digest)
    attestation.recount(
        lead, dict.fromkeys(members, 6), 0.0
    )  # who has not named it may still do so
    return attestation.agreed.get(7, b"")


def test_the_coordinator_and_two_others_decide() -> None:
    four = {LEAD, ONE, TWO, THREE}
    assert agreed({LEAD: GOOD, ONE: GOOD, TWO: GOOD, THREE: BAD}, four) == GOOD
    assert agreed({LEAD: GOOD, ONE: GOOD, TWO: BAD, THREE: BAD}, four) == b""
    assert agreed({ONE: GOOD, TWO: GOOD, THREE: GOOD}, four) == b"", "not without the coordinator"
    assert agreed({LEAD: BAD, ONE: GOOD, TWO: GOOD, THREE: GOOD}, four) == b""


def test_with_fewer_members_all_must_agree() -> None:
    assert agreed({LEAD: GOOD}, {LEAD}) == GOOD
    assert agreed({LEAD: GOOD}, {LEAD, ONE}) == b""
    assert agreed({LEAD: GOOD, ONE: GOOD}, {LEAD, ONE}) == GOOD


def test_who_has_gone_past_a_round_without_its_digest_is_not_waited_for() -> None:
    attestation = Attestation()
    for peer in (LEAD, ONE):
        attestation.record(peer, 7, GOOD)
    attestation.recount(LEAD, {LEAD: 9, ONE: 9, TWO: 9, THREE: 6}, 0.0)
    assert not attestation.agreed  # THREE will know it
    attestation.recount(LEAD, {LEAD: 9, ONE: 9, TWO: 9, THREE: 9}, 0.0)
    assert attestation.agreed == {7: GOOD}  # these two have joined since


def test_strangers_and_zeros_do_not_count() -> None:
    assert agreed({LEAD: GOOD, ONE: GOOD, THREE: GOOD}, {LEAD, ONE, TWO}) == b""
    assert agreed({LEAD: bytes(32)}, {LEAD}) == b""


def test_without_a_coordinator_that_holds_the_state_three_are_enough() -> None:
    three = {ONE, TWO, THREE}
    assert agreed({ONE: GOOD, TWO: GOOD, THREE: GOOD}, three, lead=b"") == GOOD
    assert agreed({ONE: GOOD, TWO: GOOD, THREE: BAD}, three, lead=b"") == b""
    assert agreed({}, set(), lead=b"") == b""


def test_who_dissents_is_named_and_what_is_taken_back_is_forgotten() -> None:
    attestation = Attestation()
    four = dict.fromkeys((LEAD, ONE, TWO, THREE), 5)
    for peer, digest in ((LEAD, GOOD), (ONE, GOOD), (TWO, GOOD), (THREE, BAD)):
        attestation.record(peer, 6, LATER + digest)
    assert attestation.recount(LEAD, four, 0.0)
    assert not attestation.recount(LEAD, four, 0.0)
    assert attestation.dissenters() == {THREE: 7}
    assert BAD.hex()[:8] in attestation.describe(7)
    attestation.forget(ONE)
    attestation.forget(TWO)
    assert attestation.recount(LEAD, four, 0.0)
    assert attestation.agreed == {}


def test_a_single_dissenter_is_outvoted_after_a_while_also_when_rounds_go_on() -> None:
    attestation = Attestation()
    three = dict.fromkeys((LEAD, ONE, TWO), 5)
    for number in (7, 8):  # the second one takes the place of the first, one answer at a time
        for peer, digest in ((LEAD, GOOD), (ONE, GOOD), (TWO, BAD)):
            attestation.forget(peer)
            attestation.record(peer, number, digest)
            assert not attestation.recount(LEAD, three, (number - 6) * DISSENT_S / 2)
    assert not attestation.recount(LEAD, three, 1.4 * DISSENT_S)
    assert attestation.recount(LEAD, three, 1.6 * DISSENT_S)
    assert attestation.agreed == {8: GOOD}
    assert attestation.dissenters() == {TWO: 8}


def test_one_against_one_and_two_against_two_are_never_settled() -> None:
    for good, bad in (((LEAD,), (ONE,)), ((LEAD, THREE), (ONE, TWO))):
        attestation = Attestation()
        for peer in (*good, *bad):
            attestation.record(peer, 7, GOOD if peer in good else BAD)
        for now_s in (0.0, 10 * DISSENT_S, 20 * DISSENT_S):
            assert not attestation.recount(LEAD, dict.fromkeys((*good, *bad), 5), now_s)


def test_heads_fold_to_the_chain_and_to_nothing_else() -> None:
    history = history_of(6)
    heads = history.heads[3:7]
    assert fold(history.chain(2), 3, heads) == history.chain(6)
    assert fold(history.chain(1), 3, heads) == b""
    assert fold(history.chain(2), 4, heads) == b""
    assert fold(history.chain(2), 3, [heads[0], heads[2]]) == b""
    assert fold(history.chain(2), 3, [replace(heads[0], root=sha(b"x")), *heads[1:]]) == b""


def test_heads_know_their_history() -> None:
    history = history_of(6)
    other = history.fork_at(4, b"other")
    other.commit()
    mine = Heads(history.chain(2), 3, history.heads[3:6])
    assert [mine.chain_after(n) for n in (1, 2, 5, 6)] == [
        b"",
        history.chain(2),
        history.chain(5),
        b"",
    ]
    assert [head.round for head in mine.between(3, 9)] == [4, 5]
    assert mine.contradicts(Heads(other.chain(3), 4, other.heads[4:6]))
    assert not mine.contradicts(Heads(other.chain(3), 4, other.heads[4:5]))
    assert not mine.contradicts(Heads(history.chain(7 - 1), 7, []))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_part_or_a_protocol_error(payload: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parts = open_parts(memoryview(payload))
        assert parts
        heads = [part_head(part.proof, len(part.data), same=part.same) for part in parts]
        data = [bytes(part.data) for part in parts]
        assert b"".join(h + d for h, d in zip(heads, data, strict=True)) == payload
        assert [part.data_digest for part in parts] == [strong_digest(d) for d in data]


def test_a_run_of_parts_is_bounded() -> None:
    one = part_head(bytes(32), 3, same=False) + b"abc"
    assert [bytes(part.data) for part in open_parts(memoryview(one * RUN_MAX))] == [
        b"abc"
    ] * RUN_MAX
    with pytest.raises(RemoteProtocolError):
        open_parts(memoryview(one * (RUN_MAX + 1)))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0",
        b"\2\0\0\0\0\0",
        b"\0\x15\0\0\0\0" + bytes(21 * 32),
        b"\1\0\4\0\0\0more",
        b"\0\0\5\0\0\0more",
        b"\0\0\4\0\0\0more" + b"\0",
    ],
)
def test_malformed_parts_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        open_parts(memoryview(payload))


def test_a_chunk_leads_to_the_state_that_it_is_of() -> None:
    history = history_of(3)
    tree = history.trees[3]
    blob_digest = sha(history.blob)
    for chunk in range(5):
        found = state_of(tree.leaves[chunk], chunk, 5, tree.proof(chunk), blob_digest)
        assert found == history.digest(3)
    assert state_of(tree.leaves[0], 1, 5, tree.proof(1), blob_digest) != history.digest(3)
    assert state_of(tree.leaves[0], 0, 5, tree.proof(0)[:-32], blob_digest) == b""
