"""The protocol is what it was: traces of seeds against `tests/golden/traces.txt`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from harness.tracing import Recorder, trace_name, traced

from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import Ballot
from simulation import traces

TESTS = Path(__file__).parents[1]
EFFECTS = (*get_args(ev.Effect), ev.Goal)


@pytest.mark.parametrize("first", range(0, len(traces.SAMPLE), 10))
def test_traces_of_a_few_seeds_are_as_they_were(first: int) -> None:
    """`make traces` compares all of them."""
    known = traces.kept()
    for seed in traces.SAMPLE[first : first + 10]:
        assert traces.digest_of(seed) == known[seed], f"make traces SEED={seed}"


def test_the_file_has_every_seed() -> None:
    assert [*traces.kept()] == [*range(traces.SEEDS)]


@pytest.mark.parametrize("kind", EFFECTS)
def test_every_effect_states_its_name_in_traces(kind: type) -> None:
    assert isinstance(vars(kind).get("trace"), str)
    assert "trace" not in {field.name for field in dataclasses.fields(kind)}


def test_no_two_effects_share_a_name() -> None:
    assert len({trace_name(kind) for kind in EFFECTS}) == len(EFFECTS)


def test_what_has_no_name_cannot_be_traced() -> None:
    @dataclasses.dataclass
    class Nameless:
        x: int

    class Heir(ev.Undo):
        """A name is not inherited: two effects would look alike."""

    for value in (Nameless(1), Heir(1, b"")):
        with pytest.raises(TypeError, match="neither a name in traces"):
            traced(value)


def test_a_trace_tells_values_and_order_and_not_names_nor_words() -> None:
    @dataclasses.dataclass(frozen=True)
    class Renamed:
        trace = "Undo"
        back_to: int
        link: bytes

    assert traced(Renamed(3, b"\1")) == traced(ev.Undo(3, b"\1")) == "Undo(3 01)"
    ballot = Ballot(2, b"p" * 32)
    assert traced(ev.Send(b"", ballot)) == f'Send("" Ballot(2 {"70" * 8} 0))'
    told, reworded = (ev.Note("fork", text, fields={"b": 1, "a": (2, None)}) for text in WORDS)
    assert traced(told) == traced(reworded) == 'Note(fork . "" (a=(2 -) b=1))'
    assert traced(ev.Note("fork", "", b"x")) != traced(ev.Note("dead", "", b"x"))
    begin = Begin(bytes(32), 1, 2, 0, "init", (b"p" * 32,), (1.0,), b"b" * 99)
    other = dataclasses.replace(begin, blob=b"b" * 98 + b"c")
    assert traced(begin) != traced(other)


WORDS = ("one thing", "the same in other words")


def test_a_digest_is_of_every_line() -> None:
    effects = [ev.Undo(1, b""), ev.Left()]
    both, one, late, elsewhere = Recorder(keep=True), Recorder(), Recorder(), Recorder()
    both.record(0.5, "a", effects)
    one.record(0.5, "a", effects[:1])
    late.record(0.6, "a", effects)
    elsewhere.record(0.5, "b", effects)
    assert both.lines == ['0.5000 a Undo(1 "")\n', "0.5000 a Left()\n"]
    assert len({both.digest, one.digest, late.digest, elsewhere.digest}) == 4


def test_a_trace_is_the_same_whatever_the_hashes_are() -> None:
    seed = traces.SAMPLE[0]
    for hashes in ("1", "2"):
        code = f"from simulation.traces import digest_of; print(digest_of({seed}))"
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        run = [sys.executable, "-c", code]
        found = subprocess.run(
            run, cwd=TESTS, env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == traces.kept()[seed]


def test_a_difference_names_its_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = traces.SAMPLE[:2]
    digest = traces.digest_of(first)
    monkeypatch.setattr(traces, "kept", lambda: {first: digest, second: "0" * 16})
    assert traces.main(["--jobs", "1", "--seeds", f"{first}..{first + 1}"]) == 0
    assert "1 traces are as they were" in capsys.readouterr().out
    assert traces.main(["--jobs", "1", "--seeds", f"{second}..{second + 1}"]) == 1
    told = capsys.readouterr().out
    assert f"seed {second} has the trace" in told
    assert f"make traces SEED={second}" in told
