"""Decide which circuits a relay carries, and follow each from its tokens to its end. Sans-I/O.

Theory. A circuit costs the relay descriptors, a bulk circuit bytes as well, and whoever asks for
one wants them of a stranger's machine. So both ends must be linked to the relay, which means that
each has proved that it belongs to the run; there are limits for each pair, for each peer and for
all; and tokens of which one is not used end their circuit. A circuit moves like this::

    WAITING --an end has come--> HALF --the other has come--> JOINED --an end has gone--> ENDED
       |                          |                             |
       +------- too late ---------+---> ENDED <-- cut ----------+
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections.abc import Collection, Iterator
from typing import Final

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.relay.messages import TOKEN_BYTES, TOKEN_S

# A control link, one that stands by, and for each the one that is about to replace it.
CONTROL_PER_PAIR_MAX: Final = 4
# The data streams of a round in both directions, and as many that replace them.
BULK_PER_PAIR_MAX: Final = 4 * STREAMS_MAX
# So many pairs of one peer may be carried: more than a run has outbound peers, mostly.
PER_PEER_MAX: Final = 256
# Who is no member yet needs a way to ask for its place and one for the state. What others ask for
# does not count: they could keep it outside.
PER_JOINER_MAX: Final = 8
# Whoever gives it the state asks for a control link, a data stream, and what replaces each.
TO_JOINER_MAX: Final = 4
# Identities cost nothing: those that join take no more than this of what the members have.
JOINERS_MAX: Final = 64
# Each takes six descriptors: two connections and the pipes between them.
TOTAL_MAX: Final = 512


class CircuitState(enum.Enum):
    WAITING = "waiting"  # nobody has come yet
    HALF = "half"  # one end has come
    JOINED = "joined"  # bytes may flow
    ENDED = "ended"


class CircuitTrigger(enum.Enum):
    CAME = "an end has come"
    LATE = "an end has not come in time"
    OVER = "an end has gone, or the relay has cut it"


_WAITING, _HALF, _JOINED, _ENDED = CircuitState
CIRCUIT_TRANSITIONS: Final = {
    (_WAITING, CircuitTrigger.CAME): _HALF,
    (_WAITING, CircuitTrigger.LATE): _ENDED,
    (_WAITING, CircuitTrigger.OVER): _ENDED,
    (_HALF, CircuitTrigger.CAME): _JOINED,
    (_HALF, CircuitTrigger.LATE): _ENDED,
    (_HALF, CircuitTrigger.OVER): _ENDED,
    (_JOINED, CircuitTrigger.OVER): _ENDED,
}


class Circuit:
    """Describe a circuit: who has asked for it, to whom it leads, and how far it has come."""

    def __init__(self, number: int, asker: bytes, peer: bytes, until_s: float, *, bulk: bool):
        self.number, self.bulk = number, bulk
        self.ends = (asker, peer)
        self.tokens = (secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES))
        self.until_s = until_s  # when its tokens are no good any more
        self.state = CircuitState.WAITING

    def members_only(self, joiners: Collection[bytes]) -> bool:
        """Return whether neither end is among these, who are no members."""
        return not any(end in joiners for end in self.ends)

    def go(self, trigger: CircuitTrigger) -> None:
        following = CIRCUIT_TRANSITIONS.get((self.state, trigger))
        if following is None:
            raise LocalProtocolError(f"a {self.state.value} circuit knows no '{trigger.value}'")
        self.state = following


class CircuitTable:
    """Hold the circuits of one relay."""

    def __init__(self) -> None:
        self._circuits: dict[int, Circuit] = {}
        self._tokens: dict[bytes, tuple[Circuit, int]] = {}  # with the end whose it is
        self._numbers = itertools.count(1)

    def __iter__(self) -> Iterator[Circuit]:
        return iter(tuple(self._circuits.values()))

    def __len__(self) -> int:
        return len(self._circuits)

    def ask(
        self,
        asker: bytes,
        peer: bytes,
        now_s: float,
        *,
        bulk: bool,
        joiners: Collection[bytes] = (),
    ) -> Circuit | str:
        """Return a new circuit, or why there is none.

        ``joiners``: who is no member now, of these two and of the ends of all circuits.
        """
        if why_not := self._why_full(asker, peer, joiners, bulk=bulk):
            return why_not
        circuit = Circuit(next(self._numbers), asker, peer, now_s + TOKEN_S, bulk=bulk)
        self._circuits[circuit.number] = circuit
        for end, token in enumerate(circuit.tokens):
            self._tokens[token] = circuit, end
        return circuit

    def _why_full(
        self, asker: bytes, peer: bytes, joiners: Collection[bytes], *, bulk: bool
    ) -> str:
        if asker == peer:
            return "a circuit leads to somebody else"
        if len(self._circuits) >= TOTAL_MAX:
            return f"the relay carries {TOTAL_MAX} circuits already"
        joins = not {asker, peer}.isdisjoint(joiners)
        if joins and sum(not circuit.members_only(joiners) for circuit in self) >= JOINERS_MAX:
            return f"the relay carries {JOINERS_MAX} circuits of peers that join already"
        asked = [circuit.ends[1] for circuit in self if circuit.ends[0] == asker]
        if asker in joiners and len(asked) >= PER_JOINER_MAX:
            return f"the relay carries {PER_JOINER_MAX} circuits of one peer already"
        if peer in joiners and asked.count(peer) >= TO_JOINER_MAX:
            return f"the relay carries {TO_JOINER_MAX} circuits from one peer to this one already"
        for end in (asker, peer):
            if end not in joiners and len(self.of(end)) >= PER_PEER_MAX:
                return f"the relay carries {PER_PEER_MAX} circuits of one peer already"
        pair = {asker, peer}
        of_pair = sum(set(other.ends) == pair and other.bulk == bulk for other in self)
        most = BULK_PER_PAIR_MAX if bulk else CONTROL_PER_PAIR_MAX
        if of_pair >= most:
            return f"the relay carries {most} circuits of these two already"
        return ""

    def come(self, token: bytes, now_s: float) -> tuple[Circuit, int] | None:
        """Return of which circuit an end has come, and which; None if the token is no good.

        A token is good once. The end is 0 for the asker and 1 for the other.
        """
        found = self._tokens.pop(token, None)
        if found is None or now_s >= found[0].until_s:
            return None
        found[0].go(CircuitTrigger.CAME)
        return found

    def expire(self, now_s: float) -> list[Circuit]:
        """End the circuits of which an end has not come in time, and return them."""
        waits = (CircuitState.WAITING, CircuitState.HALF)
        late = [one for one in self if one.state in waits and now_s >= one.until_s]
        for circuit in late:
            self._end(circuit, CircuitTrigger.LATE)
        return late

    def end(self, circuit: Circuit) -> bool:
        """End a circuit; return False if it has ended before."""
        if circuit.number not in self._circuits:
            return False
        self._end(circuit, CircuitTrigger.OVER)
        return True

    def peers(self) -> set[bytes]:
        """Return the ends of all circuits."""
        return {end for circuit in self for end in circuit.ends}

    def of(self, peer: bytes) -> list[Circuit]:
        return [circuit for circuit in self if peer in circuit.ends]

    def _end(self, circuit: Circuit, trigger: CircuitTrigger) -> None:
        circuit.go(trigger)
        del self._circuits[circuit.number]
        for token in circuit.tokens:
            self._tokens.pop(token, None)
