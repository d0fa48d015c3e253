"""Who is banned as far as one member knows: evidence that stands alone, and the word of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.convicts import LIES, left_behind

from atoll.collectives.errors import EvidenceError
from atoll.peer.daemon.status import describe_bans
from atoll.peer.membership.view import short
from atoll.peer.verify import ban_record as module
from atoll.peer.verify.ban_record import Bans
from atoll.peer.verify.evidence import verify_evidence

ME = b"m" * 32
MEMBERS = [ME, *(bytes([n]) * 32 for n in range(1, 5))]
WEAK = ["withholding", "wrong part", "other steps", "false replay"]


@pytest.mark.parametrize("lie", sorted(set(LIES) - set(WEAK)))
def test_what_stands_alone_is_believed_at_once(lie: str) -> None:
    bans, evidence = Bans(ME), left_behind(lie)
    (ban,) = bans.learn(evidence)
    assert ban.peer == evidence.culprit
    assert ban.peer in bans
    assert bans.digests == (evidence.digest,)
    assert bans.learn(evidence) == []  # once is enough


def test_the_word_of_a_majority_counts_for_who_took_part() -> None:
    bans, evidence = Bans(ME), left_behind("withholding")
    assert len(bans.learn(evidence, first_hand=True)) == 1


def test_of_a_pair_those_who_took_part_have_to_agree() -> None:
    evidence = left_behind("wrong part")
    pair = {evidence.culprit, evidence.said[0].signer}
    me, *others = (peer for peer in evidence.terms.participants if peer not in pair)
    bans = Bans(me)
    assert bans.learn(evidence, first_hand=True) == []
    assert bans.say(evidence.digest)
    assert not bans.say(evidence.digest)
    assert bans.told(evidence.digest, me, []) == []
    for stranger in (*pair, b"s" * 32):
        assert bans.told(evidence.digest, stranger, []) == []
    assert {ban.peer for ban in bans.told(evidence.digest, others[0], [])} == pair


@pytest.mark.parametrize("lie", sorted(LIES))
def test_another_life_believes_what_an_earlier_one_did(lie: str) -> None:
    """Of a pair too, although nobody says so again."""
    bans, evidence = Bans(ME), left_behind(lie)
    found = {ban.peer for ban in bans.recall(evidence)}
    assert found >= {evidence.culprit}
    assert all(peer in bans for peer in found)
    assert len(found) == (2 if lie == "wrong part" else 1)
    assert bans.digests == (evidence.digest,)  # and tells others
    assert bans.recall(evidence) == []


@pytest.mark.parametrize("lie", WEAK)
def test_for_others_it_takes_more_than_half_of_the_view(lie: str) -> None:
    bans, evidence = Bans(ME), left_behind(lie)
    assert bans.learn(evidence) == []
    assert len(bans) == 0
    assert bans.knows(evidence.digest)
    assert bans.told(evidence.digest, b"s" * 32, MEMBERS) == []  # a stranger
    for member in MEMBERS[1:3]:
        assert bans.told(evidence.digest, member, MEMBERS) == []
        assert bans.told(evidence.digest, member, MEMBERS) == []  # twice is once
    assert bans.told(evidence.digest, MEMBERS[3], MEMBERS)
    assert evidence.culprit in bans


def test_a_majority_may_be_shown_by_several_files() -> None:
    """Each member put together its own: with other signatures, or in another order."""
    one = left_behind("withholding")
    files = [
        replace(one, said=said) for said in (one.said[::-1], one.said, one.said[1:] + one.said[:1])
    ]
    assert len({file.digest for file in files}) == 3
    bans = Bans(ME)
    for file in files:
        assert bans.learn(file) == []
    assert bans.told(files[0].digest, MEMBERS[1], MEMBERS) == []
    assert bans.told(files[0].digest, b"s" * 32, MEMBERS) == []
    assert bans.told(files[1].digest, MEMBERS[1], MEMBERS) == []  # the same one again
    assert bans.told(files[1].digest, MEMBERS[2], MEMBERS) == []
    (ban,) = bans.told(files[1].digest, MEMBERS[3], MEMBERS)
    assert ban.peer == one.culprit
    assert bans.digests == (files[1].digest,)  # which most of them hold
    assert all(bans.knows(file.digest) for file in files)  # and nobody is asked for them again
    assert bans.learn(files[0]) == []
    assert bans.told(files[0].digest, MEMBERS[3], MEMBERS) == []


def test_nobody_is_heard_in_its_own_cause() -> None:
    bans, evidence = Bans(ME), left_behind("wrong part")
    pair = {evidence.culprit, evidence.said[0].signer}
    members = [ME, *pair, b"x" * 32]
    bans.learn(evidence)
    for member in pair:
        assert bans.told(evidence.digest, member, members) == []
    assert bans.told(evidence.digest, b"x" * 32, members) == []


def test_what_proves_nothing_bans_nobody() -> None:
    bans, evidence = Bans(ME), left_behind("draw abort")
    with pytest.raises(EvidenceError):
        bans.learn(replace(evidence, said=evidence.said[:1]), first_hand=True)
    assert len(bans) == 0


def test_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BANS_MAX", 1)
    bans = Bans(ME)
    assert bans.learn(left_behind("draw abort"))
    assert bans.learn(left_behind("malformed"), first_hand=True) == []
    assert len(bans) == 1


def test_what_status_shows() -> None:
    bans, evidence = Bans(ME), left_behind("dense shift")
    bans.learn(evidence)
    (row,) = bans.rows()
    assert row["kind"] == "result"
    assert row["id"] == evidence.culprit.hex()
    assert row["evidence"] == evidence.digest.hex()
    assert "signed a wrong result" in str(row["text"])


def test_the_lines_of_status() -> None:
    bans, evidence = Bans(ME), left_behind("dense shift")
    bans.learn(evidence)
    (line,) = describe_bans({"banned": bans.rows()})
    assert line.startswith(f"  banned {short(evidence.culprit)} signed a wrong result")
    assert line.endswith(f"evidence {evidence.digest.hex()[:16]} (not in the view yet)")
    assert bans.named({evidence.culprit: evidence.digest}) == []
    (line,) = describe_bans({"banned": bans.rows()})
    assert line.endswith(f"evidence {evidence.digest.hex()[:16]}")
    many = describe_bans({"banned": bans.rows() * 25})
    assert many[-1] == "  and 5 more are banned"
    assert describe_bans({"mode": "secret"}) == []


# ---------------------------------------------------------------- what views name


@pytest.mark.parametrize("lie", WEAK)
def test_what_a_view_names_is_believed_with_its_file(lie: str) -> None:
    evidence = left_behind(lie)
    banned = verify_evidence(evidence).banned
    bans = Bans(ME)
    assert bans.named(dict.fromkeys(banned, evidence.digest)) == []
    assert all(peer in bans for peer in banned)
    assert {ban.peer for ban in bans.learn(evidence)} == {*banned}
    bans = Bans(ME)
    assert bans.learn(evidence) == []  # the other way round
    named = bans.named(dict.fromkeys(banned, evidence.digest))
    assert {ban.peer for ban in named} == {*banned}
    assert bans.words == ()


def test_of_a_pair_only_those_are_out_that_the_view_names() -> None:
    evidence = left_behind("wrong part")
    accuser = evidence.said[0].signer
    bans = Bans(ME)
    bans.named({evidence.culprit: evidence.digest})
    (ban,) = bans.learn(evidence)
    assert ban.peer == evidence.culprit
    assert accuser not in bans


def test_evidence_against_others_bans_nobody_by_being_named() -> None:
    evidence = left_behind("withholding")
    bans = Bans(ME)
    bans.named({b"x" * 32: evidence.digest})
    assert bans.learn(evidence) == []
    assert evidence.culprit not in bans


def test_an_earlier_life_has_believed_what_it_kept() -> None:
    for lie in LIES:
        evidence, bans = left_behind(lie), Bans(ME)
        bans.recall(evidence)
        assert all(peer in bans for peer in verify_evidence(evidence).banned)


def test_all_that_proves_a_ban_is_known_by_its_digests() -> None:
    one = left_behind("withholding")
    other = replace(one, said=one.said[::-1])
    bans = Bans(ME)
    bans.learn(one, first_hand=True)
    bans.learn(other)
    bans.named({one.culprit: b"d" * 32})
    assert bans.against(one.culprit) == {one.digest, other.digest, b"d" * 32}
    assert bans.against(b"x" * 32) == frozenset()


def test_what_is_believed_takes_so_much_room_and_the_home_has_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = left_behind("other steps"), left_behind("dense shift")
    monkeypatch.setattr(module, "BELIEVED_BYTES_MAX", len(other.encoded))
    bans = Bans(ME)
    bans.learn(one, first_hand=True)
    bans.learn(other)
    rows = bans.rows()
    bans.let_go()
    assert bans.evidence(one.digest) is None
    assert bans.evidence(other.digest) == other
    assert [ban.evidence for ban in bans.all] == [None, other]
    for each in (one, other):
        assert each.culprit in bans
        assert bans.has(each.digest)
        assert bans.knows(each.digest)
        assert bans.against(each.culprit) == {each.digest}
    assert bans.digests == (one.digest, other.digest)
    assert bans.rows() == rows


def test_what_is_unsure_takes_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = left_behind("withholding"), left_behind("other steps")
    size = max(len(one.encoded), len(other.encoded))
    monkeypatch.setattr(module, "UNSURE_BYTES_MAX", size)
    bans = Bans(ME)
    bans.learn(one)
    bans.learn(other)
    assert not bans.knows(one.digest)
    assert bans.knows(other.digest)
    monkeypatch.setattr(module, "UNSURE_BYTES_MAX", 10)
    assert Bans(ME).learn(one) == []
