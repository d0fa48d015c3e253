"""Protocol behaviour as text: a change of behaviour shows as a difference of a transcript."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.scenario import FOLDER, play, split

FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_transcript_is_as_written(path: Path) -> None:
    head, transcript = split(path.read_text("utf-8"))
    assert play(head) == transcript, "make scenarios-rewrite, and read the difference"


def test_there_are_a_dozen() -> None:
    assert len(FILES) >= 12
