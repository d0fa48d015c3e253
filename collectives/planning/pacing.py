"""Set the pace of each stream of a reduction, so that no link is asked for much more than it has.

Streams that only find out for themselves what a link has fill its queue, lose packets there, and
give way to each other by luck; on an all-to-all of equal streams that costs a tenth of the rate
(docs/log.md). Here each link is shared in proportion to what its streams have to carry, so that all
of them would end at the same time, and a stream keeps to the smaller of its two shares.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import F64, Network
from atoll.collectives.schedule.routes import ROOT, Routes

# The share of a link's measured rate that all its streams may take. The rest is for what they do
# not count: acknowledgements of what arrives meanwhile, 52 bytes for every two packets. At 1.08,
# rounds of 64 MiB took a tenth longer, since the queues were full all the time; those of 5 MB, in
# which links are taken for a little slower than they are, 4 % less (docs/log.md).
LINK_SHARE: Final = 0.98
# So many times its equal part each of several streams between two peers may take: a stream that has
# just lost a packet leaves that much to the others. With less, the pair does not get its share;
# without a limit, sixteen streams fill the queues and lose more (docs/log.md).
STRIPE_SLACK: Final = 1.5
# One round of so many is a trial, in which streams may take so many times their pace. A stream that
# keeps to its pace never shows that the link has more than was measured. Without any pace such a
# round took half as long again, and up to twice as long (docs/log.md); what a link has gained is
# found all the same, as each plan that grows is tried again.
TRIAL_EVERY: Final = 16
TRIAL_FACTOR: Final = 1.25


def carried_bytes(
    routes: Routes, shard_bytes: tuple[float, ...], result_factor: float = 1.0
) -> F64:
    """Return the bytes that i sends to j, float64[n, n].

    Root r owns ``shard_bytes[r]`` of the encoded vector, and results are ``result_factor`` times as
    large as parts. Raises ConfigError if there are more or fewer shards than participants.
    """
    count = len(routes.up)
    if len(shard_bytes) != count:
        raise ConfigError(f"{len(shard_bytes)} shards of {count} participants")
    carried = np.zeros((count, count))
    for root, nbytes in enumerate(shard_bytes):
        for peer in range(count):
            parent, giver = routes.up[root][peer], routes.down[root][peer]
            if parent != ROOT:
                carried[peer, parent] += nbytes
            if giver != ROOT:
                carried[giver, peer] += result_factor * nbytes
    return carried


def is_trial(number: int) -> bool:
    """Return whether the round of this number is a trial: all participants know it by that."""
    return number % TRIAL_EVERY == 0


def stripe_pace(bytes_per_s: float, stripes: int) -> float:
    """Return how fast each of ``stripes`` streams may send, that have ``bytes_per_s`` together."""
    return bytes_per_s if stripes == 1 else STRIPE_SLACK * bytes_per_s / stripes


def paces(network: Network, carried: F64, share: float = LINK_SHARE) -> F64:
    """Return how fast i may send to j, float64[n, n], bytes per second with all headers.

    ``carried``: see ``carried_bytes``. 0 where nothing is sent. The sum of what leaves or enters a
    participant, or what passes between two, is at most ``share`` of what that link has. Raises
    ConfigError if flows and network are not of the same number of peers.
    """
    if carried.shape != network.pair.shape:
        raise ConfigError(f"flows of {carried.shape[0]} peers in a network of {network.count}")
    flows = carried.copy()
    np.fill_diagonal(flows, 0)
    across = flows * network.across()
    rates = network.pair.copy()
    for peer in range(network.count):
        _share_line(rates, flows, [peer], network.up[peer])
        _share_line(rates.T, flows.T, [peer], network.down[peer])
    for site, members in enumerate(network.members):
        _share_line(rates, across, list(members), network.site_up[site])
        _share_line(rates.T, across.T, list(members), network.site_down[site])
    rates[flows == 0] = 0
    return share * rates


def _share_line(rates: F64, flows: F64, members: list[int], rate: float) -> None:
    """Lower ``rates`` to what the flows of these rows have of one line that they share."""
    mine = flows[members]
    if np.isfinite(rate) and mine.any():
        limits = np.where(mine > 0, mine / mine.sum() * rate, np.inf)
        rates[members] = np.minimum(rates[members], limits)
