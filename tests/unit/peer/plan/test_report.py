"""What `atoll plan` says: the text as tests/golden/plan.txt has it, and the figures of JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness.plans import sketch

from atoll.peer.cli import main
from atoll.peer.cli.plan import read_losses
from atoll.peer.plan.advice import advise
from atoll.peer.plan.model import Variant
from atoll.peer.plan.report import caveats, text_of

GOLDEN = Path(__file__).parents[3] / "golden" / "plan.txt"
LIST = """name,up_mbit,down_mbit,rtt_ms,step_s
home,20,200,40,1.5
lab,500,500,10,0.8
office,50,50,20,0.8
cloud,1000,1000,30,0.8
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.csv"
    path.write_text(LIST)
    return path


def test_the_whole_text(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--parameters 124M --tokens-per-step 16384 --price-hour 1.2 --price-gb 0.09"
    assert main.main(["plan", "--links", str(hosts), *options.split()]) == 0
    assert capsys.readouterr().out == GOLDEN.read_text("utf-8")


def test_the_same_for_programs(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--parameters 10M --json --candidates diloco:30:int8,streaming:30:fp4_e3m0"
    assert main.main(["plan", "--links", str(hosts), *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in found["candidates"]] == ["diloco", "streaming"]
    assert found["best"] in found["candidates"]
    first = found["candidates"][0]
    assert sum(each["seconds"] for each in first["parts"]) == pytest.approx(first["round_s"])
    assert all(each["source"] for each in first["parts"])
    assert first["cost_per_billion_tokens"] is None  # nobody has said how many tokens a step has


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "how large is the model?"),
        ("--parameters 1M --candidates x", "'x' is not METHOD:STEPS:CODEC"),
    ],
)
def test_what_is_missing_is_said(
    words: str, said: str, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "--links", str(hosts), *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_list_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--links", str(tmp_path / "no.csv"), "--parameters", "1M"]
    assert main.main(line) == 2
    said = capsys.readouterr().err
    assert "there is no list of hosts at" in said
    assert "docs/choosing.md has an example" in said


def test_a_list_may_begin_with_a_byte_order_mark(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.write_text(LIST, "utf-8-sig")  # as Excel writes it
    assert main.main(["plan", "--links", str(hosts), "--parameters", "124M"]) == 0
    assert "home" in capsys.readouterr().out


def test_a_list_is_known_by_the_end_of_its_name(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = hosts.rename(hosts.with_name("HOSTS.CSV"))
    assert main.main(["plan", "--links", str(loud), "--parameters", "124M"]) == 0
    assert "home" in capsys.readouterr().out


def test_without_a_daemon_a_list_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "--home", str(tmp_path)]) == 14
    said = capsys.readouterr().err
    assert f"no daemon runs at {tmp_path}" in said
    assert "--links FILE" in said


@pytest.mark.parametrize(("silent", "who"), [(1, "a"), (3, "a, b and c"), (4, "4 hosts"), (5, "")])
def test_it_is_said_whose_tokens_are_not_known(silent: int, who: str) -> None:
    """Say it where some are: then all training is counted in steps, as if steps were alike."""
    losses, run = read_losses(), sketch([100] * 5, 20, 0.2, 1e7, tokens=4096)
    hosts = [replace(host, tokens_per_step=0.0) for host in run.hosts[:silent]]
    run = replace(run, hosts=(*hosts, *run.hosts[silent:]))
    said = " ".join(caveats(run, advise(run, losses, [Variant("diloco", 30, "int8")]), losses))
    assert ("is counted in local steps" in said) == bool(who)
    assert not who or f"tokens a step of {who} has: say --tokens-per-step" in said


def test_the_limits_of_a_loss_are_said() -> None:
    losses = read_losses()
    run = sketch([20] * 4, 300, 0.2, 1e7)
    said = " ".join(caveats(run, advise(run, losses, [Variant("streaming", 60, "int8")]), losses))
    assert "merged one step late, and here it is about" in said
    assert "60 steps in a round were not measured" in said
    assert "int8 was not measured with it: taken as Streaming E3M0" in said
    assert "0.8M parameters" in said
    slow = sketch([1, 1], 200, 0.1, 1e8)
    text = text_of(slow, advise(slow, losses), losses)
    assert "but by these losses, of short runs, the fastest machine by itself gets further" in text
    assert text.index("gets further") < text.index("round  ")  # before anything that persuades
