"""Notice who has lost its memory: a ledger never gets shorter.

Theory. A home that was restored from an image, or copied, looks whole to itself: it has forgotten
promises and READY that others have counted. What tells is the *position* of its ledger, the number
of records that it has ever held: a peer names only those that are synced, and a process that begins
says how many it has found. Everybody keeps the highest position that it has heard of each member.
To compare when a link comes up is not enough: one who remembers would refuse the forgetful peer,
and another, who never heard of it since, would count it. So a promise carries what its sender
remembers of all others, and a candidate counts no promise, and takes no value from one, that
another promise in hand shows to be forgetful. READY that was counted stands in the memory of the
coordinator, who is among those whom a promise is asked of, or was heard by somebody who is. The
coordinator's beat passes its memory on, so that after a moment all have it, and so that the
forgetful peer hears of it: it comes back as a new incarnation. Each position is signed by whose it
is: who remembers too much of another would take its vote away.

This is a tripwire and no proof. An image that is restored while everybody who has heard more is
gone is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.peer.membership.messages import Promise, Remembered
from atoll.peer.membership.view import View

NEWS_MAX = 8  # positions in one beat of the coordinator, which goes to all four times a second


class LedgerPositions:
    """Remember of each member of the view the highest position that its ledger had.

    ``genuine``: whether somebody has signed what is said of it.
    """

    def __init__(self, genuine: Callable[[Remembered], bool] = lambda told: True) -> None:
        self._genuine = genuine
        self._known: dict[bytes, Remembered] = {}
        self._news: dict[bytes, None] = {}  # of whom the coordinator has yet to tell

    def note(self, told: Remembered) -> None:
        """Note what a peer says of itself, or somebody else of it."""
        known = self._known.get(told.peer)
        is_news = told.position > 0 and (known is None or _rank(told) > _rank(known))
        if is_news and self._genuine(told):
            self._known[told.peer] = told
            self._news[told.peer] = None

    def heard(self, told: Iterable[Remembered], view: View) -> tuple[Remembered, ...]:
        """Note what somebody tells of others; return what is known of them, for it is proven."""
        peers = [each.peer for each in told if view.member(each.peer) is not None]
        for each in told:
            if each.peer in peers:
                self.note(each)
        return tuple(self._known[peer] for peer in peers if peer in self._known)

    def enter(self, view: View) -> None:
        """Forget those who are no members any more."""
        members = {*view.peers}
        self._known = {peer: known for peer, known in self._known.items() if peer in members}
        self._news = dict.fromkeys(self._known)

    def told(self) -> tuple[Remembered, ...]:
        """Return what to tell others."""
        return tuple(known for _, known in sorted(self._known.items()))

    def news(self) -> tuple[Remembered, ...]:
        """Return some of what the members have not been told yet: a beat is to stay short."""
        some = [*self._news][:NEWS_MAX]
        for peer in some:
            del self._news[peer]
        return tuple(self._known[peer] for peer in some)

    def remind(self, peer: bytes) -> None:
        """Tell all once more what is known of one that shows a loss (:meth:`shows_loss`)."""
        self._news[peer] = None

    def shows_loss(self, peer: bytes, inc: int, life: int, began: int) -> bool:
        """Return whether an earlier process is known to have had a longer ledger than this one."""
        known = self._known.get(peer)
        return known is not None and _contradicts(known, inc, life, began)


def forgetful(promises: Mapping[bytes, Promise]) -> set[bytes]:
    """Return whose promise another one shows to come from a peer that has lost its memory."""
    told = [each for promise in promises.values() for each in promise.remembered]
    said = ((peer, promise.inc, promise.life, promise.began) for peer, promise in promises.items())
    return {
        peer
        for peer, *rest in said
        if any(each.peer == peer and _contradicts(each, *rest) for each in told)
    }


def _contradicts(known: Remembered, inc: int, life: int, began: int) -> bool:
    return known.inc == inc and known.life < life and known.position > began


def _rank(told: Remembered) -> tuple[int, int, int]:
    return told.inc, told.position, told.life
