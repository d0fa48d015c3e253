"""Rows: how the time of a round is split, what a row may say, and how many are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import pytest

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.daemon.ipc_server import COMMAND_BYTES_MAX
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import PURPOSES
from atoll.peer.net.wire import decode, encode
from atoll.peer.telemetry.event_file import UNIX_S_MAX
from atoll.peer.telemetry.rows import (
    PEERS_KEPT,
    ROW_EVERY_S,
    ROWS_KEPT,
    ROWS_TOLD_MAX,
    TEXT_CHARACTERS_MAX,
    LinkSeen,
    RoundClock,
    RoundRow,
    RowTable,
    brief,
    plain_row,
)

A, B, ME = b"a" * 32, b"b" * 32, b"m" * 32
ROW = RoundRow(
    7, 7, 1e9, 21.3, 18.0, 0.2, 3.1, (brief(B),), 1, (4, 3, 2, 1), (1, 2, 3, 4), loss=2.5
)


def test_a_round_is_training_then_waiting_then_exchange() -> None:
    clock = RoundClock(ME)
    first = clock.committed(100.0, exchange_s=2.0)
    assert (first.took_s, first.compute_s, first.wait_s, first.exchange_s) == (2.0, 0.0, 0.0, 2.0)
    training, exchange = (1, False), (1, True)
    clock.hears(((A, B), 0.1), training, submitted=True)
    clock.hears(((ME, B), 0.1), training, submitted=True)  # the last that was late: not this peer
    clock.hears(((), 0.2), training, submitted=True)
    clock.hears(((A,), 0.1), exchange, submitted=True)  # all are late in an exchange, at first
    times = clock.committed(121.3, exchange_s=3.1, submitted_s=118.0)
    assert times.took_s == pytest.approx(21.3)
    assert times.compute_s == pytest.approx(18.0)
    assert times.wait_s == pytest.approx(0.2)
    assert times.exchange_s == pytest.approx(3.1)
    assert times.waited_for == (B,)
    assert clock.committed(130.0, 1.0, 129.5).waited_for == ()  # nobody was waited for since


def test_what_was_said_in_an_earlier_phase_holds_no_more() -> None:
    clock = RoundClock(ME)
    said = ((A,), 0.5)
    clock.hears(said, (1, False), submitted=False)
    assert clock.late((1, False)) == (A,)
    assert clock.late((1, True)) == ()
    clock.hears(said, (2, False), submitted=True)
    assert clock.late((2, False)) == ()
    assert clock.committed(9.0, 1.0, 2.0).waited_for == ()
    clock.hears(((A,), 0.5), (2, False), submitted=False)  # said again
    assert clock.late((2, False)) == (A,)


def test_training_that_overlaps_an_exchange_is_not_counted_before_the_last_commit() -> None:
    clock = RoundClock()
    clock.committed(10.0, 1.0)
    times = clock.committed(12.0, exchange_s=5.0, submitted_s=8.0)
    assert (times.took_s, times.compute_s, times.wait_s, times.exchange_s) == (2.0, 0.0, 0.0, 2.0)


def test_a_row_goes_over_the_wire_as_it_is_and_takes_less_than_two_kilobytes() -> None:
    links = tuple(LinkSeen(brief(bytes([n]) * 32), 0.0123, 1e7, 0.001) for n in range(20))
    row = replace(ROW, links=links, error="x" * 160, tokens=1e12, steps=1e6, phase="coordinator")
    sent = encode(row)
    assert decode(sent) == row
    assert len(sent) < 2000


def test_a_held_out_loss_takes_bytes_only_in_the_rows_that_have_one() -> None:
    assert b"heldout_loss" not in encode(ROW)
    row = replace(ROW, heldout_loss=2.75)
    assert len(encode(row)) - len(encode(ROW)) == len(b"heldout_loss") + 1 + 9
    assert decode(encode(row)) == row
    # A peer of before neither sends it nor stumbles over it, as with any field that it lacks.
    name, values = msgpack.unpackb(encode(row))
    assert decode(msgpack.packb([name, values | {"of_a_later_version": 1}])) == row
    assert decode(encode(ROW)) == ROW


@pytest.mark.parametrize(
    "wrong",
    [
        {"heldout_loss": math.nan},
        {"unix_s": 1e18},
        {"unix_s": UNIX_S_MAX + 1},
        {"unix_s": -1.0},
        {"unix_s": math.nan},
        {"took_s": -1.0},
        {"took_s": math.nan},
        {"exchange_s": math.inf},
        {"loss": math.nan},
        {"sent": (0, 0, 0, -1)},
        {"first": 9},
        {"links": (LinkSeen(brief(B)),) * 2000},
        {"waited_for": (brief(B),) * 5},
        {"waited_for": (B,)},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((ValueError, RemoteProtocolError)):
        decode(encode(replace(ROW, **wrong)))  # type: ignore[arg-type]


def test_a_peer_is_heard_once_a_second_and_its_last_rows_are_kept() -> None:
    table = RowTable()
    assert table.add(A, ROW, 0.0)
    assert not table.add(A, ROW, ROW_EVERY_S / 4)
    assert table.add(B, ROW, ROW_EVERY_S / 4)
    for number in range(2 * ROWS_KEPT):
        assert table.add(A, replace(ROW, first=number, last=number), 1.0 + number)
    assert [row.last for row in table.rows(A)] == [*range(ROWS_KEPT, 2 * ROWS_KEPT)]


def test_peers_that_have_gone_are_forgotten_before_those_that_report() -> None:
    table = RowTable()
    for number in range(2 * PEERS_KEPT):
        table.add(A, ROW, float(number))
        table.add(number.to_bytes(32, "big"), ROW, float(number))
    assert len(table.peers()) == PEERS_KEPT
    assert A in table.peers()


def test_links_stay_known_after_rows_that_tell_of_none() -> None:
    table = RowTable()
    seen = (LinkSeen(brief(B), 0.02),)
    table.add(A, replace(ROW, links=seen), 0.0)
    table.add(A, ROW, 1.0)
    assert table.links(A) == seen


def test_the_last_held_out_loss_stays_known_after_rows_that_tell_of_none() -> None:
    table = RowTable()
    for number, loss in enumerate((None, 3.0, None, 2.0, None, None)):
        table.add(A, replace(ROW, heldout_loss=loss), float(number))
    assert [row.heldout_loss for row in table.rows(A)] == [None, 3.0, 3.0, 2.0, 2.0, 2.0]
    assert table.told(1)[0]["heldout_loss"] == 2.0


def test_what_is_told_of_all_fits_into_a_local_message() -> None:
    """However long texts are that other peers have sent; links, of which nobody asks, left out."""
    table, seen = RowTable(), tuple(LinkSeen(brief(B), 0.02, 1e7, 0.5) for _ in range(60))
    most = replace(
        ROW,
        first=2**50,
        last=2**50,
        waited_for=(brief(A), brief(B), brief(ME), brief(A)),
        sent=(10**18,) * len(PURPOSES),
        received=(10**18,) * len(PURPOSES),
        phase="x" * TEXT_CHARACTERS_MAX,
        error="x" * 4 * TEXT_CHARACTERS_MAX,
        tokens=1e17,
        steps=1e17,
        links=seen,
    )
    for peer in range(2 * ROWS_TOLD_MAX // ROWS_KEPT):
        for number in range(ROWS_KEPT):
            table.add(peer.to_bytes(32, "big"), most, float(number))
    told = table.told(ROWS_KEPT)
    assert len(told) == ROWS_TOLD_MAX
    assert "links" not in told[0]
    assert len(msgpack.packb(told)) < COMMAND_BYTES_MAX


def test_in_plain_types_a_row_names_peers_and_leaves_out_what_is_nothing() -> None:
    plain = plain_row(A, replace(ROW, links=(LinkSeen(brief(B), 0.02),)))
    assert plain["peer"] == short(A)
    assert plain["waited_for"] == [short(B)]
    assert plain["links"] == [{"peer": short(B), "rtt_s": 0.02, "out": None, "loss": None}]
    assert (plain["kind"], plain["loss"], plain["sent"]) == ("row", 2.5, [4, 3, 2, 1])
    assert "tokens" not in plain
    assert "heldout_loss" not in plain
    assert plain_row(A, replace(ROW, heldout_loss=0.0))["heldout_loss"] == 0.0
    assert "error" not in plain
