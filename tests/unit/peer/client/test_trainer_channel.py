"""How long a trainer waits that is to leave, without a daemon."""

from __future__ import annotations

from atoll.peer.client.trainer_channel import RECONNECT_S, TrainerChannel


def test_who_hurries_waits_no_longer_and_as_before_when_that_is_over() -> None:
    channel = TrainerChannel.__new__(TrainerChannel)
    channel.deadline_s, channel._reconnect_s = 600.0, RECONNECT_S
    with channel.hurry(30.0):
        assert (channel.deadline_s, channel._reconnect_s) == (30.0, 30.0)
        with channel.hurry(40.0):
            assert (channel.deadline_s, channel._reconnect_s) == (30.0, 30.0)
    assert (channel.deadline_s, channel._reconnect_s) == (600.0, RECONNECT_S)
    channel._reconnect_s = 0.0  # it waits for no daemon at all
    with channel.hurry(30.0):
        assert channel._reconnect_s == 0.0
