"""Protocol behaviour as text: a change of behaviour shows as a difference of a transcript."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.cluster import peer_id

from simulation.scenario import FOLDER, Script, play, split

FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_transcript_is_as_written(path: Path) -> None:
    head, transcript = split(path.read_text("utf-8"))
    assert play(head) == transcript, "make scenarios-rewrite, and read the difference"


def test_there_are_a_dozen() -> None:
    assert len(FILES) >= 12


def test_who_is_left_out_in_vain_is_blamed_alone() -> None:
    """Let a round that needs three be given up after two stalls: those who waited did nothing."""
    script = Script()
    script.do_rules("auto", "halt", "auto", "3")
    script.do_hosts("a", "b", "c")
    script.do_form()
    script.do_deaf("c")
    script.do_run("4.6s")
    lead = script.cluster.host("a").node.coordinator
    assert lead is not None
    assert lead.eligibility.flaky_peers._records.keys() == {peer_id("c")}
