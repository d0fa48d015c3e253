"""Check what a session does before its channel is asked, and with its answers; no daemon."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.client.session import Session
from atoll.peer.client.trainer_channel import TrainerChannel
from atoll.peer.membership.operations import OBJECT_BYTES_MAX


def session_of(channel: Any) -> Session:
    session = Session.__new__(Session)
    session.channel, session._buffers = channel, {}
    return session


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> TrainerChannel:
    """Return one that is attached, and whose daemon does nothing but number memory."""
    channel = TrainerChannel.__new__(TrainerChannel)
    channel._exchanges, channel._dropped, channel._exchange = {}, [], None
    channel._region, channel._lifeline = np.zeros(1, np.float32), None
    monkeypatch.setattr(channel, "check", lambda: None)
    number_anew(channel, monkeypatch)
    return channel


def number_anew(channel: TrainerChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)

    def lend(_: str, *, elements: int, dropped: list[int]) -> tuple[int, np.ndarray]:
        assert type(elements) is int  # msgpack takes no other
        return next(numbers), np.zeros(2 * elements, np.float32)

    monkeypatch.setattr(channel, "_receive_numbered", lend)


def test_a_buffer_of_an_earlier_daemon_takes_no_later_one_with_it(
    channel: TrainerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(channel)
    before = session.buffer(8)
    channel._exchanges, channel._dropped = {}, []  # the daemon was started again
    number_anew(channel, monkeypatch)
    after = session.buffer(8)
    del before
    (memory,) = session._buffers.values()
    assert channel.has(memory)
    assert not channel._dropped
    del after
    assert not session._buffers
    assert channel._dropped == [memory.number]


def test_a_buffer_may_have_a_shape_of_numpys_numbers(channel: TrainerChannel) -> None:
    session = session_of(channel)
    shape: Any = (np.int64(2), np.prod((3, 4)))
    assert session.buffer(*shape).shape == (2, 12)
    with pytest.raises(TypeError, match="float"):
        session.buffer(2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.publish("phi", 1, np.zeros(3, np.float32)),
        lambda session: session.newest("a", "phi"),
        lambda session: session.ask_vector("a", "phi", 1, 3),
    ],
)
def test_a_session_is_attached_by_its_first_call(call: Callable[[Session], Any]) -> None:
    called: list[str] = []

    class Channel:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: called.append(name)

    call(session_of(Channel()))
    assert called[0] == "attach_for_collectives"
    assert len(called) == 2


def test_objects_that_do_not_fit_are_counted_with_their_lengths() -> None:
    sizes = [(f"peer {n}", OBJECT_BYTES_MAX) for n in range(8)]
    channel = SimpleNamespace(check=lambda: None, operate=lambda **call: {"sizes": sizes})
    with pytest.raises(ConfigError, match=r"have 524,320 bytes .* lengths.* 524,288 fit"):
        session_of(channel).all_gather(b"")
