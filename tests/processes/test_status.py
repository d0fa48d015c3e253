"""Scripts read `atoll status --json`: its keys and types are what they were.

`make golden-rewrite ARGS=status.txt` writes them anew, where a change was meant.
"""

from __future__ import annotations

from pathlib import Path

from harness import golden_status, golden_text


def test_status_has_the_keys_types_and_values_that_are_written(tmp_path: Path) -> None:
    found = golden_status.statuses(tmp_path)
    differs = golden_text.wrong("status.txt", golden_status.status_lines(found))
    assert not differs, differs


def test_a_type_and_a_steady_value_are_told_apart() -> None:
    def lines(**status: object) -> list[str]:
        return golden_status.lines_of(status)

    assert lines(fork=False) == ["fork bool false"]
    assert lines(round=3) == lines(round=4) == ["round number"]
    assert lines(round="3") == ["round string"]
    assert lines(policy="majority") != lines(policy="any")
    assert lines(policy="in words") == ["policy string"]
    assert lines(members=[{"role": None}, {"role": "replica"}]) == [
        "members array",
        "members[] object",
        "members[].role null|string",
    ]
    assert lines(events=[{"kind": "x", "extra": 1}])[2:] == ["events[].kind string"]
    assert lines(streams={"aes": 1}) == ["streams object"]
