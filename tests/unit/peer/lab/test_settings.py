"""What a lab may be asked for, and what ``atoll lab`` makes of its options."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.peer.cli import lab
from atoll.peer.cli.main import main
from atoll.peer.lab.settings import (
    QUEUE_BYTES_MIN,
    LabSettings,
    PathSettings,
    address_of,
    queue_bytes,
    rate_of,
)


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ({"hosts": 1}, "2 to 64 hosts"),
        ({"hosts": 65}, "2 to 64 hosts"),
        ({"rate_mbit": -1}, "Mbit/s"),
        ({"rate_mbit": math.nan}, "Mbit/s"),
        ({"rate_mbit": 100e6}, "Mbit/s"),
        ({"rate_mbit": {0: (3, -3)}}, "Mbit/s"),
        ({"rate_mbit": {4: 3}}, "no host 4"),
        ({"rtt_ms": -1}, "delay"),
        ({"rtt_ms": math.inf}, "delay"),
        ({"rtt_ms": 20_002}, "delay"),
        ({"rtt_ms": 10, "jitter_ms": 6}, "jitter"),
        ({"jitter_ms": -1}, "jitter"),
        ({"loss": 100.1}, "percent"),
        ({"loss": math.nan}, "percent"),
        ({"mtu_bytes": 500}, "MTU"),
        ({"mtu_bytes": 1 << 16}, "MTU"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_what_no_network_can_be_is_refused(wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        LabSettings(**{"hosts": 4} | wrong)


def test_a_path_has_half_of_the_round_trip() -> None:
    settings = LabSettings(2, rtt_ms=50, jitter_ms=25, loss=0.5, reorder=True)
    assert settings.path == PathSettings(delay_ms=25, jitter_ms=25, loss=0.5, reorder=True)


def test_rates_by_host() -> None:
    assert rate_of(100, 3) == (100, 100)
    assert rate_of({3: (20, 100)}, 3) == (20, 100)
    assert rate_of({3: 20}, 3) == (20, 20)
    assert rate_of({3: 20}, 0) == (0, 0)


def test_addresses_end_in_the_host_plus_one() -> None:
    assert [address_of(host) for host in (0, 63)] == ["10.78.0.1", "10.78.0.64"]


@given(st.floats(0, 1e5), st.floats(0, 2e4))
def test_a_queue_holds_one_bandwidth_delay_product(rate_mbit: float, rtt_ms: float) -> None:
    product = rate_mbit * 1e6 / 8 * rtt_ms / 1e3
    assert queue_bytes(rate_mbit, rtt_ms) >= QUEUE_BYTES_MIN
    assert product <= queue_bytes(rate_mbit, rtt_ms) <= max(product + 1, QUEUE_BYTES_MIN)


# ---------------------------------------------------------------- atoll lab


@pytest.mark.parametrize(
    ("text", "rate"), [("3=20", (3, (20, 20))), ("0=20.5/100", (0, (20.5, 100)))]
)
def test_the_rate_of_one_host(text: str, rate: tuple[int, tuple[float, float]]) -> None:
    assert lab.host_rate(text) == rate


@pytest.mark.parametrize("text", ["", "3", "x=3", "3=", "3=1/", "3=1/2/3"])
def test_a_rate_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        lab.host_rate(text)


@pytest.mark.parametrize("arguments", [["--hosts", "x"], ["--host-rate", "x"], ["--loss"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["lab", *arguments])
    assert "usage: atoll lab" in capsys.readouterr().err


def test_settings_are_checked_before_anything_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--hosts", "65", "--", "true"]) == 2
    assert main(["lab", "--hosts", "4", "--host-rate", "4=20", "--", "true"]) == 2
    assert main(["lab", "--jitter-ms", "30", "--", "true"]) == 2
    assert capsys.readouterr().err.count("ATOLL-E10") == 3


@pytest.mark.parametrize("line", [["--", "echo", "--hosts"], ["echo", "--hosts"]])
def test_what_follows_is_the_command(line: list[str]) -> None:
    parser = argparse.ArgumentParser()
    lab.add_lab_verb(parser.add_subparsers())
    parsed = parser.parse_args(["lab", "--hosts", "3", *line])
    assert parsed.hosts == 3
    assert parsed.line[-2:] == ["echo", "--hosts"]
