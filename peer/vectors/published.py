"""Record what a trainer has published, and who waits for which of it. Sans-I/O.

Theory. Of each name the last KEPT numbers can be had: whoever is an outer step behind its partner
still finds what it needs. A question about a later number waits, because it will be published; one
about an earlier number never can be answered, and says so at once. Without a trainer nothing later
will come, and all that wait for it are told. Each question is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from atoll.collectives.errors import ConfigError

KEPT = 2  # numbers of one name
NAMES_MAX = 4  # a method needs two
REQUESTS_OF_ONE_MAX = 16  # of one peer, that wait or are being answered; a trainer's needs are four
WAIT_S = 3600.0  # a question that has waited so long was forgotten by whoever asked


class Key(NamedTuple):
    """Name a question, as its answer does."""

    peer: bytes
    ticket: int


@dataclass(frozen=True, slots=True)
class Request:
    key: Key
    name: str
    number: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Decide to send a vector; or say ``why`` it cannot be had."""

    request: Request
    why: str = ""


class Published:
    """Decide which questions can be answered now, and which wait.

    ``has_trainer``: whether anything more may be published.
    """

    def __init__(self, has_trainer: Callable[[], bool]) -> None:
        self._has_trainer = has_trainer
        self._numbers: dict[str, list[int]] = {}  # ascending, KEPT at most
        self._waiting: dict[Key, Request] = {}
        self._sending: set[Key] = set()

    # ------------------------------------------------------------ the trainer

    def begin(self, name: str, number: int) -> list[int]:
        """Return the numbers of this name that cannot be had any more, before a new one is stored.

        After a trainer that was further there may be later ones, which are none of the new one's.

        ConfigError for more names than there may be.
        """
        before = self._numbers.get(name, [])
        if not before and len(self._numbers) >= NAMES_MAX:
            raise ConfigError(f"{name!r} would be vector {NAMES_MAX + 1}; at most {NAMES_MAX}")
        kept = [n for n in before if n < number][-(KEPT - 1) :]
        self._numbers[name] = kept
        return [n for n in before if n not in kept]

    def done(self, name: str, number: int) -> list[Answer]:
        """Note that a vector is stored; return what can be answered now."""
        self._numbers[name].append(number)
        return self._answers(r for r in self._waiting.values() if r.name == name)

    def ended(self) -> list[Answer]:
        """Answer those who wait in vain, as the trainer has ended."""
        return self._answers(self._waiting.values())

    def newest(self, name: str) -> int:
        """Return the newest number of this name, 0 without any."""
        return max(self._numbers.get(name, ()), default=0)

    # ------------------------------------------------------------ who asks

    def ask(self, request: Request) -> Answer | None:
        """Take a question; return its answer, or None if it waits."""
        key = request.key
        if key in self._waiting or key in self._sending:
            return Answer(request, "this question was asked before")
        if sum(k.peer == key.peer for k in [*self._waiting, *self._sending]) >= REQUESTS_OF_ONE_MAX:
            return Answer(request, f"{REQUESTS_OF_ONE_MAX} vectors have been asked for")
        self._waiting[key] = request
        return next(iter(self._answers([request])), None)

    def late(self, now_s: float) -> list[Answer]:
        """Give up the questions that have waited for too long, and return their answers."""
        late = [r for r in self._waiting.values() if now_s - r.asked_s > WAIT_S]
        for request in late:
            del self._waiting[request.key]
        return [Answer(r, f"it was not published within {WAIT_S:.0f} s") for r in late]

    def wants(self, key: Key) -> bool:
        """Return whether what is being sent is still wanted. Safe in any thread."""
        return key in self._sending

    def over(self, key: Key) -> None:
        """Forget a question whose vector is sent, or not wanted any more."""
        self._waiting.pop(key, None)
        self._sending.discard(key)

    def lost(self, peer: bytes) -> None:
        for key in [k for k in [*self._waiting, *self._sending] if k.peer == peer]:
            self.over(key)

    def _answers(self, requests: Iterable[Request]) -> list[Answer]:
        """Return an answer to each of these questions that need not wait any longer."""
        answers = []
        for request in list(requests):
            why = self._verdict(request)
            if why is not None:
                del self._waiting[request.key]
                answers.append(Answer(request, why))
                if not why:
                    self._sending.add(request.key)
        return answers

    def _verdict(self, request: Request) -> str | None:
        """Return "" if the vector is here, None if it may come, else why it will not."""
        numbers = self._numbers.get(request.name, [])
        if request.number in numbers:
            return ""
        newest = self.newest(request.name)
        if request.number < newest:
            return f"it is not kept any more: the newest is {newest}"
        return None if self._has_trainer() else "its trainer has ended, or not begun"
