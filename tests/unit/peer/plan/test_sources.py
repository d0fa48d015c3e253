"""Where a plan has its figures from: lists that people write, and what a run has measured."""

from __future__ import annotations

from typing import Any

import pytest
from harness.telemetry_samples import NAMES, rows, status

from atoll.collectives.errors import AtollError, ConfigError
from atoll.peer.links.link_table import LOCAL_BYTES_PER_S
from atoll.peer.plan.model import Variant
from atoll.peer.plan.sources import (
    HostDefaults,
    parse_variants,
    sketch_of_list,
    sketch_of_run,
)

CSV = """# home and work
name, up_mbit, down_mbit, rtt_ms, step_s
home, 20, 200, 40, 1.5

lab, 500, 400, 10, 0.5
"""
TOML = """
[[host]]
name = "home"
up_mbit = 20
down_mbit = 200
rtt_ms = 40
price_hour = 1.5

[[host]]
name = "lab"
up_mbit = 500
down_mbit = 400
rtt_ms = 10

[[link]]
between = ["lab", "home"]
mbit = 8
rtt_ms = 100
"""
NOTHING = HostDefaults()


def test_a_list_of_commas() -> None:
    run = sketch_of_list(CSV, 1_000_000, HostDefaults(tokens_per_step=64), is_csv=True)
    assert [(host.name, host.step_s) for host in run.hosts] == [("home", 1.5), ("lab", 0.5)]
    assert run.network.up.tolist() == [2.5e6, 62.5e6]
    assert run.network.down.tolist() == [25e6, 50e6]
    assert run.network.latency_s[0, 1] == pytest.approx(0.0125)  # half of 25 ms
    assert run.in_tokens


def test_a_list_of_semicolons_has_decimal_commas() -> None:
    """Read a list as spreadsheets write it in most of Europe."""
    text = CSV.replace(",", ";").replace("1.5", "1,5").replace("home;", "home, sweet home;")
    run = sketch_of_list(text, 1_000_000, NOTHING, is_csv=True)
    assert [(h.name, h.step_s) for h in run.hosts] == [("home, sweet home", 1.5), ("lab", 0.5)]
    assert run.network.up.tolist() == [2.5e6, 62.5e6]


