"""The sentence about who is slow, which `atoll top` and the status page both have."""

from __future__ import annotations

from typing import Any

import pytest
from harness import telemetry_samples
from harness.telemetry_samples import NAMES, SLOW

from atoll.peer.telemetry.findings import last_of, present, who_is_slow

BEGUN_S = 1_700_000_000.0


def row(peer: str, number: int, unix_s: float, **more: Any) -> dict[str, Any]:
    found = {"unix_s": unix_s, "kind": "row", "peer": peer, "first": number, "last": number}
    return found | {"took_s": 5.0, "counted": True} | more


def rows(**more: Any) -> list[dict[str, Any]]:
    return [row("x", number, BEGUN_S + 5 * number, **more) for number in range(1, 30)]


def test_nobody_is_slow_where_nobody_waits_and_the_narrowest_link_is_named() -> None:
    found = {"a": rows(exchange_s=4.0, compute_s=1.0), "b": rows(exchange_s=4.0, compute_s=1.0)}
    links = {"a": [{"peer": "b", "out": 1e6}], "b": [{"peer": "a", "out": 2e6}]}
    finding = who_is_slow(found, links)
    assert finding.peer == ""
    assert finding.text == (
        "nobody waits for anybody in the last 20 rounds; the exchange takes 4 s of each 5 s,"
        " and the slowest link is a to b with 8 Mbit/s"
    )
    found["b"][-1]["down"] = 5e5
    assert who_is_slow(found, links).text.endswith("link is the downlink of b with 4 Mbit/s")
    trains = {"a": rows(exchange_s=1.0, compute_s=4.0)}
    assert who_is_slow(trains, {}).text.endswith("a round is 4 s of training, 1 s exchange")
    assert who_is_slow({}, {}).text == "no round with a trainer was committed yet"


def test_who_is_late_without_training_longer_is_told_apart() -> None:
    waiting = rows(compute_s=3.0, wait_s=1.0, waited_for=["c"], exchange_s=1.0)
    late = rows(compute_s=3.0, exchange_s=1.0)
    finding = who_is_slow({"a": waiting, "b": waiting, "c": late}, {})
    assert (finding.peer, finding.share) == ("c", pytest.approx(0.2))
    assert finding.text == (
        "c is slow: the others wait 1 s of each 5 s round for it (20%), though it trains no longer"
        " than they do: its submission comes late"
    )
    # A tenth longer is noise where others wait for far more than that; else it is why they wait.
    little = rows(compute_s=3.3, exchange_s=1.0)
    assert "trains hardly longer" in who_is_slow({"a": waiting, "c": little}, {}).text
    waiting = rows(compute_s=3.0, wait_s=0.4, waited_for=["c"], exchange_s=1.0)
    text = who_is_slow({"a": waiting, "c": little}, {}).text
    assert text.endswith("because it trains 3.3 s, the others 3 s")


def test_who_has_gone_is_no_longer_present_whatever_its_rounds_were() -> None:
    """After a checkpoint was gone back to, the rounds of those that are gone are the highest."""
    before = [row("c", n, BEGUN_S + 5 * n) for n in range(900, 920)]
    later = [row("a", n, BEGUN_S + 5 * 920 + 5 * n) for n in range(1, 40)]
    assert set(present({"a": later[:10], "c": before})) == {"a", "c"}
    assert set(present({"c": before, "a": later})) == {"a"}
    # One round that nobody reaches, or a time that was ahead, makes nobody gone but its own peer.
    mad = [row("x", 2**60, BEGUN_S + 5 * 959)]
    ahead = [row("y", 1, BEGUN_S + 86400)]
    assert set(present({"y": ahead, "x": mad, "a": later})) == {"a", "x"}
    assert present({}) == {}


def test_rounds_of_hours_do_not_make_peers_gone() -> None:
    found = {
        name: [row(name, n, BEGUN_S + 3600 * n, took_s=3600.0) for n in range(1, 9 - k)]
        for k, name in enumerate("ab")
    }
    assert set(present(dict(reversed(found.items())))) == {"a", "b"}


def test_of_several_that_were_late_the_last_one_is_blamed() -> None:
    """Whoever hears of it last names all who were late then, itself among them."""
    late = ["a", "b", "c"]
    found = {
        "a": rows(compute_s=3.0, wait_s=1.0, waited_for=late, exchange_s=1.0),
        "b": rows(compute_s=3.5, wait_s=0.5, waited_for=late, exchange_s=1.0),
        "c": rows(compute_s=4.0, exchange_s=1.0),
    }
    slow = who_is_slow(found, {})
    assert (slow.peer, slow.share) == ("c", pytest.approx(0.15))
    assert slow.text.endswith("because it trains 4 s, the others 3.2 s")


# ---------------------------------------------------------------- why


def changed(of: str, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows of three, of which one is slow; those of ``of`` with other fields."""
    found = telemetry_samples.rows()
    return {
        name: [each | fields if name == of else each for each in found if each["peer"] == name]
        for name in NAMES[:3]
    }


def test_reasons_for_being_slow() -> None:
    def why(rows: dict[str, list[dict[str, Any]]]) -> str:
        finding = who_is_slow(rows, {})
        begin = f"{SLOW} is slow: the others wait 1.5 s of each 4 s round for it (38%)"
        assert finding.text.startswith(begin)
        return finding.text.removeprefix(begin)

    assert why(changed(SLOW)) == ", because it trains 3.5 s, the others 2 s"
    assert why(changed(SLOW, counted=False)) == "; its training has been in no round"
    fell_out = changed(SLOW)
    fell_out[SLOW][-1]["counted"] = False
    assert why(fell_out) == "; its training has been in no round since round 40"
    assert why(changed(SLOW, compute_s=2.0, up=1_250_000)) == (
        "; its links carry 10 Mbit/s up, those of the others 100 Mbit/s"
    )
    assert "no longer than they do" in why(changed(SLOW, compute_s=2.0))
    assert why({name: each for name, each in changed(SLOW).items() if name != SLOW}) == (
        "; it has sent no rows lately"
    )


def test_who_has_no_trainer_waits_for_nobody_and_is_no_measure_of_the_others() -> None:
    idle = {"counted": False, "compute_s": 0.0, "wait_s": 3.6, "waited_for": [NAMES[0]]}
    finding = who_is_slow(changed(NAMES[1], **idle), {})
    assert (finding.peer, finding.share) == (SLOW, pytest.approx(1.5 / 4))
    assert finding.text.endswith("because it trains 3.5 s, the others 2 s")


def test_the_last_one_is_found_in_rows_of_several_rounds() -> None:
    """Where rounds take milliseconds, the rows of two peers end at different ones."""
    waits = {
        "a": [row("a", 9, BEGUN_S) | {"first": 1, "wait_s": 0.9}],
        "b": [row("b", 7, BEGUN_S) | {"first": 1, "wait_s": 0.1}, row("b", 11, BEGUN_S + 1)],
    }
    named = row("c", 7, BEGUN_S, waited_for=["a", "b", "c"])
    assert last_of(named, "c", waits) == "b"
    assert last_of(named | {"waited_for": ["c"]}, "c", waits) == ""
    assert last_of(named | {"waited_for": ["a", "gone"]}, "c", waits) == "gone"
