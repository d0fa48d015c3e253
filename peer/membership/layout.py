"""Lay out a round: along which trees its parts travel, and how much of it each peer owns.

Whoever plans knows the measured links, and advises the coordinator (``Advised``); a BEGIN carries
the layout for its participants, so that all reduce alike. What need not be agreed on is left out:
how many streams, and how fast, is said to each peer by itself (peer/links/).

Rules. GATHER has none: there is nothing to reduce. Of INIT one participant has everything and the
others nothing, so it owns nothing: it sends each part to its owner, once, and the owners hand it on
(``handed_on``). So each host sends as much as the first one. A first attempt at a STEP of exactly
those that the advice is about gets it whole. Any other attempt, of fewer of them or after a broken
one, is a butterfly with the shares of those who are left: there everybody sees who is late, while
in a ring or a tree all wait for a neighbour that waits itself, and the wrong ones would be
excluded. So is a REDUCE, whose size and codec the advice does not know: the advice has shares for a
vector of any size, beside those of a step. But a small one of two is pairwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from atoll.collectives.errors import ConfigError
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, star, tree
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.wire import Within, message
from atoll.peer.rounds.entries import CHUNKS_MAX, REDUCE, STEP

BUTTERFLY, RING, TREE, SITES = "butterfly", "ring", "tree", "hierarchical"
PAIRWISE = "pairwise"  # of two: nobody owns anything, each adds up for itself
# A REDUCE of two up to here goes both ways at once: one journey in place of two, and as many bytes.
# Each then adds up all of it, which a larger one feels more than the journey.
PAIR_ELEMENTS_MAX = 1 << 18
WHY_CHARS_MAX = 300  # a sentence or two: every BEGIN carries it
FROM_ONE = "butterfly: one peer hands its parameters to all"
HANDED_ON = "butterfly: one peer's parameters, in parts that the others hand on"

Share = Annotated[int, Within(0, CHUNKS_MAX)]
Index = Annotated[int, Within(0, MEMBERS_MAX - 1)]


@message(wire="Layout")
@dataclass(frozen=True, slots=True)
class Layout:
    """Describe along which trees a round travels, and what each participant owns.

    Participants are positions in BEGIN's. ``shares``: of the result, in any unit; of a vector of as
    many chunks as their sum, the chunks that each owns. ``order``: a ring's tour, or the site of
    each participant. ``arity``: of a tree, else without meaning. ``why``: for people.
    """

    kind: str
    shares: Annotated[tuple[Share, ...], Within(1, MEMBERS_MAX)]
    order: Annotated[tuple[Index, ...], Within(0, MEMBERS_MAX)] = ()
    arity: Annotated[int, Within(1, MEMBERS_MAX)] = 1
    why: Annotated[str, Within(0, 4 * WHY_CHARS_MAX)] = ""

    def __post_init__(self) -> None:
        count = len(self.shares)
        if not any(self.shares):
            raise ValueError("somebody owns a share")
        fits = {
            BUTTERFLY: not self.order,
            RING: sorted(self.order) == list(range(count)),
            TREE: not self.order,
            SITES: len(self.order) == count,
            PAIRWISE: count == 2 and not self.order,
        }
        if not fits.get(self.kind, False):
            raise ValueError(f"no layout of {count} is a {self.kind} in the order {self.order}")

    @property
    def is_pairwise(self) -> bool:
        return self.kind == PAIRWISE

    def lets_own(self, peers: Collection[bytes], participants: Sequence[bytes]) -> bool:
        """Return whether some of ``peers`` own a part of the result, or add up parts of others."""
        owners = [p for p, share in zip(participants, self.shares, strict=True) if share]
        return self.kind != BUTTERFLY or any(peer in peers for peer in owners)

    def crosses(self, pairs: Collection[tuple[int, int]]) -> bool:
        """Return whether participants exchange data that are one of these pairs of positions.

        Each pair is in ascending order.
        """
        owners = [n for n, share in enumerate(self.shares) if share]
        return (self.routes() or star(len(self.shares))).crosses(pairs, owners)

    def routes(self) -> Routes | None:
        """Return the trees, or None where they are a plan's usual ones, or there are none."""
        if self.kind == RING:
            return ring(self.order)
        if self.kind == TREE:
            return tree(len(self.shares), self.arity)
        return hierarchical(self.order) if self.kind == SITES else None


@dataclass(frozen=True, slots=True)
class Advised:
    """Tell the machine, where it coordinates, how rounds of these peers would go fastest.

    That holds until other advice comes. ``participants`` are in ascending order of peer id, as many
    as the layout has. ``shares``: of a butterfly of these over a vector of any size; a model of few
    chunks cannot be shared out so finely. () stands for those of the layout.
    """

    participants: tuple[bytes, ...]
    layout: Layout
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.participants) != sorted(set(self.participants)):
            raise ConfigError("a layout is for peers in order, each of them once")
        if len(self.participants) != len(self.layout.shares):
            who = len(self.participants)
            raise ConfigError(f"a layout of {len(self.layout.shares)} peers for {who}")
        if not self.shares:
            object.__setattr__(self, "shares", self.layout.shares)
        if len(self.participants) != len(self.shares):
            raise ConfigError(f"{len(self.shares)} shares for a layout of {len(self.participants)}")


def pair_for(participants: Sequence[bytes], elements: int) -> Layout | None:
    """Return the layout of a small REDUCE of two; None if it is not one."""
    if len(participants) != 2 or not 0 < elements <= PAIR_ELEMENTS_MAX:
        return None
    return Layout(PAIRWISE, (1, 1), why="pairwise: a small vector of two")


def layout_for(
    advice: Advised | None, participants: Sequence[bytes], kind: str, *, again: bool
) -> Layout | None:
    """Return the layout of an attempt of these, who are in ascending order.

    ``again``: an attempt before it has broken. None without advice, where there is nothing to
    reduce, and where the advice knows one of them not, or would leave nobody who owns anything.
    """
    if advice is None or kind not in (STEP, REDUCE):
        return None
    if not again and kind == STEP and tuple(participants) == advice.participants:
        return advice.layout
    known = dict(zip(advice.participants, advice.shares, strict=True))
    if not all(peer in known for peer in participants):
        return None
    shares = tuple(known[peer] for peer in participants)
    why = "butterfly with the shares of the plan, which was made for other participants"
    return Layout(BUTTERFLY, shares, why=why) if any(shares) else None


def handed_on(weights: Sequence[float], reaches_all: Sequence[bool]) -> Layout | None:
    """Return the layout by which what one participant has, who alone weighs something, gets to all.

    ``reaches_all``: whether each has a link to all others. None for one that is alone.
    """
    shares = tuple(
        int(linked and not weight) for weight, linked in zip(weights, reaches_all, strict=True)
    )
    if len(weights) == 1:
        return None
    if not any(shares):
        return Layout(BUTTERFLY, tuple(int(weight > 0) for weight in weights), why=FROM_ONE)
    return Layout(BUTTERFLY, shares, why=HANDED_ON)


def reserved(
    layout: Layout | None,
    owners: Sequence[bool],
    why: str = "butterfly; peers on probation own no part of the result",
) -> Layout | None:
    """Return ``layout``, or a butterfly in which only ``owners`` own a part of the result.

    ``why``: for people, where it is such a butterfly.
    """
    if all(owners):
        return layout
    planned = layout.shares if layout is not None else (1,) * len(owners)
    shares = tuple(share if owns else 0 for share, owns in zip(planned, owners, strict=True))
    if not any(shares):
        shares = tuple(map(int, owners))
    return Layout(BUTTERFLY, shares, why=why[:WHY_CHARS_MAX])
