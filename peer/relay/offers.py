"""Limit what relays may have this peer dial. Sans-I/O.

A relay that offers a circuit has this peer dial an address: that which the relay advertises, which
may be a third party's, as often as the relay likes. So an offer that leads to no relay counts as a
failure of whoever made it, and after FAILURES_MAX of them in a row nothing is dialled for PAUSE_S.
That the other end of a circuit does not come in time is no such failure: it may have died.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

# Under way at a time, until the other end has proved itself: each is a socket. A relay's are fewer
# than the places that members have for that (connection_limits.py), so that it cannot take all.
OFFERS_MAX: Final = 128
PER_RELAY_MAX: Final = 48
FAILURES_MAX: Final = 8  # in a row: a relay that ends fails all that are under way
PAUSE_S: Final = 10.0
RELAYS_MAX: Final = 256  # whose failures are remembered


class _BadOffers(NamedTuple):
    in_a_row: int = 0
    not_before_s: float = float("-inf")
    silent_until_s: float = float("-inf")  # until when no more of them are written down


class Offers:
    """Know which offers may be taken; :meth:`begin` and :meth:`ended` go in pairs."""

    def __init__(self) -> None:
        self._under_way: Counter[bytes] = Counter()
        self._failures: OrderedDict[bytes, _BadOffers] = OrderedDict()

    def begin(self, relay: bytes, now_s: float) -> bool:
        """Return whether an offer of this relay is to be taken."""
        is_full = self._under_way.total() >= OFFERS_MAX or self._under_way[relay] >= PER_RELAY_MAX
        if is_full or now_s < self._failures.get(relay, _BadOffers()).not_before_s:
            return False
        self._under_way[relay] += 1
        return True

    def ended(self, relay: bytes) -> None:
        """Note that nothing is under way any more for one that had begun."""
        self._under_way[relay] -= 1
        self._under_way += Counter()  # without those that are at 0

    def joined(self, relay: bytes) -> None:
        """Note that an offer has led to the relay: what failed before counts no more."""
        self._failures.pop(relay, None)

    def failed(self, relay: bytes, now_s: float, *, led_there: bool) -> bool:
        """Note that nothing has come of an offer; return whether that is worth a line.

        ``led_there``: the relay has answered, and only the other end has not come.
        """
        before = self._failures.pop(relay, _BadOffers())
        count = 0 if led_there else before.in_a_row + 1
        pause_s = PAUSE_S if count >= FAILURES_MAX else 0.0
        is_said = now_s < before.silent_until_s
        silent_until_s = before.silent_until_s if is_said else now_s + PAUSE_S
        self._failures[relay] = _BadOffers(count, now_s + pause_s, silent_until_s)
        if len(self._failures) > RELAYS_MAX:
            self._failures.popitem(last=False)
        return not is_said
