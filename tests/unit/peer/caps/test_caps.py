"""The shell around the buckets: threads that wait, the kernel's counters, hours, days, the file."""

from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path

import pytest

from atoll.peer.caps.budget import DayBudget, Step
from atoll.peer.caps.caps import (
    CONTROL_SHARE,
    COUNT_FILE,
    Cap,
    CapOptions,
    Caps,
    Direction,
    describe,
)
from atoll.peer.caps.schedule import parse_schedule
from atoll.peer.links.tcp_info import TCP_INFO_BYTES, wire_overhead

NOON = "2026-11-26 12:00:00"
MBIT = 125_000.0
DAY_BYTES = 100_000_000_000


def never() -> bool:
    return False


def clock(text: str) -> time.struct_time:
    return time.strptime(text, "%Y-%m-%d %H:%M:%S")


class Office:
    """Caps with a clock that a test sets, and what they say."""

    def __init__(self, home: Path, options: CapOptions, now: str = NOON) -> None:
        self.said: list[str] = []
        self.now = now
        self.caps = Caps(options, home, self.said.append, lambda: clock(self.now))

    def at(self, now: str) -> None:
        self.now = now
        self.caps.look(())


def capped(up: str = "", budget: int = 0) -> CapOptions:
    direction = Direction()
    if up:
        direction = Direction(parse_schedule(up, "--up-mbit"))
    if budget:
        direction = Direction(direction.schedule, DayBudget(budget))
    return CapOptions(up=direction)


class Counted:
    """A connection of which the kernel counts so much."""

    def __init__(self) -> None:
        self.sent_packets = self.received_packets = self.again_bytes = 0

    def tcp_info(self) -> bytes:
        data = bytearray(TCP_INFO_BYTES)
        struct.pack_into("=I", data, 16, 1448)
        struct.pack_into("=I", data, 60, 1500)
        struct.pack_into("=II", data, 136, self.sent_packets, self.received_packets)
        struct.pack_into("=Q", data, 208, self.again_bytes)
        return bytes(data)


# ---------------------------------------------------------------- one direction


def test_bulk_waits_for_its_turn_and_what_does_not_move_is_given_back() -> None:
    cap = Cap(Direction())
    cap.set_rate(1e6)
    granted = cap.take(1 << 20, 0, never)
    assert 0 < granted < 1 << 20
    cap.charge(-granted)
    assert cap.moved_bytes == 0


def test_a_closed_stream_stops_waiting_when_it_is_woken() -> None:
    cap = Cap(Direction())
    cap.set_rate(1e6)
    cap.charge(10**9)  # bulk has to wait for seconds
    closed, found = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: found.append(cap.take(1000, 0, closed.is_set)))
    thread.start()
    closed.set()
    cap.wake()
    thread.join(60)
    assert found == [0]


def test_a_new_rate_ends_the_waiting_of_the_old_one() -> None:
    cap = Cap(Direction())
    cap.set_rate(4e3)
    cap.charge(10**9)
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(cap.take(1 << 20, 0, never)))
    thread.start()
    cap.set_rate(float("inf"))
    thread.join(60)
    assert found == [1 << 20]


def test_many_threads_move_no_more_than_the_rate_gives() -> None:
    cap, moved, began_s = Cap(Direction()), list[int](), time.monotonic()
    cap.set_rate(2e6)

    def move() -> None:
        while sum(moved) < 500_000:
            moved.append(cap.take(1 << 16, 0, never))

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    took_s = time.monotonic() - began_s
    assert cap.moved_bytes == sum(moved)
    assert sum(moved) <= 2e6 * took_s + 2e5 + 1


def test_rounds_are_planned_with_a_little_less() -> None:
    cap = Cap(Direction())
    assert cap.for_rounds is None
    cap.set_rate(1e6)
    assert cap.for_rounds == pytest.approx((1 - CONTROL_SHARE) * 1e6)


# ---------------------------------------------------------------- the kernel's counters


