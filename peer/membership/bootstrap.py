"""Found a run together, or resume one of which only checkpoints are left.

Theory. Founders call each other (BootstrapHello) until enough are there: all whom the user has
named, or a majority of the voters of the last view that a checkpoint names. They then share a
*bootstrap view*, an imaginary one numbered 0 with these voters, and elect the first view of the run
as they would elect any other: by one single-decree Paxos, on the highest position that somebody
holds. A peer votes in one bootstrap view in its life.

Checkpoints of several peers may name different views. So a call says who is waited for
(BootstrapConfig), and whoever hears of a later view of the same history waits for that one's voters
instead; one that is named there and has no checkpoint itself votes too, though it holds nothing.
Two sets that found the same run without knowing of each other make two lineages, which are reported
and resolved when they meet. A run that is resumed gets a new lineage that names the old one as its
ancestor: should members of the old one live on somewhere, the two meet as forks do, instead of
mixing.

The members of a lineage that gives way to another are founders too, should that one die before they
are in: the last view that they had in common names their voters.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from atoll.peer.membership.events import Note, Send
from atoll.peer.membership.joining import Joining
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import BootstrapConfig, BootstrapHello
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import (
    ANCESTORS_MAX,
    ARCHIVE,
    MEMBERS_MAX,
    Member,
    View,
    genesis_chain,
    new_lineage,
    short,
)


class Bootstrap:
    """Wait for the founders of a run, then make the bootstrap view that they enter together.

    Once this peer is in a view, it has no part any more.
    """

    def __init__(self, here: Situation, own: MemberState, joining: Joining) -> None:
        self._here = here
        self._own = own
        self._joining = joining
        self._wanted: BootstrapConfig | None = None
        self._put_off: BootstrapConfig | None = None
        self._put_off_s = 0.0  # when somebody last said that the run lives
        self._next_s = 0.0
        self._enough_since_s: float | None = None
        self._position = (0, b"")  # what we hold ...
        self._since: tuple[bytes, ...] = ()  # ... and, if we got it while we waited, where
        self.hellos: dict[bytes, BootstrapHello] = {}

    def start(self, config: BootstrapConfig) -> None:
        if self._wanted is None and self._put_off is None:
            self._position, self._since = self._held(), ()
        self._wanted = config
        self._next_s = 0.0
        self._enough_since_s = None

    def stop(self) -> None:
        """Stop waiting for founders: others have founded the run, or go on without us."""
        self._wanted = self._put_off = None

    def put_off(self, founding: BootstrapConfig | None) -> None:
        """Put this founding off: the run lives, they say, so join it.

        Should it die before we are in, we wait again. It is ``expected``, which is to be asked for
        before a bootstrap view is left.
        """
        self._put_off_s = self._here.now_s
        self._put_off, self._wanted = founding, None

    def fall_back(self, view: View) -> None:
        """Remember the members of a view that we leave for another run.

        We wait for them if that run is silent.
        """
        self._position, self._since = self._held(), ()
        self._put_off_s = self._here.now_s
        self._put_off = BootstrapConfig(
            voters=view.peers,
            lineage=view.lineage,
            number=view.number,
            ancestors=view.ancestors,
            rules=view.rules,
        )

    def soon(self) -> None:
        self._next_s = self._here.now_s

    @property
    def waiting(self) -> bool:
        return self._wanted is not None and self._here.view is None

    @property
    def expected(self) -> BootstrapConfig | None:
        """Return with whom this peer founds the run, or None.

        One that was put off counts: the peer would found the run there if the one that it joins
        were gone.
        """
        return self._wanted or self._put_off

    def describe(self) -> str:
        """Describe for people how many are here, how many are needed, and who is missing.

        "" while this peer does not wait for founders.
        """
        wanted = self._wanted
        if wanted is None:
            return ""
        here = self._present(wanted)
        count = len(wanted.voters)
        if not count:
            return f"{len(here)} of {len(wanted.founders)} founders are here"
        missing = ", ".join(short(peer) for peer in wanted.voters if peer not in here) or "nobody"
        return (
            f"{len(here)} of the {count} members of view {wanted.number} are here and"
            f" {count // 2 + 1} are needed to go on; missing: {missing}"
        )

    # ------------------------------------------------------------ calling each other

    def on_bootstrap_hello(self, source: bytes, hello: BootstrapHello) -> None:
        here = self._here
        known = self.hellos.get(source)
        if hello.member.peer != source or (known and known.member.inc > hello.member.inc):
            return
        if here.view is None and self._supersedes(hello.cradle):
            self._adopt(hello.cradle)
        self.hellos[source] = hello
        if len(self.hellos) > MEMBERS_MAX:
            del self.hellos[source]

    def renewed(self, bootstrap_view: View) -> View:
        """Return a bootstrap view with the incarnations that its voters have called from last.

        One may have died and come back since we entered it, and a first view that names the dead
        one would have no quorum.
        """
        members = []
        for member in bootstrap_view.members:
            hello = self.hellos.get(member.peer)
            later = hello is not None and hello.member.inc > member.inc
            members.append(hello.member if hello is not None and later else member)
        return replace(bootstrap_view, members=tuple(members))

    def _supersedes(self, config: BootstrapConfig) -> bool:
        """Return whether to wait for these voters and not for ours."""
        here, mine = self._here, self._wanted
        if not config.voters:
            return False
        if mine is None and self._put_off is not None:
            return False  # the run lives; who has not heard of it yet must not call us back
        if mine is None:
            able = here.phase is Phase.OUT and not self._joining.renewing
            return able and here.me.peer in config.voters and here.me.role != ARCHIVE
        later = config.lineage == mine.lineage and config.number > mine.number
        return later or mine.lineage in config.ancestors

    def _adopt(self, config: BootstrapConfig) -> None:
        here, count = self._here, len(config.voters)
        text = f"waiting for a majority of the {count} of view {config.number}"
        here.emit(Note("genesis", text))
        if here.me.peer in config.voters:
            self.start(config)
        else:
            self.stop()  # they go on without us, and let us in then

    def _present(self, wanted: BootstrapConfig) -> list[bytes]:
        """Return the peers whose call for the same voters still stands; our own counts too."""
        linked, me = self._here.linked, self._here.me
        mark = _fingerprint(wanted)
        here = {me.peer: me.address}
        for peer, hello in self.hellos.items():
            if peer in linked and _fingerprint(hello.cradle) == mark:
                here[peer] = hello.member.address
        return sorted(p for p, at in here.items() if p in wanted.voters or at in wanted.founders)

    def step(self) -> View | None:
        """Call the other founders; return the bootstrap view to enter, once enough are here."""
        self._note_position()
        self._wait_again()
        here, wanted = self._here, self._wanted
        if wanted is None:
            return None
        if here.now_s >= self._next_s:
            self._next_s = here.now_s + here.timing.hello_s
            mine = self.hellos[here.me.peer] = BootstrapHello(
                here.me, wanted, *self._position, self._lineages_since(wanted)
            )
            for peer in sorted(here.linked):
                here.emit(Send(peer, mine))
        if here.view is not None:
            return None  # in the bootstrap view; others may need our call to find in
        present = self._present(wanted)
        if not self._enough(wanted, present):
            self._enough_since_s = None
            return None
        if self._enough_since_s is None:
            self._enough_since_s = here.now_s
        everyone = len(present) >= len(wanted.voters)
        if everyone or here.now_s - self._enough_since_s >= here.timing.hello_gather_s:
            return self._found(wanted, present)
        return None

    def _wait_again(self) -> None:
        here = self._here
        if self._joining.is_followed:
            self._put_off_s = here.now_s
        if self._put_off is not None and here.now_s > self._put_off_s + here.timing.run_lost_s:
            here.emit(Note("genesis", "the run that was found is silent; waiting for founders"))
            self.start(self._put_off)
            self._put_off = None

    def _note_position(self) -> None:
        """Note what we hold, and where we have got it if that has changed while we wait.

        Somebody may have resumed the run alone, have let us load it, and be gone again.
        """
        position, followed = self._held(), self._joining.view
        if position != self._position:
            self._position = position
            self._since = (*followed.ancestors, followed.lineage) if followed is not None else ()

    def _held(self) -> tuple[int, bytes]:
        return self._own.round, self._own.chain

    def _lineages_since(self, wanted: BootstrapConfig) -> tuple[bytes, ...]:
        known = {*wanted.ancestors, wanted.lineage}
        return tuple(lineage for lineage in self._since if lineage not in known)

    def _enough(self, wanted: BootstrapConfig, present: list[bytes]) -> bool:
        if self._here.me.peer not in present:
            return False  # not named ourselves: join those who are
        if wanted.voters:
            return 2 * len(present) > len(wanted.voters)
        return len(present) >= len(wanted.founders)

    # ------------------------------------------------------------ founding

    def _found(self, wanted: BootstrapConfig, present: list[bytes]) -> View:
        """Return the bootstrap view of these; the election in it makes the first view."""
        voters = sorted(wanted.voters or present)
        members = tuple(
            self.hellos[peer].member if peer in present else Member(peer, 0) for peer in voters
        )
        lineage = new_lineage(wanted.lineage, _fingerprint(wanted) + b"".join(voters))
        # The base will be what one of the furthest holds, so its history is ours.
        since = max((self.hellos[peer] for peer in present), key=lambda x: (x.round, x.chain)).since
        ancestors = (*wanted.ancestors, wanted.lineage, *since) if wanted.lineage else ()
        bootstrap_view = View(
            lineage,
            0,
            members,
            voters[-1],  # nobody coordinates; the last stands last
            0,
            genesis_chain(lineage),
            ancestors=ancestors[-ANCESTORS_MAX:],
            rules=wanted.rules,
        )
        text = f"{len(present)} of {len(voters)} founders are here; electing the first view"
        self._here.emit(Note("genesis", text))
        self._next_s = 0.0
        return bootstrap_view


def _fingerprint(config: BootstrapConfig) -> bytes:
    """Return a SHA-256 that identifies the voters that the founding view is to be decided by."""
    number = config.number.to_bytes(8, "big")
    founders = (address.encode() for address in sorted(config.founders))
    parts = (config.lineage, number, *sorted(config.voters), *founders)
    hashes = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"atoll-cradle" + hashes).digest()
