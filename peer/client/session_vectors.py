"""Hand vectors from trainer to trainer, one to one, without the group.

    session.publish("phi", 17, values)                       # for whoever asks for it
    asked = session.ask_vector(peer, "phi", 17, elements)    # goes on in the background
    asked.wait(30.0)
    values = asked.read()

The daemon keeps the last two numbers of a name, also when its trainer has ended. It asks another
daemon and lets the question wait there until that one's trainer has published what is wanted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import RoundTimeoutError
from atoll.collectives.units import duration
from atoll.peer.client.console import say
from atoll.peer.client.ipc_client import PROGRESS_S
from atoll.peer.client.session_ops import check_codec

Floats = NDArray[np.float32]
LOOK_S = 1.0  # one question to the daemon waits so long; it answers at once when there is news


@dataclass(frozen=True, slots=True)
class Members:
    """Name the members of the run that hold what it has.

    ``names`` are those of peers in the order of their ids, the same for all that are in this
    ``view``. Most of them have a trainer. ``min_trainers``: how many of these the run needs.
    """

    view: int
    names: tuple[str, ...]
    min_trainers: int = 1


class Gossip(ABC):
    """Provide the part of a session that needs no round of the run."""

    peer_name: str
    _deadline_s: float
    _vector_memory: Floats | None = None  # shared with the daemon, for one vector at a time

    def members(self) -> Members:
        """Return the members of the run; only this peer while it is in no view."""
        answer = self._ask("members")
        return Members(answer["view"], tuple(answer["names"]), answer["min_trainers"])

    def publish(self, name: str, number: int, values: Floats, codec: str = "float32") -> None:
        """Let others have float32[n] under this name and number.

        ``values`` then is what they will get, as the codec has left it. Numbers of a name rise; the
        last two can be had.

        Raises CodecError for values that it cannot take, and then nothing is published; ConfigError
        for more than four names, or without memory.
        """
        check_codec(codec, "publish()")
        shared = self._memory(values.size)
        np.copyto(shared, values)
        self._ask("publish", name=name, number=number, elements=values.size, codec=codec)
        np.copyto(values, shared)

    def newest(self, peer: str, name: str) -> int:
        """Return the number of a peer's newest vector of this name, 0 for none.

        That is what its trainer has published. Raises ConnectError or RoundTimeoutError if the peer
        does not say.
        """
        return int(self._ask("newest", peer=peer, name=name))

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> AskedVector:
        """Have a vector fetched as soon as it is published.

        This peer's own are had in the same way.
        """
        self._memory(elements)
        ticket = self._ask(
            "ask_vector", peer=peer, name=name, number=number, elements=elements, codec=codec
        )
        return AskedVector(self, f"{name} {number} of {peer}", ticket, elements)

    @abstractmethod
    def _ask(self, command: str, **arguments: Any) -> Any:
        """Return the daemon's answer to a command."""

    @abstractmethod
    def _receive(self, name: str, *, writable: bool, **arguments: Any) -> Floats:
        """Return memory of the daemon's."""

    def _memory(self, elements: int) -> Floats:
        """Return float32[elements] shared with the daemon.

        The memory behind it is at least as large as ever before.
        """
        shared = self._vector_memory
        if shared is None or len(shared) < elements:
            self._vector_memory = None
            shared = self._receive("vector_memory", writable=True, elements=elements)
            self._vector_memory = shared
        return shared[:elements]


class AskedVector:
    """Wait for and read a vector of another peer that is on its way here."""

    def __init__(self, session: Gossip, text: str, ticket: int, elements: int) -> None:
        self._session, self._text = session, text
        self._ticket, self._elements = ticket, elements

    def __str__(self) -> str:
        return self._text

    def wait(self, timeout_s: float) -> None:
        """Wait until the vector is here.

        It may take ``timeout_s`` until it is published; then it is waited for as long as its bytes
        arrive, within the run's round deadline.

        Raises RoundTimeoutError if it takes longer, StateError if it cannot be had (any more),
        ConnectError if its peer is gone, RemoteProtocolError if that sends something else; then it
        is dropped.
        """
        session, began_s = self._session, time.monotonic()
        said_s, state, waited_s = began_s, "asked", 0.0
        while state != "here":
            limit_s = timeout_s if state == "asked" else session._deadline_s
            look_s = min(LOOK_S, max(0.0, limit_s - waited_s))
            state = session._ask("look_for_vector", ticket=self._ticket, timeout_s=look_s)
            waited_s = time.monotonic() - began_s
            if state != "here" and look_s <= 0.0:
                self.drop()
                what = "been published" if state == "asked" else "arrived"
                raise RoundTimeoutError(
                    f"{self} has not {what} within {duration(waited_s)}", elapsed_s=waited_s
                )
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                how = "has not been published yet" if state == "asked" else "is on its way"
                say(f"{self} {how} ({duration(waited_s)} so far)")

    def look(self, timeout_s: float) -> str:
        """Return "asked" while the vector is not published, and "here" when it is here.

        It is something else while the vector is on its way. Returns at once when it is here, else
        after ``timeout_s`` at most. Raises what ``wait`` raises, but for time.
        """
        ask = self._session._ask
        return str(ask("look_for_vector", ticket=self._ticket, timeout_s=timeout_s))

    def read(self) -> Floats:
        """Return the vector, float32[n], read-only.

        Its memory is this one's until the session's next call of any vector. It may be read again,
        until it is dropped.
        """
        self._session._ask("read_vector", ticket=self._ticket)
        shown = self._session._memory(self._elements).view()
        shown.flags.writeable = False
        return shown

    def drop(self) -> None:
        """Give the vector up: it is not wanted (any more)."""
        self._session._ask("drop_vector", ticket=self._ticket)
