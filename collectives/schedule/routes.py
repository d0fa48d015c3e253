"""Lay out the way of a chunk's parts to its owner, and the way of the result back.

Every collective but the pairwise exchange (``pair.py``) is a pair of trees for each owner, the
*root*: partial sums climb one to the root, the encoded result descends the other. What differs is
their shape:

    star            everyone sends to the root, the root to everyone: the butterfly
    ring            round a tour: from the root's successor to the root, and from the root on
    tree            k-ary, the root on top: few neighbours, few bytes in few steps
    hierarchical    members of a site send to one of them, which sends to the root

The trees depend on the root alone, not on the chunk, and follow from a few numbers that the plan
carries; so all participants compute the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from atoll.collectives.errors import ConfigError

ROOT: Final = -1  # the parent of a root


@dataclass(frozen=True)
class Routes:
    """Hold the trees of every root: the way of the parts up to it, and of the result down.

    ``up[root][p]``: whom p sends its parts to; ``down[root][p]``: who sends p the result.

    Participants are indices into the plan. A root has no parent in its own trees. Raises
    ConfigError for trees on which not everyone reaches the root.
    """

    kind: str
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for trees in (self.up, self.down):
            if len(trees) != len(self.up) or any(len(tree) != len(self.up) for tree in trees):
                raise ConfigError(f"routes of {len(self.up)} participants are not a square")
            for root, parents in enumerate(trees):
                _check_tree(root, parents)

    @cached_property
    def up_children(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the participants that send parts to p, ascending, by ``[root][p]``."""
        return _children(self.up)

    @cached_property
    def down_children(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the participants that p hands the result on to, ascending, by ``[root][p]``."""
        return _children(self.down)

    def neighbours(self, me: int) -> frozenset[int]:
        """Return everyone that ``me`` may have to send something to."""
        count = range(len(self.up))
        found = {self.up[root][me] for root in count}
        for root in count:
            found.update(self.down_children[root][me])
        return frozenset(found - {ROOT})

    def crosses(self, pairs: Collection[tuple[int, int]], roots: Collection[int]) -> bool:
        """Return whether anything goes between two of ``pairs``, either way, for these roots.

        Each pair is in ascending order. It takes time for each edge, not for each pair and root.
        """
        without, sending = frozenset(pairs), frozenset(roots)
        if self.kind == "butterfly":
            return any(one in sending or other in sending for one, other in without)
        return bool(without) and any(
            (min(peer, parent), max(peer, parent)) in without
            for root in sending
            for trees in (self.up, self.down)
            for peer, parent in enumerate(trees[root])
        )


@lru_cache(maxsize=16)
def star(count: int) -> Routes:
    parents = tuple(_rooted(root, [root] * count) for root in range(count))
    return Routes("butterfly", parents, parents)


def ring(order: Sequence[int]) -> Routes:
    """Return the routes of a ring, on which everyone sends to the next one only.

    ``order``: the tour, each participant once; ConfigError for anything else.
    """
    count = len(order)
    if sorted(order) != list(range(count)):
        raise ConfigError(f"a tour of {count} participants names each of them once, not {order}")
    after = {peer: order[(i + 1) % count] for i, peer in enumerate(order)}
    before = {peer: order[i - 1] for i, peer in enumerate(order)}
    up = tuple(_rooted(root, [after[p] for p in range(count)]) for root in range(count))
    down = tuple(_rooted(root, [before[p] for p in range(count)]) for root in range(count))
    return Routes("ring", up, down)


def tree(count: int, arity: int) -> Routes:
    """Return routes with a complete ``arity``-ary tree below each root.

    It is over the participants that follow the root. Raises ConfigError if ``arity`` is below 1.
    """
    if arity < 1:
        raise ConfigError(f"a tree has at least 1 child per node, not {arity}")
    parents = []
    for root in range(count):
        places = [(p - root) % count for p in range(count)]
        above = [((place - 1) // arity + root) % count for place in places]
        parents.append(_rooted(root, above))
    return Routes("tree", tuple(parents), tuple(parents))


def hierarchical(sites: Sequence[int]) -> Routes:
    """Return routes on which one member of each site sends to the root for all of them.

    ``sites[p]``: the site of participant p, any number. In the root's site everyone sends to the
    root; in every other, to the member whose turn it is for that root, which sends to the root.
    """
    members: dict[int, list[int]] = {}
    for peer, site in enumerate(sites):
        members.setdefault(site, []).append(peer)
    parents = []
    for root, home in enumerate(sites):
        turn = members[home].index(root)
        heads = {site: peers[turn % len(peers)] for site, peers in members.items()}
        heads[home] = root
        above = [root if heads[site] == p else heads[site] for p, site in enumerate(sites)]
        parents.append(_rooted(root, above))
    return Routes("hierarchical", tuple(parents), tuple(parents))


def _rooted(root: int, parents: Sequence[int]) -> tuple[int, ...]:
    return tuple(ROOT if p == root else parent for p, parent in enumerate(parents))


def _children(trees: tuple[tuple[int, ...], ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    found = []
    for parents in trees:
        below: list[list[int]] = [[] for _ in parents]
        for peer, parent in enumerate(parents):
            if parent != ROOT:
                below[parent].append(peer)
        found.append(tuple(map(tuple, below)))
    return tuple(found)


def _check_tree(root: int, parents: Sequence[int]) -> None:
    """Raise ConfigError unless everyone reaches the root, and the root alone has no parent."""
    reached: set[int] = {root}
    for peer in range(len(parents)):
        path: list[int] = []
        at = peer
        while at not in reached:
            path.append(at)
            at = parents[at]
            if not 0 <= at < len(parents) or at in path:
                raise ConfigError(f"participant {peer} has no way to the root {root}")
        reached.update(path)
    if parents[root] != ROOT:
        raise ConfigError(f"the root {root} sends to {parents[root]}")
