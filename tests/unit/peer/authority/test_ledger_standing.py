"""What `atoll status` says of admission."""

from __future__ import annotations

from harness.passes import AUTHORITY, PUBLIC, RUN, passed, peer_of, token, tokened

from atoll.peer.authority.grants import Revocations
from atoll.peer.authority.ledger import Ledger, describe, standing


def test_status_shows_tokens_passes_and_revocations() -> None:
    own, other = passed("b", not_after_s=1_000_000), tokened("c", token("t", uses=2), "t")
    ledger = Ledger(PUBLIC, RUN)
    for found in (own, other):
        ledger.record(found)
    ledger.revoke(Revocations().with_more([peer_of("c")], AUTHORITY).encode())
    first, *lines = describe(standing(ledger, own, 999_999.0))
    assert first.startswith(
        f"admission  by the authority {PUBLIC.hex()[:16]}; this peer has a pass"
    )
    assert first.endswith("2 admitted; list 1 revokes 1")
    assert [line.split()[:4] for line in lines] == [
        ["token", peer_of("t").hex(), "1", "of"],
        ["peer", lines[1].split()[1], "is", peer_of("b").hex()],
        ["peer", lines[2].split()[1], "is", peer_of("c").hex()],
    ]
    assert "pass, expires 1970-01-12 13:46 UTC" in lines[1]
    assert "pass, expired 1970-01-12" in describe(standing(ledger, own, 1_000_001.0))[2]
    assert "REVOKED" in lines[2]
