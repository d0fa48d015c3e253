"""Keep banned peers outside, whatever they can show: passes and bans, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.peer.authority.ledger import AboutPasses
from atoll.peer.authority.policy import OpenAdmission
from atoll.peer.net.hello import Hello
from atoll.peer.verify.ban_list import BanList

SHOWN_MAX = 20  # bans in `atoll status`; --json has more


class AdmissionChain(OpenAdmission):
    """Ask the bans, and then whoever judges passes."""

    def __init__(self, admission: OpenAdmission, bans: BanList) -> None:
        self.admission, self.ban_list = admission, bans
        self.credential, self.role = admission.credential, admission.role

    def admit(self, peer: bytes, theirs: Hello, *, called: bool) -> None:
        self.ban_list.check(peer)
        self.admission.admit(peer, theirs, called=called)

    def check_address(self, ip: str, others: Sequence[str]) -> None:
        self.admission.check_address(ip, others)

    def linked(self, peer: bytes) -> None:
        self.admission.linked(peer)
        self.ban_list.linked(peer)

    def unlinked(self, peer: bytes) -> None:
        self.admission.unlinked(peer)
        self.ban_list.unlinked(peer)

    def check_message(self, peer: bytes, message: object) -> bool:
        return self.admission.check_message(peer, message)

    def on_message(self, peer: bytes, message: AboutPasses) -> None:
        self.admission.on_message(peer, message)

    def is_out(self, peer: bytes) -> bool:
        return self.admission.is_out(peer) or self.ban_list.is_out(peer)

    def revoke(self, data: bytes) -> str:
        return self.admission.revoke(data)

    def status(self) -> dict[str, Any]:
        return {**self.admission.status(), "banned": self.ban_list.bans.rows()}


def describe_bans(admission: dict[str, Any]) -> list[str]:
    """Return the lines of `atoll status` about bans."""
    rows = admission.get("banned", [])
    lines = [
        f"  banned {row['text']}; evidence {row['evidence'][:16]}"
        + ("" if row["agreed"] else " (not in the view yet)")
        for row in rows[:SHOWN_MAX]
    ]
    if len(rows) > SHOWN_MAX:
        lines.append(f"  and {len(rows) - SHOWN_MAX} more are banned")
    return lines