def test_headers_and_what_is_sent_again_are_charged_as_the_kernel_counts_them(
    tmp_path: Path,
) -> None:
    office, stream = Office(tmp_path, capped("20")), Counted()
    stream.sent_packets, stream.received_packets, stream.again_bytes = 10, 4, 1448
    assert wire_overhead(stream.tcp_info()) == (10 * 52 + 1448, 4 * 52)
    office.caps.look([stream])
    stream.sent_packets += 5
    office.caps.look([stream, Counted()])
    assert office.caps.today() == {"up": 15 * 52 + 1448, "down": 4 * 52}
    office.caps.look([])
    assert office.caps.today()["up"] == 15 * 52 + 1448, "it ended, and what it moved has moved"


def test_a_kernel_that_tells_nothing_costs_nothing() -> None:
    assert wire_overhead(b"") is None
    assert wire_overhead(bytes(TCP_INFO_BYTES - 1)) is None


# ---------------------------------------------------------------- hours and days


def test_hours_begin_and_are_said_once(tmp_path: Path) -> None:
    office = Office(tmp_path, capped("50,22:00-06:00=unlimited"))
    for now, mbit in (
        ("12:00", 50),
        ("21:59", 50),
        ("22:00", None),
        ("05:59", None),
        ("06:00", 50),
    ):
        office.at(f"2026-11-26 {now}:00")
        office.at(f"2026-11-26 {now}:30")
        found = office.caps.status()["up"]["bytes_per_s"]
        assert found == (None if mbit is None else mbit * MBIT)
    begins = "up: {} from now on, as --up-mbit says"
    assert office.said == [begins.format(rate) for rate in ("50 Mbit/s", "unlimited", "50 Mbit/s")]
    assert office.caps.status()["down"]["bytes_per_s"] is None, "the other way has no cap"


def test_a_budget_stops_probes_then_state_and_slows_rounds_and_says_each_once(
    tmp_path: Path,
) -> None:
    office = Office(tmp_path, capped(budget=DAY_BYTES))
    caps = office.caps
    assert caps.allows_probes
    assert not caps.refuses_state()
    caps.up.charge(80_000_000_000)
    office.at(NOON)
    assert not caps.allows_probes
    assert not caps.refuses_state()
    caps.up.charge(10_000_000_000)
    office.at(NOON)
    assert "--up-gb-per-day" in caps.refuses_state()
    assert caps.up.bytes_per_s == float("inf")
    caps.up.charge(6_000_000_000)
    office.at(NOON)
    office.at(NOON)
    assert caps.up.bytes_per_s == pytest.approx(4e9 / 43_200)
    assert [line.split(":")[1].strip() for line in office.said] == [
        f"{size} of 100 GB for today are used" for size in ("80 GB", "90 GB", "96 GB")
    ]
    assert "probes" in office.said[0]
    assert "state" in office.said[1]
    assert "741 kbit/s now" in office.said[2]
    office.at("2026-11-27 00:00:00")
    assert caps.allows_probes
    assert not caps.refuses_state()
    assert caps.up.bytes_per_s == float("inf")
    assert caps.today() == {"up": 0, "down": 0}
    assert office.said[3:] == ["up: a new day: nothing is held back any more"]


def test_on_the_way_down_state_for_others_costs_nothing(tmp_path: Path) -> None:
    options = CapOptions(down=Direction(budget=DayBudget(DAY_BYTES)))
    office = Office(tmp_path, options)
    for spent, lines in ((80, 1), (10, 1), (5, 2)):
        office.caps.down.charge(spent * 1_000_000_000)
        office.at(NOON)
        assert len(office.said) == lines
    assert not office.caps.allows_probes
    assert not office.caps.refuses_state()
    assert office.caps.down.bytes_per_s == pytest.approx(5e9 / 43_200)