def test_a_list_of_tables_may_say_what_is_between_two() -> None:
    run = sketch_of_list(TOML, 1_000_000, HostDefaults(step_s=0.25), is_csv=False)
    assert [(host.step_s, host.price_hour) for host in run.hosts] == [(0.25, 1.5), (0.25, 0.0)]
    assert run.network.pair[0, 1] == run.network.pair[1, 0] == 1e6
    assert run.network.latency_s[1, 0] == pytest.approx(0.05)
    assert not run.in_tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,up_mbit\na,5", "down_mbit is missing"),
        (CSV.replace("rtt_ms", "ping"), "home: 'ping' is none of"),
        (CSV.replace("20,", "fast,"), "home: up_mbit is 'fast', no number"),
        (CSV.replace("20,", "0,"), "home: a link has more than 0"),
        (CSV.replace("20,", "nan,"), "which cannot be"),
        (CSV.replace("lab", "home"), "home is in the list twice"),
        (CSV.replace("step_s", "steps"), "home: 'steps' is none of"),
        (CSV.replace(", 1.5", ""), "not as many values"),
        (CSV.replace("1.5", "0"), "home: seconds per step"),
        ("", "the list has no hosts"),
        (CSV.partition("home, ")[0], "the list has no hosts"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sketch_of_list(text, 1_000_000, NOTHING, is_csv=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[host", "is no TOML"),
        ("", "the list has no hosts"),
        ("host = 3", "are \\[\\[host\\]\\] tables"),
        (TOML + "\n[other]\n", "'other', which is neither"),
        (TOML.replace('"lab", "home"', '"lab", "lab"'), "between two hosts"),
        (TOML.replace('"lab", "home"', '"lab", "moon"'), "between two hosts"),
        (TOML.replace("mbit = 8", "rate = 8"), "between two hosts"),
        (TOML.replace("mbit = 8", "mbit = 0"), "lab to home: a link has more than 0 Mbit/s"),
    ],
)
def test_what_is_wrong_with_tables_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sketch_of_list(text, 1_000_000, HostDefaults(step_s=1.0), is_csv=False)


def with_links(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As each peer tells now and then: 100 Mbit/s and 30 ms to each other."""
    for row in found[:3]:
        others = [name for name in NAMES[:3] if name != row["peer"]]
        row["links"] = [{"peer": o, "rtt_s": 0.03, "out": 12.5e6, "loss": 0.0} for o in others]
    return found


def test_a_run_is_planned_by_what_it_has_measured() -> None:
    """Rounds of 20 steps: two peers take 2 s for them, one 3.5 s; 50,000 tokens in a step."""
    run = sketch_of_run(status(), with_links(rows()), NOTHING)
    steps_s = {host.name: host.step_s for host in run.hosts}
    assert steps_s == pytest.approx({NAMES[0]: 0.1, NAMES[1]: 0.1, NAMES[2]: 0.175})
    assert run.hosts[0].tokens_per_step == pytest.approx(1e6 / 20)
    assert (run.parameters, run.hosts[run.coordinator].name) == (120_640, NAMES[0])
    assert run.network.pair[0, 1] == 12.5e6
    assert run.network.latency_s[0, 1] == pytest.approx(0.015)
    said = sketch_of_run(status(), rows_told := with_links(rows()), HostDefaults(step_s=9.0), 7)
    assert (said.hosts[0].step_s, said.parameters, len(rows_told)) == (9.0, 7, 24)


@pytest.mark.parametrize("restart", [1, 3, 5])
def test_a_trainer_that_was_started_again_is_planned_as_before(restart: int) -> None:
    """Begin totals at 0 again. Here each round has 25 steps, not the 20 that the run has."""
    found = with_links(rows())
    for place, row in enumerate(row for row in found if row["peer"] == NAMES[1]):
        done = place + 1 - restart if place >= restart else 2 + place
        row |= {"steps": 25.0 * done, "tokens": 1e6 * done}
    run = sketch_of_run(status(), found, NOTHING)
    assert run.in_tokens
    assert run.hosts[1].step_s == pytest.approx(2.0 / 25)
    assert run.hosts[1].tokens_per_step == pytest.approx(1e6 / 25)


def test_rounds_before_a_trainer_tells_its_tokens_are_left_out() -> None:
    found = with_links(rows())
    for row in found[:12]:
        del row["tokens"]
    run = sketch_of_run(status(), found, NOTHING)
    assert [host.tokens_per_step for host in run.hosts] == pytest.approx([1e6 / 20] * 3)


def test_peers_on_one_machine_have_links_that_nobody_measures() -> None:
    found = with_links(rows())
    for row in found:
        row["links"] = [link | {"out": None} for link in row.get("links", ())]
    members = [member | {"local": not member["you"]} for member in status()["members"]]
    run = sketch_of_run(status(members=members), found, NOTHING)
    assert run.network.pair[0, 1] == run.network.pair[2, 0] == LOCAL_BYTES_PER_S


def test_steps_of_fragments_are_between_their_rounds() -> None:
    """A round of one of four fragments in 4 s: five of 20 steps, exchanged while hosts train."""
    spec = {"sync_every": 20, "method": "streaming_diloco", "fragments": 4}
    run = sketch_of_run(status(spec=spec), with_links(rows()), NOTHING)
    assert run.fragments == 4
    assert [host.step_s for host in run.hosts] == pytest.approx([0.8] * 3)


def test_a_run_that_has_measured_nothing_yet_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="no link of this run"):
        sketch_of_run(status(), rows(), NOTHING)
    with pytest.raises(ConfigError, match="fewer than two peers"):
        sketch_of_run(status(), [], NOTHING)


def test_candidates_are_read() -> None:
    found = parse_variants("diloco:30:int8, gradient_average:1:float32,")
    assert found == (Variant("diloco", 30, "int8"), Variant("gradient_average", 1, "float32"))
    assert parse_variants("") == ()
    huge = f"diloco:{'9' * 5000}:int8"
    for text in (huge, "diloco", "diloco:30", "diloco:x:int8", "nothing:30:int8", "diloco:²:int8"):
        with pytest.raises(AtollError):
            parse_variants(text)
