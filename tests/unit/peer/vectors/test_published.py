"""Which vectors can be had, and who waits for which."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.net.wire import decode, encode
from atoll.peer.vectors.messages import AskVector, DropVector, VectorIs, is_name
from atoll.peer.vectors.published import (
    KEPT,
    NAMES_MAX,
    REQUESTS_OF_ONE_MAX,
    WAIT_S,
    Key,
    Published,
    Request,
)

A, B = b"a" * 32, b"b" * 32


class Desk:
    """A trainer that publishes, and what was answered."""

    def __init__(self) -> None:
        self.trains = True
        self.published = Published(lambda: self.trains)
        self.tickets = 0

    def publish(self, name: str, number: int) -> tuple[list[int], dict[int, str]]:
        dropped = self.published.begin(name, number)
        return dropped, self.told(self.published.done(name, number))

    def ask(self, name: str, number: int, peer: bytes = A, now_s: float = 0.0) -> str | None:
        self.tickets += 1
        answer = self.published.ask(Request(Key(peer, self.tickets), name, number, now_s))
        return None if answer is None else answer.why

    @staticmethod
    def told(answers: list) -> dict[int, str]:
        return {answer.request.key.ticket: answer.why for answer in answers}


def test_the_last_two_can_be_had_and_later_ones_are_waited_for() -> None:
    desk = Desk()
    assert desk.ask("phi", 3) is None
    assert desk.publish("phi", 1) == ([], {})
    assert desk.publish("phi", 2) == ([], {})
    assert desk.publish("delta", 3) == ([], {})  # another name
    assert desk.ask("phi", 1) == ""
    assert desk.ask("phi", 2) == ""
    assert desk.publish("phi", 3) == ([1], {1: ""})
    assert desk.ask("phi", 1) == "it is not kept any more: the newest is 3"
    assert desk.published.newest("phi") == 3
    assert desk.published.newest("other") == 0
    assert KEPT == 2


def test_numbers_may_be_left_out() -> None:
    desk = Desk()
    desk.publish("phi", 1)
    assert desk.ask("phi", 4) is None
    assert desk.ask("phi", 9) is None
    assert desk.publish("phi", 9) == ([], {1: "it is not kept any more: the newest is 9", 2: ""})


def test_without_a_trainer_nothing_is_waited_for_and_what_there_is_can_be_had() -> None:
    desk = Desk()
    desk.publish("phi", 5)
    assert desk.ask("phi", 6) is None
    assert desk.ask("other", 1) is None
    desk.trains = False
    ended = "its trainer has ended, or not begun"
    assert desk.told(desk.published.ended()) == {1: ended, 2: ended}
    assert desk.published.ended() == []  # each is answered once
    assert desk.ask("phi", 6) == ended
    assert desk.ask("phi", 5) == ""


def test_the_next_trainer_may_begin_with_lower_numbers() -> None:
    desk = Desk()
    for number in (7, 8):
        desk.publish("phi", number)
    assert desk.publish("phi", 8) == ([8], {})  # that of the one before is another one
    assert desk.ask("phi", 7) == ""
    assert desk.publish("phi", 3) == ([7, 8], {})
    assert desk.published.newest("phi") == 3
    assert desk.ask("phi", 7) is None


def test_while_one_is_stored_what_it_replaces_is_gone_already() -> None:
    desk = Desk()
    desk.publish("phi", 1)
    desk.publish("phi", 2)
    assert desk.published.begin("phi", 3) == [1]
    assert desk.ask("phi", 1) == "it is not kept any more: the newest is 2"
    assert desk.ask("phi", 3) is None
    assert desk.told(desk.published.done("phi", 3)) == {2: ""}


def test_what_waits_is_bounded() -> None:
    desk = Desk()
    for number in range(REQUESTS_OF_ONE_MAX):
        assert desk.ask("phi", 1 + number) is None
    assert desk.ask("phi", 1) == f"{REQUESTS_OF_ONE_MAX} vectors have been asked for"
    assert desk.ask("phi", 1, peer=B) is None  # others are not concerned
    desk.publish("phi", 1)  # being sent, they still count
    assert desk.ask("phi", 1) == f"{REQUESTS_OF_ONE_MAX} vectors have been asked for"
    desk.published.over(Key(A, 1))
    assert desk.ask("phi", 1) == ""
    desk.published.lost(A)
    for _ in range(REQUESTS_OF_ONE_MAX):
        assert desk.ask("phi", 1) == ""
    for number in range(NAMES_MAX - 1):
        desk.publish(f"name {number}", 1)
    with pytest.raises(ConfigError, match=f"at most {NAMES_MAX}"):
        desk.publish("one more", 1)


def test_nobody_waits_for_ever() -> None:
    desk = Desk()
    assert desk.ask("phi", 1, now_s=0.0) is None
    assert desk.ask("phi", 1, now_s=10.0) is None
    assert desk.published.late(WAIT_S) == []
    assert desk.told(desk.published.late(WAIT_S + 1)) == {1: "it was not published within 3600 s"}
    assert desk.publish("phi", 1) == ([], {2: ""})


def test_what_is_dropped_is_not_answered_and_a_ticket_is_used_once() -> None:
    desk = Desk()
    assert desk.ask("phi", 1) is None
    again = Request(Key(A, 1), "phi", 1, 0.0)
    answer = desk.published.ask(again)
    assert answer is not None
    assert answer.why == "this question was asked before"
    desk.published.over(Key(A, 1))
    desk.published.over(Key(A, 1))
    assert desk.publish("phi", 1) == ([], {})
    assert desk.published.ask(again) is not None
    assert desk.published.wants(Key(A, 1))
    assert desk.published.ask(again).why == "this question was asked before"  # type: ignore[union-attr]
    desk.published.over(Key(A, 1))
    assert not desk.published.wants(Key(A, 1))


@pytest.mark.parametrize(
    "message",
    [
        AskVector(0, "phi", 1),
        AskVector(1 << 32, "phi", 1),
        AskVector(-1, "phi", 1),
        AskVector(1, "", 1),
        AskVector(1, "x" * 33, 1),
        AskVector(1, "phi", -1),
        AskVector(1, "phi", 1 << 62),
        VectorIs(0, 1),
        VectorIs(1, -1),
        VectorIs(1, 1, -1),
        VectorIs(1, 1, 1 << 41),
        VectorIs(1, 1, 5, "c" * 33),
        VectorIs(1, 1, why="w" * 301),
        VectorIs(1, True),
        DropVector(0),
        DropVector("1"),  # type: ignore[arg-type]
    ],
)
def test_malformed_messages_are_refused(message: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(message))


def test_names_are_short_and_can_be_shown() -> None:
    assert is_name("phi")
    assert not any(map(is_name, ("", "x" * 33, "é" * 17, "a\nb")))