def test_the_slower_of_hour_and_budget_holds(tmp_path: Path) -> None:
    office = Office(tmp_path, capped("1", DAY_BYTES))
    office.caps.up.charge(round(0.951 * DAY_BYTES))
    office.at(NOON)
    assert office.caps.up.bytes_per_s == pytest.approx(0.907 * MBIT, rel=0.01)
    office.at("2026-11-26 23:00:00")
    assert office.caps.up.bytes_per_s == MBIT


# ---------------------------------------------------------------- the file


def test_the_days_count_survives_a_restart(tmp_path: Path) -> None:
    before = Office(tmp_path, capped(budget=DAY_BYTES))
    before.caps.up.charge(96_000_000_000)
    before.caps.down.charge(7)
    before.at(NOON)
    before.caps.save()
    after = Office(tmp_path, capped(budget=DAY_BYTES), "2026-11-26 13:00:00")
    assert after.caps.today() == {"up": 96_000_000_000, "down": 7}
    assert after.caps.up.step is Step.SPREAD
    after.caps.up.charge(5)
    after.caps.save()
    again = Office(tmp_path, capped(budget=DAY_BYTES), "2026-11-26 14:00:00")
    assert again.caps.today()["up"] == 96_000_000_005
    tomorrow = Office(tmp_path, capped(budget=DAY_BYTES), "2026-11-27 13:00:00")
    assert tomorrow.caps.today() == {"up": 0, "down": 0}
    assert tomorrow.said == []


@pytest.mark.parametrize("wrong", ["1970-01-01 00:02:00", "2026-11-25 23:50:00"])
def test_the_days_count_survives_a_clock_that_is_set_after_the_start(
    tmp_path: Path, wrong: str
) -> None:
    """Begin in 1970, as a machine without a clock of its own does."""
    before = Office(tmp_path, capped(budget=DAY_BYTES))
    before.caps.up.charge(96_000_000_000)
    before.caps.save()
    after = Office(tmp_path, capped(budget=DAY_BYTES), wrong)
    assert after.caps.up.step is Step.SPREAD
    after.caps.up.charge(5)
    after.caps.save()
    after.at("2026-11-26 12:10:00")
    assert after.caps.today()["up"] == 96_000_000_005
    after.at("2026-11-27 00:00:00")
    assert after.caps.today()["up"] == 0


def test_a_count_of_a_clock_that_was_ahead_is_dropped(tmp_path: Path) -> None:
    before = Office(tmp_path, capped(budget=DAY_BYTES), "2031-01-01 00:00:00")
    before.caps.up.charge(DAY_BYTES)
    before.caps.save()
    after = Office(tmp_path, capped(budget=DAY_BYTES))
    assert after.caps.today()["up"] == 0
    after.caps.up.charge(7)
    after.caps.save()
    assert Office(tmp_path, capped(budget=DAY_BYTES)).caps.today()["up"] == 7


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", '{"day": 1, "up_bytes": 1, "down_bytes": 1}', "[" * 4000]
    + ['{"day": "today", "up_bytes": 1, "down_bytes": 1}']
    + [json.dumps({"day": "2026-11-26", "up_bytes": up, "down_bytes": 1}) for up in (-1, 1.5, "1")],
)
def test_a_damaged_count_begins_at_nothing_and_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / COUNT_FILE).write_text(text)
    office = Office(tmp_path, capped(budget=DAY_BYTES))
    assert office.caps.today() == {"up": 0, "down": 0}
    assert len(office.said) == 1
    assert office.said[0].endswith("the day's count begins at nothing")


def test_a_count_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    office = Office(tmp_path / "gone", capped(budget=DAY_BYTES))
    office.caps.save()
    office.caps.save()
    assert len(office.said) == 1
    assert "cannot be written" in office.said[0]


def test_status_says_what_holds_and_what_was_moved(tmp_path: Path) -> None:
    office = Office(tmp_path, capped("20", DAY_BYTES))
    office.caps.up.charge(1_200_000_000)
    office.at(NOON)
    text = describe(office.caps.status())
    assert text == "up 20 Mbit/s, 1.2 GB of 100 GB today; down unlimited, 0 B today"
    assert describe({}) == ""
