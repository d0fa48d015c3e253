"""Tell `atoll status` about admission: who came with what, and who is out. Pure."""

from __future__ import annotations

from typing import Any

from atoll.peer.authority.grants import Credential, date_of
from atoll.peer.authority.ledger import Ledger
from atoll.peer.membership.view import short

SHOWN_MAX = 100  # peers, and tokens: an answer to a command has room for many more


def standing(ledger: Ledger, own: Credential, now_s: float) -> dict[str, Any]:
    """Return what is known of admission in plain types: this travels over the local socket.

    ``now_s``: seconds since 1970.
    """
    records = ledger.records()
    peers = [
        {
            "peer": short(found.peer),
            "id": found.peer.hex(),
            "token": found.grant.subject.hex() if found.grant.is_token else "",
            "role": found.grant.role,
            "not_after_unix_s": found.grant.not_after_s,
            "expired": found.grant.expired(now_s),
            "revoked": bool(ledger.revoked(found)),
        }
        for found in records[:SHOWN_MAX]
    ]
    tokens = {found.grant.digest: found for found in records if found.grant.is_token}
    return {
        "mode": "authority",
        "authority": ledger.authority.hex(),
        "own": own.grant.describe(),
        "list": ledger.revocations.number,
        "revoked": len(ledger.revocations.ids),
        "admitted": len(records),
        "peers": peers,
        "tokens": [
            {
                "id": found.grant.subject.hex(),
                "uses": found.grant.uses,
                "used": ledger.used(found),
                "not_after_unix_s": found.grant.not_after_s,
                "expired": found.grant.expired(now_s),
                "revoked": found.grant.subject in ledger.revocations.ids,
            }
            for found in list(tokens.values())[:SHOWN_MAX]
        ],
    }


def describe(admission: dict[str, Any]) -> list[str]:
    """Return the lines of `atoll status` about admission."""
    if admission["mode"] != "authority":
        return ["admission  by the run secret"]
    revoked = f"list {admission['list']} revokes {admission['revoked']}"
    lines = [
        f"admission  by the authority {admission['authority'][:16]}; this peer has a"
        f" {admission['own']}; {admission['admitted']} admitted;"
        f" {revoked if admission['list'] else 'nobody is revoked'}"
    ]
    for token in admission["tokens"]:
        text = f"{token['used']} of {token['uses']} used, {_until(token)}"
        lines.append(f"  token {token['id']}  {text}")
    for peer in admission["peers"]:
        by = f"token {peer['token'][:16]}" if peer["token"] else "pass"
        by += "" if peer["token"] and not peer["revoked"] else f", {_until(peer)}"
        lines.append(f"  peer {peer['peer']} is {peer['id']}  {peer['role']}, {by}")
    return lines


def _until(granted: dict[str, Any]) -> str:
    if granted["revoked"]:
        return "REVOKED"
    if not granted["not_after_unix_s"]:
        return "never expires"
    until = date_of(granted["not_after_unix_s"])
    return (
        f"expired {until}: good for those who are in" if granted["expired"] else f"expires {until}"
    )
