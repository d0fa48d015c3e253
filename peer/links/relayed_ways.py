"""Say what the relays between peers that cannot dial each other leave of their ways. No clock.

A relay carries so many bytes a second as its operator allows, of all pairs and both directions
together, and each byte crosses its own lines twice: once in, once out. Which relay a pair meets at
both its ends work out alike (peer/relay/choice.py), and so does whoever plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.collectives.planning.network_model import F64, RATE_MIN_BYTES_PER_S, Network
from atoll.collectives.units import size
from atoll.peer.membership.view import short
from atoll.peer.relay.choice import meeting_order

# What a relay keeps of its own lines for its own part of a round, at least.
OWN_SHARE_MIN = 0.1

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RelayedWays:
    """Hold which relay carries which pairs of participants, and its rate in bytes per second.

    Participants are positions in ascending order of peer id, each pair in ascending order.
    """

    pairs: Mapping[bytes, Pairs] = field(default_factory=dict)
    bytes_per_s: Mapping[bytes, float] = field(default_factory=dict)

    @property
    def all(self) -> Pairs:
        return tuple(sorted(pair for pairs in self.pairs.values() for pair in pairs))

    def limit(self, network: Network, participants: Sequence[bytes]) -> Network:
        """Return the network with what relays leave of it, if all pairs use them at once."""
        if not self.pairs:
            return network
        pair, up, down = network.pair.copy(), network.up.copy(), network.down.copy()
        for relay, pairs in self.pairs.items():
            rate = self.bytes_per_s[relay]
            share = max(RATE_MIN_BYTES_PER_S, rate / (2 * len(pairs)))
            for one, other in pairs:
                pair[one, other] = min(pair[one, other], share)
                pair[other, one] = min(pair[other, one], share)
            if relay in participants:
                place = participants.index(relay)
                for line in (up, down):
                    line[place] = max(OWN_SHARE_MIN * line[place], line[place] - rate)
        return replace(network, pair=pair, up=up, down=down)

    def carried_bytes(self, carried: F64) -> dict[bytes, float]:
        """Return what each relay carries, of what i sends to j, ``carried[i, j]``."""
        both = carried + np.asarray(carried).T
        found = {
            relay: float(sum(both[one, other] for one, other in pairs))
            for relay, pairs in self.pairs.items()
        }
        return {relay: nbytes for relay, nbytes in found.items() if nbytes}

    def describe(self, carried: Mapping[bytes, float]) -> str:
        """Say for people what relays carry of a round; "" if nothing."""
        said = [f"relay {short(relay)} carries {size(carried[relay])}" for relay in sorted(carried)]
        return f"{', '.join(said)} of each round" if said else ""


NO_RELAYS = RelayedWays()


def relayed_ways(
    participants: Sequence[bytes], pairs: Pairs, bytes_per_s: Mapping[bytes, float]
) -> RelayedWays:
    """Return at which relay each of these pairs meets; pairs without one are not in it."""
    found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    able = [relay for relay, rate in bytes_per_s.items() if rate > 0]
    for one, other in pairs:
        ends = participants[one], participants[other]
        relays = [relay for relay in able if relay not in ends]
        if relays:
            meets = min(relays, key=lambda relay: meeting_order(*ends, relay))
            found[meets].append((one, other))
    return RelayedWays(
        {relay: tuple(sorted(met)) for relay, met in found.items()},
        {relay: bytes_per_s[relay] for relay in found},
    )
