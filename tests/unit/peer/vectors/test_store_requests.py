"""Which vectors can be had, and who waits for which."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.net.wire import decode, encode
from atoll.peer.vectors.messages import AskVector, DropVector, VectorIs, is_name
from atoll.peer.vectors.store import (
    KEPT,
    NAMES_MAX,
    REQUESTS_OF_ONE_MAX,
    WAIT_S,
    PublishedVectors,
    RequestKey,
    VectorRequest,
)

A, B = b"a" * 32, b"b" * 32


class Publisher:
    """A trainer that publishes, and what was answered."""

    def __init__(self) -> None:
        self.trains = True
        self.published = PublishedVectors(lambda: self.trains)
        self.tickets = 0

    def publish(self, name: str, number: int) -> tuple[list[int], dict[int, str]]:
        dropped = self.published.begin(name, number)
        return dropped, self.told(self.published.done(name, number))

    def ask(self, name: str, number: int, peer: bytes = A, now_s: float = 0.0) -> str | None:
        self.tickets += 1
        answer = self.published.ask(
            VectorRequest(RequestKey(peer, self.tickets), name, number, now_s)
        )
        return None if answer is None else answer.why

    @staticmethod
    def told(answers: list) -> dict[int, str]:
        return {answer.request.key.ticket: answer.why for answer in answers}


def test_the_last_two_can_be_had_and_later_ones_are_waited_for() -> None:
    publisher = Publisher()
    assert publisher.ask("phi", 3) is None
    assert publisher.publish("phi", 1) == ([], {})
    assert publisher.publish("phi", 2) == ([], {})
    assert publisher.publish("delta", 3) == ([], {})  # another name
    assert publisher.ask("phi", 1) == ""
    assert publisher.ask("phi", 2) == ""
    assert publisher.publish("phi", 3) == ([1], {1: ""})
    assert publisher.ask("phi", 1) == "it is not kept any more: the newest is 3"
    assert publisher.published.newest("phi") == 3
    assert publisher.published.newest("other") == 0
    assert KEPT == 2


def test_numbers_may_be_left_out() -> None:
    publisher = Publisher()
    publisher.publish("phi", 1)
    assert publisher.ask("phi", 4) is None
    assert publisher.ask("phi", 9) is None
    assert publisher.publish("phi", 9) == (
        [],
        {1: "it is not kept any more: the newest is 9", 2: ""},
    )


def test_without_a_trainer_nothing_is_waited_for_and_what_there_is_can_be_had() -> None:
    publisher = Publisher()
    publisher.publish("phi", 5)
    assert publisher.ask("phi", 6) is None
    assert publisher.ask("other", 1) is None
    publisher.trains = False
    ended = "its trainer has ended, or not begun"
    assert publisher.told(publisher.published.ended()) == {1: ended, 2: ended}
    assert publisher.published.ended() == []  # each is answered once
    assert publisher.ask("phi", 6) == ended
    assert publisher.ask("phi", 5) == ""


def test_the_next_trainer_may_begin_with_lower_numbers() -> None:
    publisher = Publisher()
    for number in (7, 8):
        publisher.publish("phi", number)
    assert publisher.publish("phi", 8) == ([8], {})  # that of the one before is another one
    assert publisher.ask("phi", 7) == ""
    assert publisher.publish("phi", 3) == ([7, 8], {})
    assert publisher.published.newest("phi") == 3
    assert publisher.ask("phi", 7) is None


def test_while_one_is_stored_what_it_replaces_is_gone_already() -> None:
    publisher = Publisher()
    publisher.publish("phi", 1)
    publisher.publish("phi", 2)
    assert publisher.published.begin("phi", 3) == [1]
    assert publisher.ask("phi", 1) == "it is not kept any more: the newest is 2"
    assert publisher.ask("phi", 3) is None
    assert publisher.told(publisher.published.done("phi", 3)) == {2: ""}


def test_what_waits_is_bounded() -> None:
    publisher = Publisher()
    for number in range(REQUESTS_OF_ONE_MAX):
        assert publisher.ask("phi", 1 + number) is None
    assert publisher.ask("phi", 1) == f"{REQUESTS_OF_ONE_MAX} vectors have been asked for"
    assert publisher.ask("phi", 1, peer=B) is None  # others are not concerned
    publisher.publish("phi", 1)  # being sent, they still count
    assert publisher.ask("phi", 1) == f"{REQUESTS_OF_ONE_MAX} vectors have been asked for"
    publisher.published.over(RequestKey(A, 1))
    assert publisher.ask("phi", 1) == ""
    publisher.published.lost(A)
    for _ in range(REQUESTS_OF_ONE_MAX):
        assert publisher.ask("phi", 1) == ""
    for number in range(NAMES_MAX - 1):
        publisher.publish(f"name {number}", 1)
    with pytest.raises(ConfigError, match=f"at most {NAMES_MAX}"):
        publisher.publish("one more", 1)


def test_a_name_whose_first_vector_was_not_stored_may_be_tried_again() -> None:
    publisher = Publisher()
    for number in range(NAMES_MAX - 1):
        publisher.publish(f"name {number}", 1)
    assert publisher.published.begin("phi", 1) == []  # and there is no memory for it
    publisher.publish("phi", 1)
    assert publisher.ask("phi", 1) == ""


def test_nobody_waits_for_ever() -> None:
    publisher = Publisher()
    assert publisher.ask("phi", 1, now_s=0.0) is None
    assert publisher.ask("phi", 1, now_s=10.0) is None
    assert publisher.published.late(WAIT_S) == []
    assert publisher.told(publisher.published.late(WAIT_S + 1)) == {
        1: "it was not published within 3600 s"
    }
    assert publisher.publish("phi", 1) == ([], {2: ""})


def test_what_is_dropped_is_not_answered_and_a_ticket_is_used_once() -> None:
    publisher = Publisher()
    assert publisher.ask("phi", 1) is None
    again = VectorRequest(RequestKey(A, 1), "phi", 1, 0.0)
    answer = publisher.published.ask(again)
    assert answer is not None
    assert answer.why == "this question was asked before"
    publisher.published.over(RequestKey(A, 1))
    publisher.published.over(RequestKey(A, 1))
    assert publisher.publish("phi", 1) == ([], {})
    assert publisher.published.ask(again) is not None
    assert publisher.published.wants(RequestKey(A, 1))
    assert publisher.published.ask(again).why == "this question was asked before"  # type: ignore[union-attr]
    publisher.published.over(RequestKey(A, 1))
    assert not publisher.published.wants(RequestKey(A, 1))


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
