"""`atoll verify FILE`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.convicts import left_behind

from atoll.peer.cli.main import main


def test_evidence_that_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = left_behind("dense shift")
    (tmp_path / "e").write_bytes(evidence.encoded)
    assert main(["verify", str(tmp_path / "e")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("proven: ")
    assert "signed a wrong result" in shown
    assert evidence.culprit.hex() in shown
    assert evidence.digest.hex() in shown
    assert "word of these peers" not in shown


def test_evidence_that_rests_on_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = left_behind("wrong part")
    (tmp_path / "e").write_bytes(evidence.encoded)
    assert main(["verify", str(tmp_path / "e")]) == 0
    shown = capsys.readouterr().out
    assert "word of these peers" in shown
    for peer in evidence.terms.participants:
        assert peer.hex() in shown


def test_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = left_behind("draw abort")
    (tmp_path / "e").write_bytes(evidence.encoded)
    assert main(["verify", str(tmp_path / "e"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["banned"] == [evidence.culprit.hex()]
    assert shown["stands_alone"] is True
    assert shown["round"] == evidence.terms.round


@pytest.mark.parametrize("data", [b"", b"atoll evidence 1\nrubbish", b"\0" * 1000])
def test_what_is_no_evidence(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e").write_bytes(data)
    assert main(["verify", str(tmp_path / "e")]) == 27
    assert "ATOLL-E33" in capsys.readouterr().err


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "ATOLL-E10" in capsys.readouterr().err
