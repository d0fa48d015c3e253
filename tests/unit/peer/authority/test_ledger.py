"""Who may come in: every refusal, and records that are the same whatever their order."""

from __future__ import annotations

import pytest
from harness.passes import AUTHORITY, PUBLIC, RUN, passed, peer_of, token, tokened
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import (
    AdmissionError,
    PassExpiredError,
    PassForgedError,
    PassMissingError,
    PassRevokedError,
    PassRoleError,
    PassRunError,
    PassUsedUpError,
)
from atoll.peer.authority import ledger as ledger_module
from atoll.peer.authority.grants import Credential, Revocations
from atoll.peer.authority.ledger import Ledger
from atoll.peer.membership.view import ARCHIVE, REPLICA, WITNESS

NOW_S = 1_000_000
PEERS = "bcdefgh"
SHARED = {name: tokened(name, token("t", uses=3), "t") for name in PEERS}


def fresh() -> Ledger:
    return Ledger(PUBLIC, RUN)


def revoking(*ids: bytes, number: int = 1) -> bytes:
    return Revocations(number - 1).with_more(ids, AUTHORITY).encode()


def judge(ledger: Ledger, shown: Credential, role: str = REPLICA, now_s: float = NOW_S) -> None:
    assert ledger.judge(shown.peer, shown.encode(), role, now_s) == shown


def test_who_has_a_pass_or_a_token_may_come_in() -> None:
    judge(fresh(), passed("b"))
    judge(fresh(), SHARED["b"])
    judge(fresh(), passed("b", not_after_s=NOW_S))


def test_refusals() -> None:
    ledger = fresh()
    shown = passed("b", not_after_s=NOW_S - 1, role=WITNESS)
    with pytest.raises(PassMissingError, match="there is no pass"):
        ledger.judge(peer_of("b"), b"", REPLICA, NOW_S)
    with pytest.raises(PassForgedError):
        ledger.judge(peer_of("b"), b"x" * 300, REPLICA, NOW_S)
    with pytest.raises(PassForgedError, match="given to another peer"):
        ledger.judge(peer_of("c"), shown.encode(), WITNESS, NOW_S)
    with pytest.raises(PassRunError):
        judge(ledger, passed("b", run="other"))
    with pytest.raises(PassRoleError, match="role witness, not for 'replica'"):
        judge(ledger, shown)
    with pytest.raises(PassRoleError):
        judge(ledger, shown, role="")
    with pytest.raises(PassExpiredError, match="expired 1970-01-12 13:46 UTC"):
        judge(ledger, shown, role=WITNESS)


def test_expiry_does_not_count_for_who_came_in_before() -> None:
    ledger = fresh()
    shown = passed("b", not_after_s=NOW_S)
    ledger.record(shown)
    judge(ledger, shown, now_s=NOW_S + 1)
    with pytest.raises(PassExpiredError):  # another grant, with which it never came
        judge(ledger, tokened("b", token("t", not_after_s=NOW_S), "t"), now_s=NOW_S + 1)


def test_who_calls_members_does_not_judge_whether_they_are() -> None:
    ledger = fresh()
    shown = passed("b", not_after_s=NOW_S - 1)
    assert ledger.judge(shown.peer, shown.encode(), REPLICA, None) == shown
    ledger.revoke(revoking(peer_of("b")))
    with pytest.raises(PassRevokedError):
        ledger.judge(shown.peer, shown.encode(), REPLICA, None)


def test_a_token_lets_in_so_many_and_those_again() -> None:
    ledger = fresh()
    for name in "bcd":
        judge(ledger, SHARED[name])
        assert ledger.record(SHARED[name]) == (SHARED[name], None)
    assert ledger.record(SHARED["b"]) == (None, None)
    with pytest.raises(PassUsedUpError, match="was for 3, and 3 came"):
        judge(ledger, SHARED["e"])
    for name in "bcd":
        judge(ledger, SHARED[name])


def test_a_token_of_the_same_key_and_another_grant_counts_by_itself() -> None:
    ledger = fresh()
    ledger.record(tokened("b", token("t"), "t"))
    judge(ledger, tokened("c", token("t", role=ARCHIVE), "t"), role=ARCHIVE)


@given(st.permutations(PEERS), st.permutations(PEERS))
def test_the_same_peers_stay_whatever_the_order(one: list[str], two: list[str]) -> None:
    here, there = fresh(), fresh()
    gone: list[Credential] = []
    for ledger, order in ((here, one), (there, two)):
        for name in order:
            new, displaced = ledger.learn(SHARED[name].encode())
            if displaced is not None:
                assert new is not None
                gone.append(displaced)
            assert len(ledger) <= 3
    stay = {found.peer for found in here.records()}
    assert stay == {found.peer for found in there.records()}
    assert len(stay) == 3
    assert not stay & {found.peer for found in gone}
    for name in PEERS:
        if peer_of(name) in stay:
            judge(here, SHARED[name])
        else:
            with pytest.raises(PassUsedUpError):
                judge(here, SHARED[name])


def test_what_others_say_is_verified() -> None:
    ledger = fresh()
    with pytest.raises(PassForgedError):
        ledger.learn(SHARED["b"].encode()[:-1] + b"\0")
    with pytest.raises(PassRunError):
        ledger.learn(passed("b", run="other").encode())
    assert len(ledger) == 0


def test_revoked_are_peers_and_all_who_came_with_a_token() -> None:
    ledger = fresh()
    for shown in (SHARED["b"], SHARED["c"], passed("d")):
        ledger.record(shown)
    assert ledger.revoke(revoking(peer_of("b")))
    assert [ledger.is_out(peer_of(name)) for name in "bcd"] == [True, False, False]
    with pytest.raises(PassRevokedError, match=r"revoked this peer \(list 1\)"):
        judge(ledger, SHARED["b"])
    judge(ledger, SHARED["c"])
    assert ledger.revoke(revoking(peer_of("b"), peer_of("t"), number=2))
    assert [ledger.is_out(peer_of(name)) for name in "bcd"] == [True, True, False]
    with pytest.raises(PassRevokedError, match=r"revoked the token .* \(list 2\)"):
        judge(ledger, SHARED["c"])
    ledger.record(passed("c"))  # it has another grant, which is good
    assert not ledger.is_out(peer_of("c"))
    judge(ledger, passed("c"))


def test_a_lower_number_is_ignored_and_a_forged_list_refused() -> None:
    ledger = fresh()
    assert ledger.revoke(revoking(peer_of("b"), number=5))
    for number in (4, 5):
        assert not ledger.revoke(revoking(number=number))
    assert ledger.revocations.ids == {peer_of("b")}
    forged = bytearray(revoking(number=6))
    forged[-1] ^= 1
    with pytest.raises(PassForgedError):
        ledger.revoke(bytes(forged))
    assert ledger.revocations.number == 5


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RECORDS_MAX", 2)
    ledger = fresh()
    for name in "bcd":
        ledger.record(passed(name))
    assert len(ledger) == 2
    with pytest.raises(AdmissionError, match="2 admissions are recorded"):
        judge(ledger, passed("d"))
    judge(ledger, passed("b"))
