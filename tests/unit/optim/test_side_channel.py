"""Small vectors between trainers, where one of them may tell something else than the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConnectError
from atoll.optim.side_channel import ASKED_MAX, SideChannel
from atoll.peer.client.trainer_channel import Members


@dataclass
class Told:
    """What members have published, by name: the number, and the values; None: it is gone."""

    members_have: dict[str, tuple[int, list[float]] | None]
    asked: list[str] = field(default_factory=list)

    def members(self) -> Members:
        return Members(1, tuple(sorted(self.members_have)))

    def newest(self, peer: str, name: str) -> int:
        has = self.members_have[peer]
        if has is None:
            raise ConnectError(f"{peer} is gone")
        return has[0]

    def ask_vector(self, peer: str, name: str, number: int, elements: int, codec: str) -> Told:
        self.asked.append(peer)
        return self

    def wait(self, timeout_s: float) -> None:
        assert self.asked

    def read(self) -> F32:
        has = self.members_have[self.asked[-1]]
        assert has is not None
        return np.array(has[1], np.float32)

    def drop(self) -> None:
        assert self.asked


def most(members_have: dict[str, tuple[int, list[float]] | None]) -> tuple[int, list[float]] | None:
    found = SideChannel(Told(members_have), "clock").any(7, 2, most=True)
    return None if found is None else (found[0], found[1].tolist())


def test_what_most_say_is_taken() -> None:
    true, lie = (7, [1.0, 2.0]), (7, [9.0, 9.0])
    assert most({"a": lie, "b": true, "c": true}) == true
    assert most({"a": lie, "b": None, "c": true, "d": true}) == true
    assert most({"a": (7, [1.0]), "b": true, "c": true}) == true  # of another length
    assert most({"a": true}) == true


def test_without_anybody_at_that_number_the_newest_is_taken() -> None:
    assert most({"a": (3, [1.0, 2.0]), "b": (5, [3.0, 4.0])}) == (5, [3.0, 4.0])
    assert most({"a": None}) is None


def test_not_all_of_many_are_asked() -> None:
    told = Told({f"{n:03}": (7, [1.0, 2.0]) for n in range(100)})
    assert SideChannel(told, "clock").any(7, 2, most=True) is not None
    assert len(told.asked) == ASKED_MAX
